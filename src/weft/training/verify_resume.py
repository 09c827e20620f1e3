"""`weft train RECIPE --verify-resume`: whether a run that is broken off and resumed is the same as one that is not.

A short slice of the recipe's own training is made twice, on this machine and with these processes: unbroken, and broken
off after a checkpoint, thrown away with two steps that followed it, and resumed from the files alone. Compared are loss
and gradient norm of each step, and at the end each weight and optimizer state, bit by bit.
"""

import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from weft.checkpoint.store import Store, verify_or_offer
from weft.config.run import Run
from weft.errors import ConfigError, TrainingError
from weft.tasks.factory import make_task, resolve_run
from weft.tasks.pretrained_embeddings import check_vectors
from weft.tokenization.trainable import load_tokenizer
from weft.training.distributed import World, join_world, leave_world
from weft.training.finetuning import check_tuning
from weft.training.reporting import Notices
from weft.training.run import make_tokenizer, make_trainer, share_update
from weft.training.saving import copy_optimizer, copy_weights
from weft.training.self_fitting import FitLoop

BREAK, END = 4, 8  # the step of the checkpoint, and the last one


@dataclass(frozen=True)
class Slice:
    """The first steps of a training: sum of losses and gradient norm by step, and the tensors at its end."""

    steps: dict[int, tuple[float, float]]
    tensors: dict[str, Tensor]


def verify_resume(run: Run, out: Path, tell: Callable[[str], object]) -> str:
    """Train a slice unbroken and broken, in a folder beside `out` that is removed; return what was found to be equal.

    A difference is an error that names the first step, or else the first tensor, that differs.
    """
    check_tuning(run)
    world = join_world(run.train.device, run.train.rank_timeout)
    folder = out.with_name(f"{out.name}.verify-resume")
    with ExitStack() as stack:
        stack.callback(leave_world, world)
        stack.callback(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled())
        if world.main:
            shutil.rmtree(folder, ignore_errors=True)
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
        world.barrier()
        unbroken = _train(run, folder / "unbroken", END, world, tell)
        _train(run, folder / "broken", BREAK, world, tell, thrown_away=2)
        resumed = _train(run, folder / "broken", END, world, tell, resume=True)
        world.barrier()
    return _compare(unbroken, resumed)


def _train(
    run: Run,
    out: Path,
    last: int,
    world: World,
    tell: Callable[[str], object],
    thrown_away: int = 0,
    resume: bool = False,
) -> Slice:
    """Train up to step `last` and save a checkpoint; make more steps, of which nothing is kept."""
    task = make_task(run)
    run = resolve_run(run, task)
    store = Store(out)
    with ExitStack() as stack:
        if world.main:
            stack.enter_context(store.lock())
            store.prepare()
        folder = verify_or_offer(store) if resume else None
        run = share_update(run, world, folder)
        world.barrier()
        if not folder:
            check_vectors(run)
        tokenizer = load_tokenizer(run.tokenizer, folder) if folder else make_tokenizer(run, task)
        trainer = make_trainer(run, task, tokenizer, world, store, stack, folder, Notices(tell), resume)
        if isinstance(trainer, FitLoop):
            raise ConfigError(f"--verify-resume: {run.model.name!r} is fitted in whole passes, not trained by steps")
        steps = trainer.train_until(last)
        tensors = copy_weights(trainer.trained, world)
        tensors |= copy_optimizer(trainer.optimizer, trainer.trained, world)
        trainer.save()
        if trainer.saver:
            trainer.saver.join()
        if thrown_away:
            trainer.train_until(last + thrown_away)
    return Slice(steps, tensors)


def _compare(unbroken: Slice, resumed: Slice) -> str:
    """Return what is equal; raise an error that names what differs first."""
    remedy = "results depend on more than the checkpoint; on a GPU set train.deterministic=true"
    for step, numbers in resumed.steps.items():
        for name, ours, theirs in zip(("loss", "gradient norm"), numbers, unbroken.steps[step], strict=True):
            if ours != theirs:
                raise TrainingError(
                    f"--verify-resume: step {step} differs: its {name} is {ours!r} after a resume from step {BREAK}, "
                    f"but {theirs!r} unbroken; {remedy}"
                )
    for name in unbroken.tensors:
        if not torch.equal(unbroken.tensors[name], resumed.tensors[name]):
            raise TrainingError(f"--verify-resume: {name} differs after step {END}; {remedy}")
    return (
        f"steps {BREAK + 1} to {END} after a resume are those of the unbroken training, bit for bit: losses, gradient "
        f"norms, and {len(unbroken.tensors)} weights and optimizer states"
    )
