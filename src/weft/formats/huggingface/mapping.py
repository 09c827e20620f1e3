"""How a model's configuration and weights are named in the Hugging Face format."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Modules = Mapping[str, str | tuple[str, ...]]  # our module -> theirs; several are parts of ours, stacked


@dataclass(frozen=True)
class HFMap:
    """How a model goes by in the Hugging Face format: data alone, read in both directions (`folder`).

    In `modules` and `outer`, `{layer}` stands for each layer's number; a module's weight and bias go together. A head
    is named by its task; `mlm.next` is one of `mlm` that also says whether a sentence follows.
    """

    model_type: str  # what config.json calls it
    tasks: Mapping[str, str]  # a class that config.json names -> our head; the first one of a head is written
    own: Mapping[str, Any]  # the fields of our configuration that make it this family
    fields: Mapping[str, str | tuple[str, ...]]  # our field -> their key; the first is read, all are written
    defaults: Mapping[str, Any]  # their key -> what holds where config.json says nothing
    modules: Modules  # of the body
    outer: Mapping[str, Modules] = field(default_factory=dict)  # head -> what stands on the body, as the head names it
    words: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # our field -> their word -> ours
    never: Mapping[str, Any] = field(default_factory=dict)  # our field -> what makes it another family
    less: Mapping[str, int] = field(default_factory=dict)  # our field -> by how much theirs is less
    unless: Mapping[str, str] = field(default_factory=dict)  # our field -> another; it is None where they are equal
    must: Mapping[str, Any] = field(default_factory=dict)  # their key -> the one value that our model can do
    also: Mapping[str, Any] = field(default_factory=dict)  # their key -> what is written and not read
    prefix: str = ""  # before the names of the body's weights, where something stands on it
    turned: tuple[str, ...] = ()  # the last names of their modules whose matrices are the other way round
    copies: Mapping[str, str] = field(default_factory=dict)  # their weight -> its name where the output is tied
    rows: tuple[str, ...] = ()  # their weights that are a matrix of one row, where ours is a vector
    unread: str = "(?!)"  # a pattern of weights that mean nothing
    vocabulary: str = ""  # how files that are no tokenizer.json are read (weft.tokenization.vocab_files)
    specials: Mapping[str, tuple[str, str | None]] = field(default_factory=dict)  # our role -> their key, default
    framed: bool = False  # whether a text stands between bos and eos, and a pair is read
    gap: int = 1  # how many eos stand between the texts of a pair
    kinds: bool = False  # whether the two texts of a pair are told apart by segments
    dropout: str = ""  # their key for the dropout before the output of a head that labels
