"""The sequences in which a language model reads its corpus (`task.sequences`).

| sequences   | a sequence is                                                        | by default for              |
|-------------|----------------------------------------------------------------------|-----------------------------|
| `documents` | a document                                                           | bidirectional models        |
| `windows`   | `data.max_length` tokens of the concatenated documents               | gpt, a backward rnn         |
| `bptt`      | the concatenated documents: the state is carried from batch to batch | models with a state: an rnn |
"""

from typing import Literal

from weft.config.run import Run
from weft.config.schema import position_remedy
from weft.errors import ConfigError
from weft.models.base import LMDirection, Model, SelfFitted

Sequences = Literal["documents", "windows", "bptt"]


def choose_sequences(
    given: Sequences | None, model: type[Model], directions: tuple[LMDirection, ...], run: Run
) -> Sequences:
    """Return the sequences that are given, or else the model's own; raise an error if the model cannot read them."""
    name, fitted = run.model.name, issubclass(model, SelfFitted)
    unidirectional = directions in (("forward",), ("backward",))
    can_carry = hasattr(model, "read") and directions == ("forward",)
    chosen: Sequences = given or ("bptt" if can_carry else "windows" if unidirectional or fitted else "documents")
    if chosen == "bptt" and not can_carry:
        raise ConfigError(f"task.sequences: the model {name!r} cannot read on; try windows or documents")
    if chosen == "windows" and not unidirectional:
        raise ConfigError("task.sequences: a model that sees both sides of a word needs task.sequences: documents")
    if chosen == "documents" and fitted:
        raise ConfigError(f"task.sequences: the model {name!r} is fitted to the stream; leave it out")
    if chosen == "windows" and not fitted:
        _check_positions(run)
    return chosen


def _check_positions(run: Run) -> None:
    max_positions = getattr(run.model, "max_positions", None)
    if max_positions is not None and run.data.max_length > max_positions:
        raise ConfigError(
            f"data.max_length: windows of {run.data.max_length} tokens, but the model learns {max_positions} "
            f"positions; set it to {max_positions} or less{position_remedy(run.model)}"
        )


def check_stride(stride: int | None, max_length: int, sequences: Sequences) -> None:
    """Raise an error for a stride, the distance of two windows, that leaves tokens out or is of no windows."""
    if stride is None:
        return
    if stride > max_length:
        raise ConfigError(f"task.stride: must be at most data.max_length: got {stride} and {max_length}")
    if sequences != "windows":
        raise ConfigError(
            "task.stride: is of windows, but here there are none; leave it out, or set task.sequences: windows"
        )
