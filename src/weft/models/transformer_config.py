"""Configuration of a stack of Transformer blocks: sizes, heads per layer, and pruned heads."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from weft.config.schema import Layers, Pretrained, Size
from weft.errors import ConfigError


def _string_keys(value: Any) -> Any:
    """Return the mapping with its keys as strings: a layer's number may be written without quotes."""
    if not isinstance(value, Mapping):
        return value
    by_name = {str(key): heads for key, heads in value.items()}
    if len(by_name) < len(value):
        raise ValueError("names a layer twice, with and without quotes; name it once")
    return by_name


PrunedHeads = Annotated[dict[str, tuple[int, ...]], BeforeValidator(_string_keys)]


def check_heads(width: int, heads: int) -> None:
    """Raise ValueError if the number of heads does not divide the width."""
    if width % heads:
        near = min((count for count in range(1, width + 1) if width % count == 0), key=lambda count: abs(count - heads))
        raise ValueError(f"model.heads must divide model.width: got {heads} and {width}; try {near}")


def check_pruned_heads(pruned_heads: Mapping[str, tuple[int, ...]], heads: int, depths: Mapping[str, int]) -> None:
    """Raise ValueError if a pruned head does not exist or a layer loses all heads; `depths`: layers of each stack."""
    places = {"": max(depths.values()), **depths}
    for key, off in pruned_heads.items():
        place, _, layer = key.rpartition(".")
        depth = places.get(place, places[""])
        if place not in places or key not in {f"{place}.{number}".removeprefix(".") for number in range(depth)}:
            raise ValueError(
                f"model.pruned_heads names layers, 0 to {depth - 1}, alone or as in {list(depths)[-1]}.0 "
                f"({', '.join(depths)}): got {key!r}"
            )
        pruned = {*pruned_heads.get(layer, ()), *off}
        if not all(0 <= head < heads for head in off) or len(pruned) == heads:
            raise ValueError(
                f"model.pruned_heads.{key} names heads, 0 to {heads - 1}, and must leave one on: got {list(off)}"
            )


class StackConfig(Pretrained):
    """One stack, by default of the size of GPT-2 and BERT-base; `pruned_heads` prunes heads: {3: [1, 5]} in layer 3."""

    place: ClassVar[str]  # the name of its attention: "encoder" or "decoder"

    width: Size = 768  # of the hidden states
    heads: Size = 12  # attention heads a layer; they divide `width`
    layers: Layers = 12  # number of blocks
    ffn_width: Size | None = Field(None, validate_default=True)  # inside the feed-forward layers; None: 4 width
    dropout: float = Field(0.1, ge=0, lt=1)  # on embeddings and sub-layers
    tie: bool = True  # one matrix for the embeddings and the output (Press & Wolf 2017)
    pruned_heads: PrunedHeads = Field({})  # heads left out: {3: [1, 5]} in layer 3
    # layers of `weights` that this model starts with, from 0: [0, 2, 4] makes 3 of 6
    keep_layers: tuple[Annotated[int, Field(ge=0)], ...] | None = None

    @field_validator("ffn_width")
    @classmethod
    def _default_ffn_width(cls, ffn_width: int | None, info: ValidationInfo) -> int:
        return 4 * int(info.data.get("width", 1)) if ffn_width is None else ffn_width

    @model_validator(mode="after")
    def _check_kept(self) -> Self:
        kept = self.keep_layers
        if kept is None:
            return self
        if self.weights is None:
            raise ValueError("model.keep_layers are those of model.weights, but there is none; leave it out")
        if self.pruned_heads or getattr(self, "shared", False):
            raise ValueError("model.keep_layers: each layer must have its own weights, and all heads; leave it out")
        if list(kept) != sorted(set(kept)) or len(kept) != self.layers:
            raise ValueError(
                f"model.keep_layers must rise and be as many as model.layers, {self.layers}, but is {list(kept)}"
            )
        return self

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        check_heads(self.width, self.heads)
        check_pruned_heads(self.pruned_heads, self.heads, {self.place: self.layers})
        return self

    def check_layers(self, layers: Sequence[int]) -> None:
        """Raise ConfigError if a layer does not exist; 0 is the embeddings."""
        if not all(-self.layers <= layer + 1 and layer <= self.layers for layer in layers):
            raise ConfigError(
                f"layers: a {self.name} has 0, the embeddings, to {self.layers} here, but {list(layers)} is asked for"
            )
