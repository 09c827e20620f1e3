"""Heads of attention in a recipe: how many a layer has, and which are left out."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator


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
