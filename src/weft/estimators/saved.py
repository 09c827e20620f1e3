"""Estimators on the disk: a checkpoint, and beside the model how the estimator was set. There is no pickle in it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ValidationError

from weft.checkpoint.store import save_folder
from weft.errors import CheckpointError
from weft.pipeline import Pipeline

ABOUT = "estimator.json"


class Saved(BaseModel):
    """What is written beside a model: which estimator, how it was set, and its classes."""

    kind: str
    parameters: dict[str, Any]
    classes: list[Any] | None = None
    dtype: str | None = None


def plain(estimator: Any, *left_out: str) -> dict[str, Any]:
    """Return an estimator's parameters as JSON has them; a model that is no path is in the folder itself."""
    found = {name: value for name, value in estimator.get_params(deep=False).items() if name not in left_out}
    if isinstance(found.get("model"), Pipeline):
        found["model"] = None
    plain: dict[str, Any] = json.loads(json.dumps(found, default=_spelt))
    return plain


def _spelt(value: Any) -> Any:
    """Write what JSON does not know: paths, numpy's numbers, mappings of other kinds."""
    if isinstance(value, Mapping):
        return dict(value)
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else str(value)


def save(path: str | Path, pipeline: Pipeline, about: Saved) -> Path:
    """Write a checkpoint with what is to be known of the estimator in it."""

    def write(folder: Path) -> None:
        pipeline.write(folder)
        (folder / ABOUT).write_text(about.model_dump_json(indent=1), encoding="utf-8")

    return save_folder(Path(path), 0, write)


def read_about(kind: type, path: str | Path) -> Saved:
    """Read what was written beside the model, and refuse what another estimator wrote."""
    file = Path(path) / ABOUT
    try:
        found = Saved.model_validate_json(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}; give a folder that `save` wrote") from None
    except (ValidationError, UnicodeDecodeError):
        raise CheckpointError(f"{file}: is not what `save` writes; save the estimator again") from None
    if found.kind != kind.__name__:
        raise CheckpointError(f"{path}: holds a {found.kind}, but is read as a {kind.__name__}; use {found.kind}.load")
    unknown = sorted(set(found.parameters) - set(kind._get_param_names()))  # type: ignore[attr-defined]
    if unknown:
        raise CheckpointError(f"{file}: {kind.__name__} has no {unknown[0]!r}; was it saved by another version?")
    return found
