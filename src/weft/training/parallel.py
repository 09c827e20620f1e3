"""How the processes of a training share a model: each has all of it (DDP), or its shard of every weight (FSDP).

    ddp     every process has the weights and the optimizer's state; gradients are averaged (Li et al. 2020)
    fsdp    a process has 1/N of each weight, gradient and optimizer state; a block's weights are gathered for its
            forward and backward pass, and freed after it (ZeRO-3: Rajbhandari et al. 2020; FSDP2: `fully_shard`)

In bf16 the blocks' weights are gathered in bf16 and their gradients reduced in fp32; the shards, and so the optimizer's
updates, are fp32. Evaluation and what follows a training need the whole model: `whole()` gathers it for that time.
"""

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from weft.checkpoint import contents
from weft.checkpoint.tensor_files import full_tensor, shard_like
from weft.config.sections import Train
from weft.errors import ConfigError
from weft.nn.transformer.blocks import Block, Blocks
from weft.tasks.head import Head
from weft.training.distributed import World


class Parallel(Protocol):
    """A head that the processes of a training share."""

    trained: Head  # holds the parameters that the optimizer updates

    @property
    def module(self) -> nn.Module:
        """What a training step calls; it takes part in what the processes exchange."""
        ...

    def accumulating(self, last: bool) -> AbstractContextManager[None]:
        """Return a context for a backward pass that exchanges no gradients unless it is the `last` of an update."""
        ...

    def after_backward(self) -> None:
        """Finish the exchange of gradients of an update."""
        ...

    def whole(self) -> AbstractContextManager[Head]:
        """Return a context with the whole model, which all processes enter together."""
        ...

    def load(self, folder: Path) -> None:
        """Load a checkpoint's weights."""
        ...

    def finish(self) -> Head:
        """Return the whole model's modules, for weights that are loaded when the training is over."""
        ...


class Replicated:
    """A head that each process has a copy of; a single process needs no exchange."""

    def __init__(self, head: Head, world: World, distillation: nn.Module | None = None) -> None:
        self.trained, self._called = head, distillation or head
        devices = [world.device] if world.device.type == "cuda" else None
        self._ddp: DistributedDataParallel | None = None
        if world.joined_group:
            equalize(head, world)
            with warnings.catch_warnings():  # newer versions have another name for it, which older ones lack
                warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
                self._ddp = DistributedDataParallel(
                    self._called,
                    device_ids=devices,
                    init_sync=False,
                    broadcast_buffers=False,
                    find_unused_parameters=bool(getattr(head, "leaves_unused", False)),
                )

    @property
    def module(self) -> nn.Module:
        """The head, within DDP if there are several processes."""
        return self._ddp or self._called

    def accumulating(self, last: bool) -> AbstractContextManager[None]:
        """Return a context that skips the all-reduce, except for the last of several backward passes."""
        if self._ddp is None or last:
            return nullcontext()
        context: AbstractContextManager[None] = self._ddp.no_sync()
        return context

    def after_backward(self) -> None:
        """Do nothing: the last backward pass has averaged the gradients."""

    @contextmanager
    def whole(self) -> Iterator[Head]:
        """Yield the head."""
        yield self.trained

    def load(self, folder: Path) -> None:
        """Load a checkpoint's weights."""
        contents.load_weights(folder, self.trained)

    def finish(self) -> Head:
        """Return the head."""
        return self.trained


