"""Head: the module that is trained, a body and the layers that a task adds to it."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from weft.config.schema import Section
from weft.errors import ConfigError
from weft.models.base import Model
from weft.tasks.batch import Batch

Sums = dict[str, Tensor]  # for each part of the loss, its sum over the batch


def missing_method(owner: object, method: str) -> ConfigError:
    """Return the error for a user's own task or head that does not define a method."""
    return ConfigError(f"task.name: {type(owner).__name__} does not define {method}(), which weft needs of it here")


class Head(nn.Module):
    """The module that is trained: a body (a Model) and the layers that the task adds to it."""

    body: Any  # a Model; its roles declare its methods
    leaves_unused: bool = False  # whether a batch may leave some parameters without a gradient
    frozen: tuple[nn.Module, ...] = ()  # submodules that are not trained, and stay in eval mode

    def __init__(self, body: Model) -> None:
        super().__init__()
        self.body = body

    @property
    def device(self) -> torch.device:
        """The device of its parameters; of an n-gram model, which has none, that of its buffers."""
        return next(chain(self.parameters(), self.buffers())).device

    def train(self, mode: bool = True) -> "Head":
        """Set training mode, or evaluation mode with `mode=False`; frozen parts stay in evaluation mode: no dropout."""
        super().train(mode)
        for module in self.frozen:
            module.eval()
        return self

    def forward(self, batch: Batch, carry: Any = None) -> tuple[Sums, Any]:
        """Return the sum of each part of the loss, and the state from which the same streams' next batch starts."""
        raise missing_method(self, "forward")

    def carry_tensors(self, carry: Any) -> list[Tensor]:
        """Return the tensors of the state that `forward` carries over, for a checkpoint; [] for a stateless head."""
        return []

    def carry_from_tensors(self, parts: Sequence[Tensor]) -> Any:
        """Return the carried state of which `carry_tensors` returned the tensors."""
        return None

    def flops(self, batch: Batch) -> int:
        """Return the FLOPs of one forward pass over the tokens, without padding: see `Model.flops`."""
        flops: int = self.body.flops(batch.tokens, batch.source)
        return flops

    def predict(self, batch: Batch, options: Section) -> list[Any]:
        """Return one output for each item, for `Task.answer`."""
        raise missing_method(self, "predict")

    def logits_per_item(self, options: Section) -> int:
        """Return how many scores `predict` holds in memory for each sequence, such as logits; 0 where they are few."""
        return 0
