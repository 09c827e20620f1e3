"""Saved estimators: a checkpoint, and estimator.json with the estimator's parameters. There is no pickle in it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ValidationError

from weft.checkpoint.store import save_folder
from weft.config.small_files import read_small_text
from weft.errors import CheckpointError
from weft.pipeline import Pipeline

ESTIMATOR_FILE = "estimator.json"


class EstimatorInfo(BaseModel):
    """The contents of estimator.json: the estimator's class name, its parameters, and its labels."""

    kind: str
    parameters: dict[str, Any]
    classes: list[Any] | None = None
    dtype: str | None = None


def json_parameters(estimator: Any, *excluded: str) -> dict[str, Any]:
    """Return an estimator's parameters as JSON values; a model that is a pipeline is None: the folder has it."""
    parameters = {name: value for name, value in estimator.get_params(deep=False).items() if name not in excluded}
    if isinstance(parameters.get("model"), Pipeline):
        parameters["model"] = None
    plain: dict[str, Any] = json.loads(json.dumps(parameters, default=_to_json))
    return plain


def _to_json(value: Any) -> Any:
    """Convert what JSON does not support: paths, numpy's numbers, other mappings."""
    if isinstance(value, Mapping):
        return dict(value)
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else str(value)


def save_estimator(path: str | Path, pipeline: Pipeline, about: EstimatorInfo) -> Path:
    """Write a checkpoint that has the estimator's parameters in it."""

    def write(folder: Path) -> None:
        pipeline.write(folder)
        (folder / ESTIMATOR_FILE).write_text(about.model_dump_json(indent=1), encoding="utf-8")

    return save_folder(Path(path), 0, write)


def read_estimator_info(kind: type, path: str | Path) -> EstimatorInfo:
    """Read estimator.json; raise an error if another kind of estimator wrote it."""
    file = Path(path) / ESTIMATOR_FILE
    try:
        saved = EstimatorInfo.model_validate_json(read_small_text(file))
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}; give a folder that `save` wrote") from None
    except (ValidationError, UnicodeDecodeError):
        raise CheckpointError(f"{file}: is not what `save` writes; save the estimator again") from None
    if saved.kind != kind.__name__:
        raise CheckpointError(f"{path}: holds a {saved.kind}, but is read as a {kind.__name__}; use {saved.kind}.load")
    unknown = sorted(set(saved.parameters) - set(kind._get_param_names()))  # type: ignore[attr-defined]
    if unknown:
        raise CheckpointError(f"{file}: {kind.__name__} has no {unknown[0]!r}; was it saved by another version?")
    return saved
