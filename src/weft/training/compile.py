"""`torch.compile` for training: when it is possible, and batches of a static shape (`data.batching.static_shape`)."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from weft.config.run import Run
from weft.data.batching.loader import Loader
from weft.data.batching.packed_items import PackedItems
from weft.data.batching.static_shape import StaticShape
from weft.errors import ConfigError
from weft.models.base import Model
from weft.nn.kernels.dispatch import can_compile
from weft.tasks.base import Task
from weft.tasks.batch import Batch, Item
from weft.tasks.capabilities import StaticBatches, StreamReading
from weft.tasks.corpus.build import num_cpus
from weft.tasks.multitask import MultiTask
from weft.training.distributed import World

MAX_WORKERS = 4  # each collates 3 to 9 million tokens a second of BERT's pre-training


def make_loader(run: Run, task: Task, body: Model, data: PackedItems, world: World) -> Loader[Batch]:
    """Return the loader: batches of similar lengths, or of one static shape if the run is compiled."""
    train, workers = run.train, num_workers(run, world)
    loader: Loader[Batch] = Loader(
        data,
        task.collate,
        train.tokens_per_batch(1),  # of items, each counts as one
        train.seed,
        world.rank,
        world.size,
        workers,
        pin=world.device.type == "cuda" and workers > 0,
        unit="tokens" if train.batch_tokens else "items",
        temperature=task.config.temperature if isinstance(task, MultiTask) else 1.0,
    )
    loader.streams = train.accumulate or world.size
    loader.sampler = task.sampler(data, run, loader.streams) if isinstance(task, StreamReading) else None
    lengths = task.sequence_lengths(data) if isinstance(task, StaticBatches) else None
    static_shape = loader.sampler.static_shape if loader.sampler else None
    static = static_shape is not None or (lengths is not None and train.batch_size is None)
    reason = _why_not_compiled(run, task, body, static, world.device)
    if train.compile and reason:
        raise ConfigError(f"train.compile: {reason}; leave it out, or set it to false")
    if not reason and train.compile is not False and isinstance(task, StaticBatches):
        loader.lengths = lengths
        loader.static_shape = static_shape or StaticShape.of(lengths, train.batch_tokens)  # type: ignore[arg-type]
        loader.collate = PaddedCollate(task, loader.static_shape)
    return loader


def num_workers(run: Run, world: World) -> int:
    """Return the number of processes that collate ahead: the recipe's, else as many as pay on this machine.

    On a CPU none do: a step takes 30 times as long as its batch, on all cores. On a GPU each rank has as many as the
    cores beside its own allow, up to `MAX_WORKERS`.
    """
    if run.data.workers is not None:
        return run.data.workers
    if world.device.type != "cuda":
        return 0
    return min(MAX_WORKERS, max(num_cpus() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")) - 1, 0))


def _why_not_compiled(run: Run, task: Task, body: Model, static: bool, device: torch.device) -> str:
    """Return the reason why a run cannot be compiled; "" if it can. `static`: its batches can have one shape."""
    if device.type != "cuda" or run.train.precision != "bf16":
        return f"pays on a GPU in bf16, but this is {device.type} in {run.train.precision}"
    if run.train.parallel == "fsdp":
        return "gathers no weights that train.parallel=fsdp has sharded"
    if torch.cuda.is_available() and not can_compile(device):
        return "needs Triton, and a GPU of Ampere or newer"
    if run.train.distill is not None:
        return "a teacher answers beside the student, and both do not go into one graph"
    if not body.supports_compile:
        return f"the model {run.model.name!r} does not go into one graph"
    if not static and run.train.batch_size is not None:
        return "batches of train.batch_size items have no one shape; give train.batch_tokens"
    if not static:
        return f"the batches of the task {run.task.name!r} have no one shape"
    return ""


@dataclass(frozen=True)
class PaddedCollate:
    """A task's collate function, followed by padding to a static shape."""

    task: StaticBatches
    static_shape: StaticShape

    def __call__(self, items: Sequence[Item], rng: np.random.Generator) -> Batch:
        """Collate items to a batch and pad it."""
        return self.task.collate(items, rng).to_static_shape(
            self.static_shape, self.task.num_positions(self.static_shape)
        )
