"""The budget of a run in steps, and when it evaluates if `train.eval_every` is left out.

An epoch is all the batches that the loader plans for it, whose number may differ a little from one to the next, as they
are drawn anew. So `train.epochs` is counted in batches: those of all whole epochs, and of the last its share. They are
the same for any number of processes and any `train.accumulate`; a step reads `accumulate` of them, over all processes,
and the last step may read on into the next epoch.
"""

import math
from typing import Any

from weft.checkpoint.contents import Progress
from weft.config.sections import Every, Train
from weft.data.batching.loader import Loader

EVALUATIONS = 10  # of a run that does not say when; fewer if it has fewer epochs


def resolve_budget(train: Train, loader: Loader[Any], progress: Progress, processes: int, evaluates: bool) -> Train:
    """Return the section with `epochs` as `steps` and `accumulate` filled in; if the run `evaluates`, `eval_every` too.

    With other batches an update than before, the steps are those made and those that the remaining batches take.
    """
    per_step = train.accumulate or processes
    train = train.model_copy(update={"accumulate": per_step})
    if train.epochs is not None:
        remaining = epoch_batches(loader, train.epochs) - batches_read(loader, progress)
        steps = max(1, progress.step + math.ceil(remaining / per_step))
        train = train.model_copy(update={"steps": min(steps, train.steps or steps)})
    if evaluates and train.eval_every is None:
        train = train.model_copy(update={"eval_every": _default_eval_every(train, loader, per_step)})
    return train


def epoch_batches(loader: Loader[Any], epochs: float) -> int:
    """Return the number of batches, over all ranks, in the first `epochs` epochs."""
    whole = int(epochs)
    rest = round(epochs - whole, 9)
    count = sum(map(loader.num_batches, range(whole)))
    return count + math.ceil(round(rest * loader.num_batches(whole), 6)) if rest else count


def batches_read(loader: Loader[Any], progress: Progress) -> int:
    """Return the number of batches, over all ranks, that a run has read."""
    return sum(map(loader.num_batches, range(progress.position.epoch))) + progress.position.batch


def _default_eval_every(train: Train, loader: Loader[Any], per_step: int) -> Every | None:
    """Return each epoch, of 2 to 10, else ten times a run, with a report; None: by the share of a budget of time."""
    if train.time is not None or train.flops is not None or train.steps is None:
        return None
    if 2 <= round(train.steps * per_step / loader.num_batches(0), 1) <= EVALUATIONS:
        return "epoch"
    return math.ceil(train.steps / EVALUATIONS / train.report_every) * train.report_every
