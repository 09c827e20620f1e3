"""What a recipe says of a stack of attention: its sizes, how many heads a layer has, and which are left out."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from weft.config.schema import Pretrained
from weft.errors import ConfigError


def _worded(value: Any) -> Any:
    """A layer's number may be written without quotes."""
    if not isinstance(value, Mapping):
        return value
    worded = {str(key): heads for key, heads in value.items()}
    if len(worded) < len(value):
        raise ValueError("names a layer twice, with and without quotes; name it once")
    return worded


HeadsOff = Annotated[dict[str, tuple[int, ...]], BeforeValidator(_worded)]


def check_heads(width: int, heads: int) -> None:
    """Refuse heads that do not share the width evenly."""
    if width % heads:
        near = min((one for one in range(1, width + 1) if width % one == 0), key=lambda one: abs(one - heads))
        raise ValueError(f"model.heads must divide model.width: got {heads} and {width}; try {near}")


def check_off(heads_off: Mapping[str, tuple[int, ...]], heads: int, depths: Mapping[str, int]) -> None:
    """Refuse to leave out what is not there, or all heads of a layer; `depths` are the layers of each place."""
    known = {"": max(depths.values()), **depths}
    for key, off in heads_off.items():
        place, _, layer = key.rpartition(".")
        depth = known.get(place, known[""])
        if place not in known or key not in {f"{place}.{one}".removeprefix(".") for one in range(depth)}:
            raise ValueError(
                f"model.heads_off names layers, 0 to {depth - 1}, alone or as in {list(depths)[-1]}.0 "
                f"({', '.join(depths)}): got {key!r}"
            )
        everywhere = {*heads_off.get(layer, ()), *off}
        if not all(0 <= head < heads for head in off) or len(everywhere) == heads:
            raise ValueError(
                f"model.heads_off.{key} names heads, 0 to {heads - 1}, and must leave one on: got {list(off)}"
            )


class StackConfig(Pretrained):
    """One stack, of the sizes that GPT-2 and BERT-base have; `heads_off` leaves heads out: {3: [1, 5]} in layer 3."""

    place: ClassVar[str]  # what its attention goes by

    width: int = Field(768, ge=1)
    heads: int = Field(12, ge=1)
    layers: int = Field(12, ge=1)
    hidden: int | None = Field(None, ge=1, validate_default=True)  # inside the feed-forward layers; None: 4 times width
    dropout: float = Field(0.1, ge=0, lt=1)
    tie: bool = True  # one matrix for the embeddings and the output (Press & Wolf 2017)
    heads_off: HeadsOff = Field({})

    @field_validator("hidden")
    @classmethod
    def _fourfold(cls, hidden: int | None, info: ValidationInfo) -> int:
        return 4 * int(info.data.get("width", 1)) if hidden is None else hidden

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        check_heads(self.width, self.heads)
        check_off(self.heads_off, self.heads, {self.place: self.layers})
        return self

    def check_layers(self, layers: Sequence[int]) -> None:
        """Refuse to give layers that are not there; 0 is the embeddings."""
        if not all(-self.layers <= layer + 1 and layer <= self.layers for layer in layers):
            raise ConfigError(
                f"layers: a {self.name} has 0, the embeddings, to {self.layers} here, but {list(layers)} is asked for"
            )
