"""What a checkpoint holds: the recipe, the tokenizer, the weights, and for resuming the state of the training.

    run.yaml  tokenizer.json  model.safetensors  state/{progress.json, optimizer.safetensors, random.safetensors}

There is no pickle anywhere: tensors are safetensors, the rest is YAML and JSON.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from weft.config.schema import Run, read_recipe
from weft.config.yaml import read_yaml, write_yaml
from weft.data.batching.loader import Position
from weft.errors import CheckpointError
from weft.models.base import Model
from weft.nn.attention.multihead import MultiHeadAttention
from weft.tokenization.trainable import Tokenizer

OPTIMIZER_KEYS = ("step", "exp_avg", "exp_avg_sq", "sum", "aside", "averaged")  # Adam's, Adagrad's, averaged SGD's
Count = Annotated[int, Field(ge=0)]


@dataclass
class Progress:
    """Where a training stands, besides weights and optimiser."""

    step: Count = 0
    position: Position = field(default_factory=Position)
    elapsed: float = 0.0  # seconds of training
    bad_steps: Count = 0
    loss_sum: float = 0.0  # since the last report
    loss_steps: Count = 0
    best: list[float] | None = None  # of the best evaluation: the metric, turned so that less is better, and the loss
    best_step: Count = 0
    stale: Count = 0  # evaluations since the best
    data: str = ""  # digest of the training data
    done: bool = False


def write_model(folder: Path, run: Run, tokenizer: Tokenizer, head: nn.Module) -> None:
    """Write what `load` needs."""
    (folder / "run.yaml").write_text(write_yaml(run.dump()), encoding="utf-8")
    tokenizer.save(folder)
    save_file({name: value.contiguous() for name, value in weights(head).items()}, folder / "model.safetensors")


def write_state(
    folder: Path, progress: Progress, optimizer: torch.optim.Optimizer, head: nn.Module, random: Mapping[str, Tensor]
) -> None:
    """Write what resuming needs."""
    write_progress(folder, progress)
    state = folder / "state"
    save_file(optimizer_tensors(optimizer, head), state / "optimizer.safetensors")
    save_file(dict(random), state / "random.safetensors")


def write_progress(folder: Path, progress: Progress) -> None:
    """Write where a training stands."""
    (folder / "state").mkdir()
    (folder / "state" / "progress.json").write_text(json.dumps(asdict(progress), indent=1), encoding="utf-8")


def write_carried(folder: Path, carried: Mapping[str, Tensor]) -> None:
    """Write what streams that are read on have left: `0.1` is the first part of what rank 1 goes on from."""
    save_file({name: part.cpu() for name, part in carried.items()}, folder / "state" / "carried.safetensors")


def load_carried(folder: Path, rank: int, device: torch.device) -> list[Tensor]:
    """Read what a rank goes on from; nothing where nothing is carried."""
    path = folder / "state" / "carried.safetensors"
    found = _tensors(path) if path.exists() else {}
    own = {int(name.partition(".")[0]): part for name, part in found.items() if name.endswith(f".{rank}")}
    return [own[number].to(device) for number in sorted(own)]


def weights(head: nn.Module) -> dict[str, Tensor]:
    """Name the parameters and saved buffers, each once: tied ones go by their first name."""
    saved = head.state_dict()
    buffers = {name: value for name, value in head.named_buffers() if name in saved}
    return {name: value.detach() for name, value in (*head.named_parameters(), *buffers.items())}


def optimizer_tensors(optimizer: torch.optim.Optimizer, head: nn.Module) -> dict[str, Tensor]:
    """Name the optimiser's state by parameter: `exp_avg.body.encoder.embed.weight`."""
    tensors = {}
    for name, parameter in head.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{key}.{name}"] = torch.as_tensor(value).detach().contiguous()
    return tensors


def read_run(folder: Path, trust: bool = False, overrides: Iterable[str] = ()) -> Run:
    """Read the recipe of a checkpoint, changed by overrides; classes from outside weft are run only with `trust`."""
    return changed_run(read_recipe_of(folder), folder, trust, overrides)


def changed_run(then: Mapping[str, Any], folder: Path, trust: bool = False, overrides: Iterable[str] = ()) -> Run:
    """Check the recipe of what `folder` holds, with changes that its weights allow."""
    now = Run.parse(read_recipe(then, overrides), trust)
    if overrides:
        _check_kept(Run.parse(then, trust).dump(), now.dump(), folder)
    _check_heads(then, now.dump(), folder)
    return now


def _check_kept(then: Mapping[str, Any], now: Mapping[str, Any], folder: Path) -> None:
    """Refuse another model or tokenizer than the weights were trained with: shapes alone do not tell them apart."""
    for key, (was, is_now) in differences(then, now).items():
        if key.startswith(("model.", "tokenizer.")) and not key.startswith(("model.heads_off", "model.dropout")):
            raise CheckpointError(
                f"{folder}: was trained with {key}={was!r}, which cannot be {is_now!r} now; leave that change out "
                "(of a model, only heads_off and dropout may change)"
            )


def _check_heads(then: Mapping[str, Any], now: Mapping[str, Any], folder: Path) -> None:
    """Refuse to put heads that are left out back: by their shapes, others would be taken for them."""
    model = then.get("model")
    off, left = (dict(part.get("heads_off") or {}) for part in (model if isinstance(model, dict) else {}, now["model"]))
    for place, heads in off.items():
        if set(left.get(str(place), ())) != set(heads):
            raise CheckpointError(
                f"{folder}: the heads {heads} of {place} were cut out of its weights, but model.heads_off.{place} is "
                f"{left.get(str(place), [])} now; leave it as it is, or load a checkpoint with all heads"
            )


