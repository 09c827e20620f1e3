"""Weights by their names in the Hugging Face format, in one file or in several."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from weft.checkpoint.contents import weights
from weft.config.schema import Run
from weft.errors import CheckpointError
from weft.formats.huggingface.heads import head_for
from weft.formats.huggingface.mapping import HFMap, Modules
from weft.formats.huggingface.tokenizer import read_json

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


Held = Mapping[str, tuple[Path, str]]  # a weight, without the body's prefix -> the file that has it, its name there


def read_weights(folder: Path, family: HFMap, run: Run, head: nn.Module, held: Held) -> dict[str, Tensor]:
    """Read what a head needs, by our names; a weight that is missing, or that it has no place for, is refused."""
    modules = _modules(family, run)
    wanted = {ours: _found(_theirs(modules, ours), family, held) for ours in weights(head)}
    missing = [name for parts in wanted.values() for name in parts if name not in held]
    if missing:
        raise CheckpointError(f"{folder}: lacks the weight {missing[0]} ({len(missing)} such in all); is it whole?")
    _check_rest(folder, family, modules, set(held) - {name for parts in wanted.values() for name in parts})
    return {ours: _joined([held[name] for name in parts], family) for ours, parts in wanted.items()}


def write_weights(folder: Path, family: HFMap, run: Run, head: nn.Module) -> None:
    """Write the weights of a head by their names."""
    modules = _modules(family, run, family.prefix if head_for(run) in family.outer else "")
    found: dict[str, Tensor] = {}
    tied = bool(getattr(run.model, "tie", False))
    for ours, value in weights(head).items():
        names = _theirs(modules, ours)
        for name, part in zip(names, value.chunk(len(names)), strict=True):
            copy = family.copies.get(name, name)
            turned = _turned(part[None] if copy in family.rows else part, name, family).float().contiguous().cpu()
            found |= {copy: turned} if tied else {name: turned, copy: turned.clone()}
    save_file(found, folder / WEIGHTS, metadata={"format": "pt"})


def _found(names: Sequence[str], family: HFMap, held: Held) -> list[str]:
    """Name a weight as the file does, which may have it by its other name alone."""
    return [name if name in held else family.copies.get(name, name) for name in names]


def _modules(family: HFMap, run: Run, prefix: str = "") -> dict[str, tuple[str, ...]]:
    """Say which of their modules is which of ours, with a prefix for the body's; a part may stand outside."""
    layers: int = run.model.layers  # type: ignore[attr-defined]
    after: int = getattr(run.model, "decoder_layers", None) or layers
    body = {f"body.{ours}": parts for ours, parts in _expanded(family.modules, layers, after).items()}
    return {
        **{ours: tuple(prefix + part for part in parts) for ours, parts in body.items()},
        **_expanded(family.outer.get(head_for(run), {}), layers),
    }


def _expanded(modules: Modules, layers: int, after: int = 0) -> dict[str, tuple[str, ...]]:
    """Put each layer's number in the place of `{layer}`; a decoder may have another number `after` an encoder."""
    found = {}
    for ours, theirs in modules.items():
        parts = (theirs,) if isinstance(theirs, str) else theirs
        depth = after or layers if ours.startswith("decoder.") else layers
        for layer in range(depth if "{layer}" in ours else 1):
            found[ours.format(layer=layer)] = tuple(part.format(layer=layer) for part in parts)
    return found


def _theirs(modules: Mapping[str, tuple[str, ...]], ours: str) -> list[str]:
    module, _, leaf = ours.rpartition(".")
    return [f"{part}.{leaf}" for part in modules[module]]


def _check_rest(folder: Path, family: HFMap, modules: Mapping[str, tuple[str, ...]], rest: set[str]) -> None:
    """Refuse what would be left out; not so a copy of what is tied, and what means nothing."""
    known = {part for parts in modules.values() for part in parts}
    rest = {name for name in rest if not re.fullmatch(family.unread, name) and name not in family.copies.values()}
    strange = [name for name in rest if name.rpartition(".")[0] not in known]
    if strange:
        raise CheckpointError(
            f"{folder}: has the weight {min(strange)}, which a {family.model_type} has no place for here "
            f"({len(strange)} such in all)"
        )


def _joined(places: Sequence[tuple[Path, str]], family: HFMap) -> Tensor:
    parts = [_turned(_tensor(path, name), name, family).float() for path, name in places]
    parts = [part[0] if name in family.rows else part for part, (_, name) in zip(parts, places, strict=True)]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _turned(value: Tensor, name: str, family: HFMap) -> Tensor:
    return value.t() if name.split(".")[-2:][0] in family.turned and value.ndim == 2 else value


def held_weights(folder: Path, family: HFMap) -> Held:
    """Say which file has which weight; norms had other names once."""
    found = {}
    for name, path in _held(folder).items():
        now = re.sub(r"\.gamma$", ".weight", re.sub(r"\.beta$", ".bias", name))
        found[now.removeprefix(family.prefix)] = path, name
    return found


def _held(folder: Path) -> dict[str, Path]:
    """Say which file has which weight."""
    if (folder / INDEX).is_file():
        return dict(_indexed(folder))
    path = folder / WEIGHTS
    if path.is_file():
        return dict.fromkeys(_names(path), path)
    pickled = sorted(one.name for one in folder.glob("*.bin"))
    if pickled:
        raise CheckpointError(
            f"{folder}: {pickled[0]} is a pickle, which can run code as it is read; have it written again by "
            "transformers, as AutoModel.from_pretrained(folder).save_pretrained(new), which makes model.safetensors"
        )
    raise CheckpointError(f"{folder}: has no weights: looked for {WEIGHTS} and {INDEX}")


def _indexed(folder: Path) -> Iterator[tuple[str, Path]]:
    named = read_json(folder / INDEX).get("weight_map")
    if not isinstance(named, dict) or not named:
        raise CheckpointError(f"{folder / INDEX}: must have a weight_map that says which file has which weight")
    for file in sorted({str(one) for one in named.values()}):
        path = folder / file
        if Path(file).name != file or not path.is_file():
            raise CheckpointError(f"{folder / INDEX}: names the file {file!r}, which is not in the folder")
        yield from ((name, path) for name in _names(path))


def _names(path: Path) -> list[str]:
    try:
        with safe_open(path, "pt") as file:
            return list(file.keys())
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None


def _tensor(path: Path, name: str) -> Tensor:
    with safe_open(path, "pt") as file:
        found: Tensor = file.get_tensor(name)
        return found
