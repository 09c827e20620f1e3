"""Weights in the Hugging Face format, in one safetensors file or several with an index."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from weft.checkpoint.contents import weights
from weft.checkpoint.tensor_files import read_tensors
from weft.config.run import Run
from weft.errors import CheckpointError
from weft.formats.huggingface.heads import head_name
from weft.formats.huggingface.mapping import HFMapping, Modules, StoredWeight, WeightFiles
from weft.formats.huggingface.tokenizer import read_json

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def match_weights(
    folder: Path, family: HFMapping, run: Run, head: nn.Module, files: WeightFiles
) -> dict[str, list[StoredWeight]]:
    """Return the stored parts of each of our weights; missing and unknown weights are errors, as are odd parts."""
    modules = _module_names(family, run)
    sources = {ours: _names_in_file(_hf_names(modules, ours), family, files) for ours in weights(head)}
    missing = [name for parts in sources.values() for name in parts if name not in files]
    if missing:
        raise CheckpointError(f"{folder}: lacks the weight {missing[0]} ({len(missing)} in all); is it complete?")
    _check_unused(folder, family, modules, set(files) - {name for parts in sources.values() for name in parts})
    matched = {ours: [files[name] for name in parts] for ours, parts in sources.items()}
    for parts in matched.values():
        _check_parts(folder, family, parts)
    return matched


def _check_parts(folder: Path, family: HFMapping, parts: Sequence[StoredWeight]) -> None:
    """Raise CheckpointError if parts are no floating-point numbers, or cannot be stacked to one weight."""
    for name, value in parts:
        if value.dtype not in FLOATS:
            raise CheckpointError(f"{folder}: the weight {name} must be of float32, but is of {value.dtype} instead")
        expected = value.ndim == 2 and len(value) == 1 if name in family.row_vectors else value.ndim
        if not expected or value.shape != parts[0].value.shape:
            raise CheckpointError(
                f"{folder}: the weight {name} is {tuple(value.shape)}, which is not the shape of such a weight"
            )


def read_hf_weights(sources: Mapping[str, Sequence[StoredWeight]], family: HFMapping) -> dict[str, Tensor]:
    """Return the weights of a head by our names, from the parts that `match_weights` found."""
    return {ours: _read_stacked(parts, family) for ours, parts in sources.items()}


def write_hf_weights(folder: Path, family: HFMapping, run: Run, head: nn.Module) -> None:
    """Write the weights of a head as model.safetensors, by their names."""
    modules = _module_names(family, run, family.prefix if head_name(run) in family.head_modules else "")
    tensors: dict[str, Tensor] = {}
    tied = bool(getattr(run.model, "tie", False))
    exported = {ours: value for ours, value in weights(head).items() if not re.fullmatch(family.not_written, ours)}
    for ours, value in exported.items():
        names = _hf_names(modules, ours)
        for name, part in zip(names, value.chunk(len(names)), strict=True):
            tied_name = family.tied_names.get(name, name)
            row = part[None] if tied_name in family.row_vectors else part
            tensor = _transpose(row, name, family).float().contiguous().cpu()
            tensors |= {tied_name: tensor} if tied else {name: tensor, tied_name: tensor.clone()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def _names_in_file(names: Sequence[str], family: HFMapping, files: WeightFiles) -> list[str]:
    """Return the names of weights in the file, which may have only the tied name."""
    return [name if name in files else family.tied_names.get(name, name) for name in names]


def _module_names(family: HFMapping, run: Run, prefix: str = "") -> dict[str, tuple[str, ...]]:
    """Return our module -> theirs, of the body with a prefix, and of the head."""
    layers: int = run.model.layers  # type: ignore[attr-defined]
    decoder_layers: int = getattr(run.model, "decoder_layers", None) or layers
    body = {f"body.{ours}": parts for ours, parts in _expand_layers(family.modules, layers, decoder_layers).items()}
    return {
        **{ours: tuple(prefix + part for part in parts) for ours, parts in body.items()},
        **_expand_layers(family.head_modules.get(head_name(run), {}), layers),
    }


def _expand_layers(modules: Modules, layers: int, decoder_layers: int = 0) -> dict[str, tuple[str, ...]]:
    """Expand `{layer}` to each layer's number; `decoder_layers` may differ from `layers`."""
    expanded = {}
    for ours, theirs in modules.items():
        parts = (theirs,) if isinstance(theirs, str) else theirs
        depth = decoder_layers or layers if ours.startswith("decoder.") else layers
        for layer in range(depth if "{layer}" in ours else 1):
            expanded[ours.format(layer=layer)] = tuple(part.format(layer=layer) for part in parts)
    return expanded


