"""Checkpoint averaging: one model whose weights are the mean of several checkpoints' weights.

Vaswani et al. 2017 (section 6.1) average the last 5 checkpoints of their base models and the last 20 of their big ones.
Sums are float64; tensors that are not floating-point, such as a table of integers, are those of the last checkpoint.
Tied weights are one tensor in a checkpoint, so they stay tied. Only files are read: no class that a recipe names is
imported.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from safetensors.torch import save_file
from torch import Tensor

from weft.checkpoint.atomic_io import wrap_read_errors
from weft.checkpoint.contents import differences, read_recipe_of, read_weights
from weft.checkpoint.manifest import order, save_folder, verify_checkpoint
from weft.checkpoint.store import CHECKPOINT_MANIFEST, Store, resolve_checkpoint
from weft.checkpoint.tensor_files import check_finite
from weft.config.small_files import read_small_text
from weft.errors import CheckpointError, ConfigError

AVERAGE_FILE = "average.json"
LAST = 5  # how many of a run's checkpoints are averaged by default
SHARED_SECTIONS = ("tasks", "task", "tokenizer", "model")  # recipe sections that must be equal in all checkpoints
REMEDY = "only checkpoints of one task, tokenizer and model can be averaged"


@dataclass(frozen=True)
class AverageInfo:
    """The names of the averaged checkpoints and, at the end of a run, the average's rank as in `Progress.best`."""

    of: list[str]
    rank: list[float] | None = None


def average(paths: Sequence[Path], out: Path, last: int | None = None) -> list[Path]:
    """Write the mean of checkpoints to the new folder `out`; return the checkpoints. A run means its `last` ones."""
    folders = choose(paths, last)
    manifests = [verify_checkpoint(folder) for folder in folders]
    check_compatible(folders, [_beside_weights(manifest["files"]) for manifest in manifests])

    def write(folder: Path) -> None:
        for name in ("run.yaml", *_beside_weights(manifests[-1]["files"])):
            shutil.copyfile(folders[-1] / name, folder / name)
        save_file(mean_weights(folders), folder / "model.safetensors")
        write_average_info(folder, AverageInfo([averaged.name for averaged in folders]))

    save_folder(out, manifests[-1]["step"], write)
    return folders


def choose(paths: Sequence[Path], last: int | None = None) -> list[Path]:
    """Return the checkpoints to average: each path is a checkpoint, or a run of which the `last` ones are taken."""
    if last is not None and last < 2:
        raise ConfigError(f"--last: must be 2 or more, but is {last} instead")
    if last is not None and all(map(_is_checkpoint, paths)):
        raise ConfigError("--last: counts the checkpoints of a run, but no run is named; leave it out")
    folders = [folder.resolve() for path in paths for folder in _checkpoints_of(path, last or LAST)]
    for folder in folders:
        if folders.count(folder) > 1:
            raise CheckpointError(f"{folder}: is named twice, so it would count twice; name each checkpoint once")
    if len(folders) < 2:
        subject = folders[0] if folders else "average"
        raise CheckpointError(f"{subject}: needs others to be averaged with; name two checkpoints or more, or a run")
    return folders


def _is_checkpoint(path: Path) -> bool:
    with wrap_read_errors(path):
        return (path / CHECKPOINT_MANIFEST).is_file()


def _checkpoints_of(path: Path, last: int) -> list[Path]:
    if _is_checkpoint(path):
        return [path]
    resolve_checkpoint(path)  # raises an error if this is not a run
    trained = [folder for folder in Store(path).checkpoints() if order(folder)[0]]  # step 0 is untrained
    if len(trained) < last:
        names = ", ".join(folder.name for folder in trained) or "none"
        raise CheckpointError(
            f"{path}: its last {last} checkpoints after step 0 are asked for, but it has {names}; "
            "ask for fewer by --last, or have more when you train (train.save_every, train.keep)"
        )
    return trained[-last:]


def _beside_weights(files: Mapping[str, Any]) -> dict[str, str]:
    """Return the SHA-256 of the files that a model needs beside recipe and weights (the tokenizer's), by name."""
    own = {"run.yaml", "model.safetensors", AVERAGE_FILE}
    return {name: file["sha256"] for name, file in files.items() if name not in own and not name.startswith("state/")}


def check_compatible(folders: Sequence[Path], beside: Sequence[Mapping[str, str]]) -> None:
    """Raise an error if task, model or tokenizer (recipe sections or files) differ between the checkpoints."""
    recipes = [{part: read_recipe_of(folder).get(part) for part in SHARED_SECTIONS} for folder in folders]
    for folder, recipe, files in zip(folders, recipes, beside, strict=True):
        for key, (expected, value) in differences(recipes[0], recipe).items():
            raise CheckpointError(f"{folder}: {key} is {value!r}, but {expected!r} in {folders[0]}; {REMEDY}")
        for name in differences(beside[0], files):
            raise CheckpointError(f"{folder}: {name} is not that of {folders[0]}; {REMEDY}")


def mean_weights(folders: Sequence[Path]) -> dict[str, Tensor]:
    """Return the mean of the checkpoints' weights; one checkpoint at a time is in memory beside the sums."""
    sums: dict[str, Tensor] = {}
    specs: dict[str, str] = {}
    weights: dict[str, Tensor] = {}
    for folder in folders:
        weights = read_weights(folder)
        specs = specs or _tensor_specs(weights)
        for name, (expected, spec) in differences(specs, _tensor_specs(weights)).items():
            message = f"{name} is {spec or 'not there'}, but {expected or 'not there'} in {folders[0]}"
            raise CheckpointError(f"{folder}/model.safetensors: {message}; {REMEDY}")
        for name, value in weights.items():
            if value.is_floating_point():
                sums[name] = sums[name].add_(value) if name in sums else value.to(torch.float64, copy=True)
    means = {name: (total / len(folders)).to(weights[name].dtype) for name, total in sums.items()}
    for name, mean in means.items():
        check_finite(f"{folders[-1]}/model.safetensors, averaged with {len(folders) - 1} more: {name}", mean)
    return weights | means


def _tensor_specs(weights: Mapping[str, Tensor]) -> dict[str, str]:
    return {name: f"{tuple(value.shape)} of {value.dtype}" for name, value in weights.items()}


def write_average_info(folder: Path, about: AverageInfo) -> None:
    """Write which checkpoints were averaged, beside the weights."""
    (folder / AVERAGE_FILE).write_text(json.dumps(asdict(about), indent=1), encoding="utf-8")


def read_average_info(folder: Path) -> AverageInfo | None:
    """Read which checkpoints were averaged into this one; None if it is not an average."""
    path = folder / AVERAGE_FILE
    try:
        return TypeAdapter(AverageInfo).validate_python(json.loads(read_small_text(path)))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(f"{path}: cannot be read: {reason}; delete {folder}, and run again") from None
