"""Heads that predict by logits, so that one can learn what another predicts (`weft.training.distillation`)."""

from typing import Any

from torch import Tensor

from weft.tasks.batch import Batch
from weft.tasks.head import Head, Sums, missing_method


class SoftTargetHead(Head):
    """A head whose loss is one of logits: it can be a teacher's, and a student's."""

    has_soft_targets: bool = True  # whether the logits alone are the prediction: not under a CRF
    has_states: bool = True  # whether `read` returns hidden states
    any_tokenizer: bool = False  # whether the logits are in the order of the examples, however these are tokenized

    def read(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Return the logits of a batch, and the hidden states (N, D) that they come from, where the head sees them."""
        raise missing_method(self, "read")

    def losses(self, logits: Tensor, batch: Batch) -> Sums:
        """Return the sum of each part of the loss."""
        raise missing_method(self, "losses")

    def soft_losses(self, logits: Tensor, teacher: Tensor, batch: Batch, temperature: float) -> Sums:
        """Return the distance from a teacher's logits, summed, as the part of the loss that the labels have."""
        raise missing_method(self, "soft_losses")

    def forward(self, batch: Batch, carry: Any = None) -> tuple[Sums, Any]:
        """Return the sum of each part of the loss."""
        return self.losses(self.read(batch)[0], batch), None
