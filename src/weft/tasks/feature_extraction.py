"""Feature extraction: a bare encoder without a task head.

The task of a converted body without a head. `Pipeline.embed` returns its vectors, and a recipe that names it in
`model.weights` fine-tunes it for a task; by itself it has no answers and no loss.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

from weft.config.schema import Named
from weft.data.truncation import TruncationPolicy
from weft.errors import RoleError
from weft.tasks import base
from weft.tasks.base import Answer, Task
from weft.tasks.batch import Batch, Item
from weft.tasks.head import Head, Sums
from weft.tokenization.trainable import Tokenizer


class EmbedConfig(Named):
    """`pooler`: whether the body has the layers that only its pooled output uses, such as BERT's pooler."""

    pooler: bool = True  # whether the body keeps layers that only its pooled output uses


class EmbedExample(base.Example):
    """A text."""

    text: str


class EmbedHead(Head):
    """The body alone."""

    def __init__(self, body: Any, pooler: bool) -> None:
        super().__init__(body)
        if not pooler:
            body.drop_pooler()

    def forward(self, batch: Batch, carry: Any = None) -> tuple[Sums, Any]:
        """Raise: there is no loss."""
        raise _no_task()


class Embed(Task):
    """Feature extraction, without answers."""

    Config: ClassVar[type[Named]] = EmbedConfig
    Example = EmbedExample
    metric = "loss"
    config: EmbedConfig

    def encode(self, example: EmbedExample, tokenizer: Tokenizer, limit: TruncationPolicy) -> list[Item]:
        """Raise: there are no answers."""
        raise _no_task()

    def head(self, model: Any) -> EmbedHead:
        """Return the bare head of a body."""
        return EmbedHead(model, self.config.pooler)

    def score(self, answers: Sequence[Answer], examples: Sequence[EmbedExample]) -> dict[str, float]:
        """Raise: there are no answers."""
        raise _no_task()


def _no_task() -> RoleError:
    return RoleError(
        "task: 'embed' is a bare encoder, which makes vectors (weft embed) and has no answers; "
        "to train it for a task, name it in that recipe's model.weights"
    )
