"""HFMapping: the names of a model's configuration and weights in the Hugging Face format; the weights of a folder."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

Modules = Mapping[str, str | tuple[str, ...]]  # our module -> theirs; several of theirs are stacked along dim 0 in ours


@dataclass(frozen=True)
class HFMapping:
    """The mapping of weft's configuration and weights to a Hugging Face model's; `folder` reads it in both directions.

    In `modules` and `head_modules`, `{layer}` stands for each layer's number; a module's weight and bias go together.
    A head is named by its task; `mlm.next` is an `mlm` head that also predicts whether a sentence follows, `mlm.order`
    one that predicts whether two are swapped.
    """

    model_type: str  # in config.json
    architectures: Mapping[str, str]  # class name in config.json -> our head; the first class of a head is written
    fixed: Mapping[str, Any]  # our config field -> its value in every model of this family
    fields: Mapping[str, str | tuple[str, ...]]  # our config field -> their keys; the first is read, all are written
    defaults: Mapping[str, Any]  # their key -> its value where config.json lacks it
    modules: Modules  # of the body
    head_modules: Mapping[str, Modules] = field(default_factory=dict)  # head -> its modules outside the body
    values: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # our field -> their value -> ours
    excluded: Mapping[str, Any] = field(default_factory=dict)  # our field -> a value that this family cannot have
    offsets: Mapping[str, int] = field(default_factory=dict)  # our field -> our value minus theirs
    same_as: Mapping[str, str] = field(default_factory=dict)  # our field -> another; None in ours if they are equal
    required: Mapping[str, Any] = field(default_factory=dict)  # their key -> the only value that our model supports
    write_only: Mapping[str, Any] = field(default_factory=dict)  # their key -> a value that is written, but not read
    prefix: str = ""  # of the body's weight names in a model with a head
    turned: tuple[str, ...] = ()  # the last names of their modules whose weight matrices are transposed
    tied_names: Mapping[str, str] = field(default_factory=dict)  # their weight -> its name where the output is tied
    row_vectors: tuple[str, ...] = ()  # their weights of shape (1, D), where ours is (D,)
    ignored: str = "(?!)"  # regular expression of their weights that are not read
    not_written: str = "(?!)"  # regular expression of our weights that are not written
    unused_fields: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # head -> our fields that it ignores
    vocab_format: str = ""  # of vocabulary files without a tokenizer.json (weft.tokenization.vocab_files)
    specials: Mapping[str, tuple[str, str | None]] = field(default_factory=dict)  # our role -> their key, default
    framed: bool = False  # whether texts have bos and eos around them, and pairs are supported
    num_separators: int = 1  # number of eos between the texts of a pair
    token_types: bool = False  # whether the two texts of a pair have different token type ids
    dropout_key: str = ""  # their key for the dropout before the output of a classification head


class StoredWeight(NamedTuple):
    """A weight in a file, memory-mapped, and its name there."""

    name: str
    value: Tensor

    def on_meta_device(self) -> "StoredWeight":
        """Return it without data: its shape and dtype."""
        return self._replace(value=self.value.to("meta"))


WeightFiles = Mapping[str, StoredWeight]  # by the weight's name without the body's prefix