def _hf_names(modules: Mapping[str, tuple[str, ...]], ours: str) -> list[str]:
    module, _, leaf = ours.rpartition(".")
    return [f"{part}.{leaf}" for part in modules[module]]


def _check_unused(folder: Path, family: HFMapping, modules: Mapping[str, tuple[str, ...]], unused: set[str]) -> None:
    """Raise an error for unused weights, except copies of tied weights and those the family ignores."""
    known = {part for parts in modules.values() for part in parts}
    unused = {name for name in unused - set(family.tied_names.values()) if not re.fullmatch(family.ignored, name)}
    unknown = [name for name in unused if name.rpartition(".")[0] not in known]
    if unknown:
        raise CheckpointError(
            f"{folder}: has the weight {min(unknown)}, which weft's {family.model_type} does not have "
            f"({len(unknown)} in all)"
        )


def _read_stacked(parts: Sequence[StoredWeight], family: HFMapping) -> Tensor:
    values = [_transpose(value, name, family).float() for name, value in parts]
    values = [value[0] if part.name in family.row_vectors else value for value, part in zip(values, parts, strict=True)]
    if values[0].is_meta and len({value.shape[1:] for value in values}) == 1:  # to join these imports torch._dynamo
        return values[0].new_empty(sum(map(len, values)), *values[0].shape[1:])
    return torch.cat(values) if len(values) > 1 else values[0]


def _transpose(value: Tensor, name: str, family: HFMapping) -> Tensor:
    return value.t() if name.split(".")[-2:][0] in family.turned and value.ndim == 2 else value


def find_weights(folder: Path, family: HFMapping) -> WeightFiles:
    """Return the weights of a folder; gamma and beta are old names of a norm's weight and bias."""
    files = {}
    for name, value in _stored_weights(folder).items():
        new_name = re.sub(r"\.gamma$", ".weight", re.sub(r"\.beta$", ".bias", name))
        files[new_name.removeprefix(family.prefix)] = StoredWeight(name, value)
    return files


def _stored_weights(folder: Path) -> dict[str, Tensor]:
    """Return the weights of one file or several, by their names there; none is read yet."""
    if (folder / INDEX).is_file():
        return {name: value for path in _read_index(folder) for name, value in read_tensors(path).items()}
    path = folder / WEIGHTS
    if path.is_file():
        return read_tensors(path)
    pickled = sorted(path.name for path in folder.glob("*.bin"))
    if pickled:
        raise CheckpointError(
            f"{folder}: {pickled[0]} is a pickle, which can run code as it is read; have it written again by "
            "transformers, as AutoModel.from_pretrained(folder).save_pretrained(new), which makes model.safetensors"
        )
    raise CheckpointError(f"{folder}: has no weights: looked for {WEIGHTS} and {INDEX}")


def _read_index(folder: Path) -> Iterator[Path]:
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{folder / INDEX}: must have a weight_map that says which file has which weight")
    for file in sorted(set(map(str, weight_map.values()))):
        path = folder / file
        if Path(file).name != file or "\0" in file or not path.is_file():
            raise CheckpointError(f"{folder / INDEX}: names the file {file!r}, which is not in the folder")
        yield path
