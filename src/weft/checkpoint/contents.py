"""The contents of a checkpoint: recipe, tokenizer, weights and, for resuming, the training state.

    run.yaml  tokenizer.json  model.safetensors  state/{progress.json, optimizer.safetensors, random.safetensors}

There is no pickle anywhere: tensors are safetensors, the rest is YAML and JSON.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, TypeAdapter, ValidationError
from safetensors.torch import save_file
from torch import Tensor, nn

from weft.checkpoint.optimizer_state import OPTIMIZER_FILE
from weft.checkpoint.storage import Storage, bundled_model, compress, expand, leave_out, left_out
from weft.checkpoint.tensor_files import check_finite, copy_to, on_meta_device, read_tensors
from weft.config.overrides import Overrides
from weft.config.recipes import read_recipe
from weft.config.run import Run
from weft.config.small_files import read_small_text
from weft.config.yaml import read_yaml, write_yaml
from weft.data.batching.loader import Position
from weft.errors import CheckpointError
from weft.models.base import Model
from weft.nn.attention.multihead import MultiHeadAttention
from weft.registry import resolve
from weft.tasks.base import Task
from weft.tasks.factory import build, build_on_meta
from weft.tasks.head import Head
from weft.tokenization.trainable import Tokenizer

CHANGEABLE = (  # when a checkpoint is loaded
    "model.pruned_heads",
    "model.dropout",
    "model.mem_len",
    "tokenizer.split_special_tokens",
)
RANDOM_FILE, CARRIED_FILE = "state/random.safetensors", "state/carried.safetensors"
Count = Annotated[int, Field(ge=0, lt=2**53)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


@dataclass
class Progress:
    """The training state besides weights and optimizer state."""

    step: Count = 0
    position: Position = field(default_factory=Position)
    elapsed: Finite = 0.0  # seconds of training
    bad_steps: Count = 0
    loss_sum: Finite = 0.0  # since the last report
    loss_steps: Count = 0
    best: list[float] | None = None  # the best evaluation's metric, signed so that less is better, and loss
    best_step: Count = 0
    stale: Count = 0  # evaluations since the best one
    data: str = ""  # digest of the training data
    done: bool = False
    flops: Finite = 0.0  # operations of training, over all processes


def write_model(
    folder: Path,
    run: Run,
    tokenizer: Tokenizer,
    head: nn.Module,
    storage: Storage = "fp32",
    base: str | None = None,
) -> None:
    """Write what `load` needs: recipe, tokenizer and weights, without those that equal the weights of `base`."""
    write_weights(folder, run, tokenizer, weights(head), storage, base)


def write_weights(
    folder: Path,
    run: Run,
    tokenizer: Tokenizer,
    tensors: Mapping[str, Tensor],
    storage: Storage = "fp32",
    base: str | None = None,
) -> None:
    """Write what `write_model` does, given the weights by name."""
    (folder / "run.yaml").write_text(write_yaml(run.dump()), encoding="utf-8")
    tokenizer.save(folder)
    metadata = None
    if base is not None:
        tensors, metadata = leave_out(tensors, read_weights(bundled_model(base, "base")), base)
    stored = {name: value.contiguous() for name, value in compress(tensors, storage).items()}
    save_file(stored, folder / "model.safetensors", metadata)


def write_state(
    folder: Path, progress: Progress, optimizer: Mapping[str, Tensor], random: Mapping[str, Tensor]
) -> None:
    """Write what resuming needs: progress, the optimizer's state (`optimizer_tensors`) and random states."""
    write_progress(folder, progress)
    save_file(dict(optimizer), folder / OPTIMIZER_FILE)
    save_file(dict(random), folder / RANDOM_FILE)


def write_progress(folder: Path, progress: Progress) -> None:
    """Write the training state as state/progress.json."""
    (folder / "state").mkdir()
    (folder / "state" / "progress.json").write_text(json.dumps(asdict(progress), indent=1), encoding="utf-8")


def write_hidden_states(folder: Path, carried: Mapping[str, Tensor]) -> None:
    """Write the hidden states carried across batches: `0.1` is the first tensor of the second stream."""
    save_file({name: part.cpu() for name, part in carried.items()}, folder / CARRIED_FILE)


def load_hidden_states(folder: Path, stream: int, device: torch.device) -> list[Tensor]:
    """Read the hidden states that are carried on in a stream of batches; an empty list where none are carried."""
    path = folder / CARRIED_FILE
    tensors = read_tensors(path) if path.exists() else {}
    parts = [tensors[f"{number}.{stream}"] for number in range(len(tensors)) if f"{number}.{stream}" in tensors]
    for number, part in enumerate(parts):
        check_finite(f"{path}: {number}.{stream}", part)
    return [copy_to(part, device) for part in parts]


