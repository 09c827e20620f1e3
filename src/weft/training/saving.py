"""Checkpoints that are written while training goes on: a copy in main memory first, then files, in a thread.

Training stands still for the copy alone. One checkpoint is written at a time: the next one waits for it, and so do the
end of a training and its stop by a signal. What goes wrong in the thread is raised at the next of these, or after the
next update. The files and their order are those of `weft.checkpoint.store`, whoever writes them.
"""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from weft.checkpoint import contents
from weft.checkpoint.contents import Progress
from weft.checkpoint.optimizer_state import optimizer_tensors
from weft.checkpoint.store import Store
from weft.checkpoint.tensor_files import full_tensor
from weft.config.run import Run
from weft.tokenization.trainable import Tokenizer
from weft.training.distributed import World
from weft.training.reporting import CheckpointSaved, Reporter


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint holds, in main memory: training does not change it."""

    run: Run
    tokenizer: Tokenizer
    weights: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    random: Mapping[str, Tensor]
    carried: Mapping[str, Tensor]
    progress: Progress

    def write(self, folder: Path) -> None:
        """Write the files of a checkpoint, without its manifest."""
        contents.write_weights(folder, self.run, self.tokenizer, self.weights)
        contents.write_state(folder, self.progress, self.optimizer, self.random)
        if self.carried:
            contents.write_hidden_states(folder, self.carried)


def copy_weights(head: nn.Module, world: World) -> dict[str, Tensor]:
    """Return whole weights by name, copied to the main rank's memory; the other ranks take part, and get none."""
    return _copy(contents.weights(head), world)


def copy_optimizer(optimizer: torch.optim.Optimizer, head: nn.Module, world: World) -> dict[str, Tensor]:
    """Return the optimizer's state by key and parameter in the same way."""
    return _copy(optimizer_tensors(optimizer, head), world)


def _copy(tensors: Mapping[str, Tensor], world: World) -> dict[str, Tensor]:
    copies: dict[str, Tensor] = {}
    for name, value in tensors.items():
        whole = full_tensor(value)  # one at a time: a device has no room for all of a sharded model
        if world.main:
            copies[name] = whole.to("cpu", copy=True)
    return copies


class Saver:
    """Writes the checkpoints of a run, one at a time, in a thread."""

    def __init__(self, store: Store, report: Reporter) -> None:
        self._store, self._report = store, report
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: tuple[int, Future[Path]] | None = None

    def start(self, snapshot: Snapshot, best: bool) -> None:
        """Begin to write a checkpoint, once the one before is written; `best` links it as the best."""
        self.join()
        step = snapshot.progress.step
        self._pending = step, self._pool.submit(self._store.save, step, snapshot.write, best)

    def poll(self) -> None:
        """Report the checkpoint that is being written if that has ended; raise its error."""
        if self._pending and self._pending[1].done():
            self.join()

    def join(self) -> None:
        """Wait for the checkpoint that is being written, and report it; raise its error."""
        if self._pending:
            (step, future), self._pending = self._pending, None
            self._report(CheckpointSaved(step, future.result()))
