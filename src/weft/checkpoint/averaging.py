"""The mean of several checkpoints: one model in the middle of where the last steps of a training moved about.

Vaswani et al. 2017 (section 6.1) average the last 5 checkpoints of their base models and the last 20 of their big ones.
Sums are float64; what is no real number, such as a table of integers, is the last one's. Tied weights are one tensor in
a checkpoint, so they stay tied. The files are enough: no class that a recipe names is imported.
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

from weft.checkpoint.atomic_io import readable
from weft.checkpoint.contents import differences, read_recipe_of, read_weights
from weft.checkpoint.manifest import order, save_folder, verify
from weft.checkpoint.store import MANIFEST, Store, resolve_checkpoint
from weft.errors import CheckpointError, ConfigError

ABOUT = "average.json"
LAST = 5  # of a run's checkpoints, where nothing else is asked for
MEANING = ("task", "tokenizer", "model")  # the sections of a recipe that say what a weight means
ONLY = "only checkpoints of one task, tokenizer and model can be averaged"


@dataclass(frozen=True)
class About:
    """What was averaged and, at the end of a run, how good it is: a rank as in `Progress.best`."""

    of: list[str]
    rank: list[float] | None = None


def average(paths: Sequence[Path], out: Path, last: int | None = None) -> list[Path]:
    """Write the mean of checkpoints in the new folder `out`, and return them; a run stands for its `last` ones."""
    folders = choose(paths, last)
    manifests = [verify(folder) for folder in folders]
    check_alike(folders, [_beside_weights(manifest["files"]) for manifest in manifests])

    def write(folder: Path) -> None:
        for name in ("run.yaml", *_beside_weights(manifests[-1]["files"])):
            shutil.copyfile(folders[-1] / name, folder / name)
        save_file(mean_weights(folders), folder / "model.safetensors")
        write_about(folder, About([one.name for one in folders]))

    save_folder(out, manifests[-1]["step"], write)
    return folders


def choose(paths: Sequence[Path], last: int | None = None) -> list[Path]:
    """List the checkpoints that a user means, named one by one or by the run that has them."""
    if last is not None and last < 2:
        raise ConfigError(f"--last: must be 2 or more, but is {last} instead")
    if last is not None and all(map(_is_checkpoint, paths)):
        raise ConfigError("--last: counts the checkpoints of a run, but no run is named; leave it out")
    folders = [folder.resolve() for path in paths for folder in _named(path, last or LAST)]
    for folder in folders:
        if folders.count(folder) > 1:
            raise CheckpointError(f"{folder}: is named twice, so it would count twice; name each checkpoint once")
    if len(folders) < 2:
        told = folders[0] if folders else "average"
        raise CheckpointError(f"{told}: needs others to be averaged with; name two checkpoints or more, or a run")
    return folders


def _is_checkpoint(path: Path) -> bool:
    with readable(path):
        return (path / MANIFEST).is_file()


def _named(path: Path, last: int) -> list[Path]:
    if _is_checkpoint(path):
        return [path]
    resolve_checkpoint(path)  # it tells of what is no run
    trained = [folder for folder in Store(path).checkpoints() if order(folder)[0]]  # step 0 has learnt nothing
    if len(trained) < last:
        there = ", ".join(folder.name for folder in trained) or "none"
        raise CheckpointError(
            f"{path}: its last {last} checkpoints after step 0 are asked for, but it has {there}; "
            "ask for fewer by --last, or have more when you train (train.save_every, train.keep)"
        )
    return trained[-last:]


def _beside_weights(files: Mapping[str, Any]) -> dict[str, str]:
    """Name the files that a model needs beside its recipe and its weights (the tokenizer's), with their SHA-256."""
    own = {"run.yaml", "model.safetensors", ABOUT}
    return {name: file["sha256"] for name, file in files.items() if name not in own and not name.startswith("state/")}


def check_alike(folders: Sequence[Path], beside: Sequence[Mapping[str, str]]) -> None:
    """Refuse checkpoints whose weights do not mean the same: of another recipe, or with another tokenizer."""
    recipes = [{part: read_recipe_of(folder).get(part) for part in MEANING} for folder in folders]
    for folder, recipe, files in zip(folders, recipes, beside, strict=True):
        for key, (must, got) in differences(recipes[0], recipe).items():
            raise CheckpointError(f"{folder}: {key} is {got!r}, but {must!r} in {folders[0]}; {ONLY}")
        for name in differences(beside[0], files):
            raise CheckpointError(f"{folder}: {name} is not that of {folders[0]}; {ONLY}")


def mean_weights(folders: Sequence[Path]) -> dict[str, Tensor]:
    """Return the mean of the weights of checkpoints; beside the sums, one of them is in memory at a time."""
    sums: dict[str, Tensor] = {}
    kinds: dict[str, str] = {}
    found: dict[str, Tensor] = {}
    for folder in folders:
        found = read_weights(folder)
        kinds = kinds or _kinds(found)
        for name, (must, got) in differences(kinds, _kinds(found)).items():
            told = f"{name} is {got or 'not there'}, but {must or 'not there'} in {folders[0]}"
            raise CheckpointError(f"{folder}/model.safetensors: {told}; {ONLY}")
        for name, value in found.items():
            if value.is_floating_point():
                sums[name] = sums[name].add_(value) if name in sums else value.to(torch.float64, copy=True)
    return found | {name: (total / len(folders)).to(found[name].dtype) for name, total in sums.items()}


def _kinds(weights: Mapping[str, Tensor]) -> dict[str, str]:
    return {name: f"{tuple(value.shape)} of {value.dtype}" for name, value in weights.items()}


def write_about(folder: Path, about: About) -> None:
    """Write what was averaged beside the weights."""
    (folder / ABOUT).write_text(json.dumps(asdict(about), indent=1), encoding="utf-8")


def read_about(folder: Path) -> About | None:
    """Read what a checkpoint is the average of; None, if it is none."""
    path = folder / ABOUT
    try:
        return TypeAdapter(About).validate_python(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        why = str(error).splitlines()[0]
        raise CheckpointError(f"{path}: cannot be read: {why}; delete {folder}, and run again") from None