def weights(head: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name, each once: a tied one under its first name."""
    saved = head.state_dict()
    buffers = {name: value for name, value in head.named_buffers() if name in saved}
    return {name: value.detach() for name, value in (*head.named_parameters(), *buffers.items())}


def read_saved_run(folder: Path, trust: bool = False, overrides: Overrides = ()) -> Run:
    """Read a checkpoint's recipe and apply overrides; classes from outside weft are imported only with `trust`."""
    return run_with_overrides(read_recipe_of(folder), folder, trust, overrides)


def run_with_overrides(recipe: Mapping[str, Any], folder: Path, trust: bool = False, overrides: Overrides = ()) -> Run:
    """Validate a checkpoint's recipe with overrides, which must be compatible with its weights."""
    run = Run.parse(read_recipe(recipe, overrides), trust)
    if overrides:
        _check_unchanged(Run.parse(recipe, trust).dump(), run.dump(), folder)
    _check_pruned_heads(recipe, run.dump(), folder)
    return run


def _check_unchanged(saved: Mapping[str, Any], current: Mapping[str, Any], folder: Path) -> None:
    """Raise an error if model or tokenizer differ from those the weights were trained with.

    Shapes alone do not show such a difference.
    """
    for key, (old, new) in differences(saved, current).items():
        if key.startswith(("model.", "tokenizer.")) and not key.startswith(CHANGEABLE):
            raise CheckpointError(
                f"{folder}: was trained with {key}={old!r}, which cannot change to {new!r}; leave that override out "
                f"(only {', '.join(CHANGEABLE)} may change)"
            )


def _check_pruned_heads(saved: Mapping[str, Any], current: Mapping[str, Any], folder: Path) -> None:
    """Raise an error if pruned attention heads are to be restored: by shape alone, others would take their place."""
    model = saved.get("model")
    saved_heads, current_heads = (
        dict(part.get("pruned_heads") or {}) for part in (model if isinstance(model, dict) else {}, current["model"])
    )
    for layer, heads in saved_heads.items():
        if set(current_heads.get(str(layer), ())) != set(heads):
            raise CheckpointError(
                f"{folder}: the heads {heads} of {layer} were pruned from its weights, but model.pruned_heads.{layer} "
                f"is now {current_heads.get(str(layer), [])}; leave it as it is, or load a checkpoint with all heads"
            )


def read_recipe_of(folder: Path) -> dict[str, Any]:
    """Return a checkpoint's recipe as plain data; no class that it names is imported."""
    try:
        text = read_small_text(folder / "run.yaml")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{folder}: run.yaml cannot be read: {error}; is this a checkpoint of weft?") from None
    raw = read_yaml(text, str(folder / "run.yaml"))
    if not isinstance(raw, dict):
        raise CheckpointError(f"{folder}: run.yaml must be a recipe, but is {type(raw).__name__} instead")
    return raw


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the dotted keys, sorted, in which two (parts of) recipes differ, with both values."""
    a, b = _flatten(first), _flatten(second)
    return {key: (a.get(key), b.get(key)) for key in sorted(a.keys() | b.keys()) if a.get(key) != b.get(key)}


def _flatten(raw: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(raw, Mapping):
        return {prefix: raw}
    return {
        key: value
        for name, inner in raw.items()
        for key, value in _flatten(inner, f"{prefix}.{name}".strip(".")).items()
    }


def load_head(run: Run, tokenizer: Tokenizer, folder: Path) -> tuple[Task, Head]:
    """Build the model of a checkpoint and load its weights, once they are known to fit it.

    The recipe's sizes are compared with the file's header before anything is allocated.
    """
    tensors = read_weights(folder)
    if is_own(run) and not resolve("model", run.model.name).data_sized_buffers:
        copy_into_head(build_on_meta(run, tokenizer), on_meta_device(tensors), folder)
    task, head = build(run, tokenizer)
    copy_into_head(head, tensors, folder)
    return task, head


def is_own(run: Run) -> bool:
    """Return whether tasks and model are weft's own: a class from outside may not build on the meta device."""
    tasks = [run.for_task(name).task for name in run.task_names] or [run.task]
    return not any(":" in section.name for section in (run.model, *tasks))


def load_weights(folder: Path, head: nn.Module) -> None:
    """Load a checkpoint's weights into a head; a name or shape that does not match is an error."""
    copy_into_head(head, read_weights(folder), folder)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Read the weights of a checkpoint, by name; int8 rows are expanded to float32.

    Weights that were left out, as they equal those of a model that ships with weft, are read from that model.
    """
    path = folder / "model.safetensors"
    tensors = expand(read_tensors(path), str(path))
    base, names = left_out(path)
    if base is None:
        return tensors
    inherited = read_weights(bundled_model(base, str(path)))
    if missing := next((name for name in names if name not in inherited), None):
        raise CheckpointError(f"{path}: {missing}: {base}, which it is to come from, has no such weight")
    return tensors | {name: inherited[name] for name in names}


def copy_into_head(head: nn.Module, tensors: dict[str, Tensor], folder: Path) -> None:
    """Copy weights into a head; a name, shape or dtype that does not match is an error that names `folder`.

    So are values that are not finite, except in tables that stay memory-mapped: those are not read whole.
    """
    tensors, targets = prune_heads(tensors, head), weights(head)
    unmatched = sorted(set(tensors) ^ set(targets))
    if unmatched:
        reason = "the file lacks it" if unmatched[0] in targets else "the model has no such weight"
        raise CheckpointError(f"{folder}/model.safetensors: {unmatched[0]}: {reason} ({len(unmatched)} in all)")
    data_sized = _data_sized_buffers(head)
    for name, value in targets.items():
        if value.shape != tensors[name].shape and not (name in data_sized and value.ndim == tensors[name].ndim):
            shape, expected = tuple(tensors[name].shape), tuple(value.shape)
            raise CheckpointError(f"{folder}/model.safetensors: {name} must be {expected}, but is {shape} instead")
        if value.dtype != tensors[name].dtype and not _upcasts(tensors[name].dtype, value.dtype):
            raise CheckpointError(
                f"{folder}/model.safetensors: {name} must be {value.dtype}, but is {tensors[name].dtype} instead"
            )
        if name not in data_sized:
            check_finite(f"{folder}/model.safetensors: {name}", tensors[name])
            value.copy_(tensors[name])
        else:
            setattr(data_sized[name], name.rpartition(".")[2], tensors[name])
    if not all(body.is_consistent() for body in set(data_sized.values())):
        raise CheckpointError(f"{folder}/model.safetensors: its tables do not fit together; use another checkpoint")


def _upcasts(stored: torch.dtype, needed: torch.dtype) -> bool:
    """Return whether weights that were stored in half the bytes are read as float32: that loses nothing."""
    return needed is torch.float32 and stored in (torch.bfloat16, torch.float16)


def _data_sized_buffers(head: nn.Module) -> dict[str, Model]:
    """Return data-sized buffers by name, with the models that own them: set to the file's tensors (memory-mapped)."""
    bodies = {path: body for path, body in head.named_modules() if isinstance(body, Model) and body.data_sized_buffers}
    return {f"{path}.{name}".strip("."): body for path, body in bodies.items() for name in dict(body.named_buffers())}


def prune_heads(tensors: dict[str, Tensor], head: nn.Module) -> dict[str, Tensor]:
    """Prune the attention heads that the recipe turns off from weights that were trained with them."""
    for path, module in head.named_modules():
        if isinstance(module, MultiHeadAttention):
            names = {f"{path}.{name}": name for name, _ in module.named_parameters()}
            tensors |= {full: module.cut(name, tensors[full]) for full, name in names.items() if full in tensors}
    return tensors


def load_progress(folder: Path) -> Progress:
    """Read the training state."""
    path = folder / "state" / "progress.json"
    try:
        text = read_small_text(path)
        raw: Any = json.loads(text)
        if not isinstance(raw, dict) or set(raw) != {part.name for part in fields(Progress)}:
            raise ValueError("it does not have the keys that it should")
        return TypeAdapter(Progress).validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise CheckpointError(
            f"{path}: {where}: {first['msg']}; this checkpoint can be used but not resumed from"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: cannot be read: {error}; this checkpoint can be used but not resumed from"
        ) from None


def load_random(folder: Path) -> dict[str, Tensor]:
    """Read the random generators' states, by kind and rank."""
    return read_tensors(folder / RANDOM_FILE)


def check_corpus_digest(folder: Path, saved: str, current: str) -> None:
    """Raise an error if the data to resume on has another digest than before."""
    if saved != current:
        raise CheckpointError(
            f"{folder}: the data has changed since this checkpoint was written (its digest was {saved[:12]}, "
            f"and is now {current[:12]}); restore the old data, or start a new run in another --out"
        )