def read_recipe_of(folder: Path) -> dict[str, Any]:
    """Read the recipe of a checkpoint as plain data: no class that it names is imported."""
    try:
        text = (folder / "run.yaml").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{folder}: run.yaml cannot be read: {error}; is this a checkpoint of weft?") from None
    raw = read_yaml(text, str(folder / "run.yaml"))
    if not isinstance(raw, dict):
        raise CheckpointError(f"{folder}: run.yaml must be a recipe, but is {type(raw).__name__} instead")
    return raw


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the keys, dotted and in order, in which two recipes or parts of them differ, with both values."""
    before, after = _flat(then), _flat(now)
    keys = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
    return {key: (before.get(key), after.get(key)) for key in keys}


def _flat(raw: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(raw, Mapping):
        return {prefix: raw}
    return {
        key: value for name, inner in raw.items() for key, value in _flat(inner, f"{prefix}.{name}".strip(".")).items()
    }


def load_weights(folder: Path, head: nn.Module) -> None:
    """Fill a head; a name or shape that does not fit is refused."""
    fill(head, read_weights(folder), folder)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Read the weights of a checkpoint, by name."""
    return _tensors(folder / "model.safetensors")


def fill(head: nn.Module, found: dict[str, Tensor], folder: Path) -> None:
    """Copy weights into a head; a name or shape that does not fit is refused, as what `folder` holds."""
    found, wanted = without_heads(found, head), weights(head)
    strange = sorted(set(found) ^ set(wanted))
    if strange:
        whose = "the file lacks it" if strange[0] in wanted else "the model has no such weight"
        raise CheckpointError(f"{folder}/model.safetensors: {strange[0]}: {whose} ({len(strange)} such in all)")
    grown = _grown(head)
    for name, value in wanted.items():
        if value.shape != found[name].shape and not (name in grown and value.ndim == found[name].ndim):
            got, must = tuple(found[name].shape), tuple(value.shape)
            raise CheckpointError(f"{folder}/model.safetensors: {name} must be {must}, but is {got} instead")
        if value.dtype != found[name].dtype:
            raise CheckpointError(
                f"{folder}/model.safetensors: {name} must be {value.dtype}, but is {found[name].dtype} instead"
            )
        if name in grown:
            setattr(grown[name], name.rpartition(".")[2], found[name])
        else:
            value.copy_(found[name])
    if not all(body.is_consistent() for body in set(grown.values())):
        raise CheckpointError(f"{folder}/model.safetensors: its tables do not fit together; use another checkpoint")


def _grown(head: nn.Module) -> dict[str, Model]:
    """Name the buffers whose sizes follow from data, with their owners: they are taken as the file has them, mapped."""
    bodies = {
        place: body for place, body in head.named_modules() if isinstance(body, Model) and body.data_sized_buffers
    }
    return {f"{place}.{name}".strip("."): body for place, body in bodies.items() for name in dict(body.named_buffers())}


def without_heads(found: dict[str, Tensor], head: nn.Module) -> dict[str, Tensor]:
    """Cut the heads that the recipe turns off out of weights that were trained with them."""
    for place, module in head.named_modules():
        if isinstance(module, MultiHeadAttention):
            names = {f"{place}.{name}": name for name, _ in module.named_parameters()}
            found |= {full: module.cut(name, found[full]) for full, name in names.items() if full in found}
    return found


def load_progress(folder: Path) -> Progress:
    """Read where a training stood."""
    path = folder / "state" / "progress.json"
    try:
        raw: Any = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(raw, dict) or set(raw) != {part.name for part in fields(Progress)}:
            raise ValueError("it does not have the keys that it should")
        return TypeAdapter(Progress).validate_python(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise CheckpointError(
            f"{path}: {where}: {first['msg']}; this checkpoint can be used but not resumed from"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path}: cannot be read: {error}; this checkpoint can be used but not resumed from"
        ) from None


def load_optimizer(folder: Path, optimizer: torch.optim.Optimizer, head: nn.Module) -> None:
    """Fill an optimiser with the state that was saved."""
    parameters = dict(head.named_parameters())
    found = _tensors(folder / "state" / "optimizer.safetensors")
    stateless = isinstance(optimizer, torch.optim.SGD)  # until it averages
    if not found and not stateless and load_progress(folder).step:
        raise CheckpointError(f"{folder}/state/optimizer.safetensors: is empty; use another checkpoint")
    for full, value in found.items():
        key, _, name = full.partition(".")
        if name not in parameters or key not in OPTIMIZER_KEYS:
            raise CheckpointError(f"{folder}/state/optimizer.safetensors: {full}: the optimiser has no such state")
        parameter = parameters[name]
        if value.ndim and value.shape != parameter.shape:  # Adam's step is a number
            got, must = tuple(value.shape), tuple(parameter.shape)
            raise CheckpointError(f"{folder}/state/optimizer.safetensors: {full} must be {must}, but is {got} instead")
        # Adam's fused kernel wants its step beside the weights.
        optimizer.state[parameter][key] = value.to(parameter.device)


def load_random(folder: Path) -> dict[str, Tensor]:
    """Read the random states, by kind and rank."""
    return _tensors(folder / "state" / "random.safetensors")


def _tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None


def check_data(folder: Path, then: str, now: str) -> None:
    """Refuse to resume on other data than before."""
    if then != now:
        raise CheckpointError(
            f"{folder}: the data has changed since this checkpoint was written (its digest was {then[:12]}, "
            f"and is {now[:12]} now); put the old data back, or train afresh in another --out"
        )