class FullySharded:
    """A head of which each process has a shard; `head`, the whole one, has no weights but inside `whole()`."""

    def __init__(self, head: Head, world: World, train: Train) -> None:
        # Imported here: it takes a third of a second.
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        self._head, self._world = head, world
        self._shapes = [parameter.shape for parameter in head.parameters()]
        self.trained: Any = deepcopy(head)  # a Head; `fully_shard` adds the methods of FSDPModule
        equalize(self.trained, world)
        mesh = init_device_mesh(world.device.type, (world.size,))
        half = torch.bfloat16 if train.precision == "bf16" else None
        blocks_policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
        self._scalars = {parameter for parameter in self.trained.parameters() if not parameter.ndim}  # have no shards
        for block in _unshared_blocks(self.trained):
            fully_shard(block, mesh=mesh, mp_policy=blocks_policy, ignored_params=self._scalars)
        fully_shard(self.trained, mesh=mesh, reshard_after_forward=False, ignored_params=self._scalars)
        call_blocks_singly(self.trained)
        self.trained.to(world.device)
        self._free()

    @property
    def module(self) -> nn.Module:
        """The sharded head."""
        module: nn.Module = self.trained
        return module

    @contextmanager
    def accumulating(self, last: bool) -> Iterator[None]:
        """Keep the gradients of a backward pass whole on each process, and reduce them with those of the last."""
        self.trained.set_requires_gradient_sync(last)
        yield

    def after_backward(self) -> None:
        """Average the gradients of scalars, which have no shards."""
        for parameter in self._scalars:
            if parameter.grad is not None:
                distributed.all_reduce(parameter.grad)
                parameter.grad /= self._world.size

    @contextmanager
    def whole(self) -> Iterator[Head]:
        """Gather all weights into a head without hooks, and free them afterwards."""
        self.trained.reshard()  # else the root's parameters are those that its last forward pass has gathered
        self.finish()
        for whole, shard in _tensors(self._head, self.trained):
            whole.data = full_tensor(shard)
        try:
            yield self._head
        finally:
            self._free()

    def load(self, folder: Path) -> None:
        """Load a checkpoint's weights: each process reads the file, and keeps its shard."""
        head = self.finish()
        contents.load_weights(folder, head)
        with torch.no_grad():
            for whole, shard in _tensors(head, self.trained):
                shard.copy_(shard_like(whole, shard))
        self._free()

    def finish(self) -> Head:
        """Return the whole head with room for its weights, on the device."""
        self._head.to(self._world.device)
        for parameter, shape in zip(self._head.parameters(), self._shapes, strict=True):
            parameter.data = parameter.new_empty(shape)
        return self._head

    def _free(self) -> None:
        for parameter in self._head.parameters():
            parameter.data = parameter.new_empty(0)


def equalize(head: nn.Module, world: World) -> None:
    """Set the initial weights of all processes to those of the main one: each has drawn its own."""
    for tensor in (*head.parameters(), *head.buffers()):
        world.broadcast(tensor.detach())


def make_parallel(
    head: Head, world: World, train: Train, distillation: nn.Module | None = None
) -> FullySharded | Replicated:
    """Return the head as `train.parallel` says; recompute activations as `train.activation_checkpointing` says."""
    if train.activation_checkpointing:
        _recompute_blocks(head)
    if train.parallel == "fsdp" and distributed.is_initialized():
        check_parallel(train)
        return FullySharded(head, world, train)
    return Replicated(head.to(world.device), world, distillation)


def check_parallel(train: Train) -> None:
    """Refuse what needs whole weights where each of several processes has a shard of them."""
    if train.parallel != "fsdp":
        return
    if train.optimizer == "asgd":
        raise ConfigError(
            "train.optimizer: asgd keeps a mean of whole weights, but with train.parallel=fsdp a process has a "
            "shard of each; take train.parallel=ddp"
        )
    if train.unfreeze is not None or train.distill is not None:
        what = "train.unfreeze" if train.distill is None else "train.distill"
        raise ConfigError(f"train.parallel: fsdp does not go together with {what}; take train.parallel=ddp")


def _tensors(*heads: nn.Module) -> Iterator[tuple[Tensor, ...]]:
    """Yield each parameter and buffer of heads of one structure, side by side."""
    return zip(*([*head.parameters(), *head.buffers()] for head in heads), strict=True)


def call_blocks_singly(head: nn.Module) -> None:
    """Let stacks call their blocks one by one, without kernels that join two of them."""
    for module in head.modules():
        if isinstance(module, Blocks):
            module.calls_singly = True


def _unshared_blocks(head: nn.Module) -> list[Block]:
    """Return the transformer blocks whose parameters are theirs alone: shared ones are gathered with the rest."""
    blocks = [module for module in head.modules() if isinstance(module, Block)]
    owners: dict[Tensor, int] = {}
    for block in blocks:
        for parameter in block.parameters():
            owners[parameter] = owners.get(parameter, 0) + 1
    return [block for block in blocks if all(owners[parameter] == 1 for parameter in block.parameters())]


def _recompute_blocks(head: Head) -> None:
    """Let blocks keep their inputs alone, and compute the rest again in the backward pass (Chen et al. 2016)."""
    blocks = [module for module in head.modules() if isinstance(module, Block)]
    if not blocks:
        raise ConfigError(
            f"train.activation_checkpointing: {type(head.body).__name__} has no transformer blocks to recompute; leave "
            "it out"
        )
    for block in blocks:
        block.recomputes = True
    call_blocks_singly(head)
