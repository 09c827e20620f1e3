"""Checkpoint averaging at the end of training: if the mean of the last checkpoints is better, it is the best model.

Training is not affected: `last` is the checkpoint of the last step, so that a larger budget continues exactly from it.
"""

from pathlib import Path

from weft.checkpoint import contents
from weft.checkpoint.averaging import AverageInfo, mean_weights, write_average_info
from weft.checkpoint.manifest import order, verify_checkpoint
from weft.checkpoint.store import average_name
from weft.tasks.head import Head
from weft.training.metric_ranking import metric_of, sign_of
from weft.training.reporting import CheckpointSaved, Notice
from weft.training.trainer import Trainer


def try_average(trainer: Trainer, count: int) -> None:
    """Evaluate the mean of the last `count` checkpoints, or fewer, and save it as `best` if better; on all ranks."""
    store, step = trainer.store, trainer.progress.step
    assert store, "there are no checkpoints without a store"
    best = store.best()
    if best and best.name == average_name(step):
        return  # it was averaged already
    folders = regular_checkpoints(trainer)[-count:]
    if len(folders) < 2:
        reason = "there is one checkpoint alone, the last; save more often by train.save_every"
        trainer.report(Notice(f"train.average: nothing to average: {reason}"))
        return
    for folder in folders:
        verify_checkpoint(folder)
    head = trainer.parallel.finish()
    contents.copy_into_head(head, mean_weights(folders), folders[-1])
    rank = trainer.shared_rank(trainer.evaluate(head)) if trainer.evaluate else None
    before = trainer.best_rank()
    if rank is None or before is None or rank < before:
        about = AverageInfo([folder.name for folder in folders], rank)
        trainer.world.barrier()  # every rank has read the checkpoints before one is removed
        if trainer.world.main:
            path = store.save_average(step, lambda folder: _write(trainer, head, folder, about))
            trainer.report(CheckpointSaved(step, path))
    trainer.report(Notice(f"the average of the last {len(folders)} checkpoints {_verdict(trainer, rank, before)}"))


def regular_checkpoints(trainer: Trainer) -> list[Path]:
    """List the checkpoints of `train.save_every` and the one at the end, oldest first; not that of step 0.

    Those saved on a signal are left out, so that a resumed run has the same average as one without interruption.
    """
    assert trainer.store
    end = trainer.progress.step
    steps = {order(folder)[0]: folder for folder in trainer.store.checkpoints()}
    regular = {step for step, folder in steps.items() if 0 < step < end and trainer.is_regular(folder)}
    return [folder for step, folder in steps.items() if step in regular or step == end]


def _write(trainer: Trainer, head: Head, folder: Path, about: AverageInfo) -> None:
    contents.write_model(folder, trainer.run, trainer.task.tokenizer, head)
    write_average_info(folder, about)


def _verdict(trainer: Trainer, rank: list[float] | None, before: list[float] | None) -> str:
    if rank is None or before is None:
        return "is the best model: there is no validation data to judge it by"
    scores = f"it has {_score(trainer, rank)}, the best so far {_score(trainer, before)}"
    return f"is the best model: {scores}" if rank < before else f"is no better: {scores}"


def _score(trainer: Trainer, rank: list[float]) -> str:
    metric, loss = rank[0] * sign_of(trainer.run, trainer.task), rank[1]
    name = metric_of(trainer.run, trainer.task)
    return f"{name} {metric:.4g}" + ("" if name == "loss" else f" (loss {loss:.4g})")
