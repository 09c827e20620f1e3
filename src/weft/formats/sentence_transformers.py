"""sentence-transformers directories: a Hugging Face directory with a pooling configuration.

    modules.json                   the modules in order, and the folder of each
    sentence_bert_config.json      in the Transformer's folder: the maximum number of tokens of a text (in newer
                                   versions the model_max_length of tokenizer_config.json)
    1_Pooling/config.json          the pooling mode

A module that weft does not support is an error, never ignored.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from weft.config.small_files import read_small_text
from weft.errors import CheckpointError
from weft.formats.huggingface.tokenizer import CONFIG, read_json, write_json_object
from weft.nn.layers.pooling import PoolingMode

_POOLS: Mapping[str, PoolingMode] = {"mean": "mean", "cls": "cls", "max": "max", "lasttoken": "last"}  # theirs -> ours
_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
FEATURES, UNLIMITED = "feature-extraction", 10**9
POOLING = "pooling.json"  # the pooling in a weft checkpoint
_MODULE_TYPES = ("Transformer", "Pooling", "Normalize")


@dataclass(frozen=True)
class Pooling:
    """The pooling of a text's last hidden states to one vector."""

    pool: PoolingMode
    normalize: bool = False  # to unit length
    longest: int | None = None  # maximum tokens of a text, special tokens included; None: no limit
    lowercase: bool = False  # whether texts are lowercased first


def transformer_folder(folder: Path) -> Path:
    """Return the Hugging Face directory of a folder: the folder itself, or one inside it."""
    modules = _read_modules(folder)
    return folder if modules is None else folder / modules[0][1]


def write_pooling(folder: Path, pooling: Pooling) -> None:
    """Write the pooling to a weft checkpoint."""
    write_json_object(folder / POOLING, asdict(pooling))


def export_pooling(folder: Path, pooling: Pooling, width: int) -> None:
    """Add the files of sentence-transformers to a Hugging Face directory; `width` is the dimension of vectors."""
    modules = [("Transformer", ""), ("Pooling", "1_Pooling"), *([("Normalize", "2_Normalize")] * pooling.normalize)]
    for _, subfolder in modules[1:]:
        (folder / subfolder).mkdir()
    rows = [
        {"idx": index, "name": str(index), "path": subfolder, "type": f"sentence_transformers.models.{kind}"}
        for index, (kind, subfolder) in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(rows, indent=2), encoding="utf-8")
    flags = {key: _POOLS.get(name) == pooling.pool for key, name in _FLAGS.items()}
    write_json_object(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": width, **flags})
    settings = {"max_seq_length": pooling.longest, "do_lower_case": pooling.lowercase}
    write_json_object(folder / "sentence_bert_config.json", settings)


def read_pooling(folder: Path) -> Pooling | None:
    """Read the pooling of a folder; None where it has none."""
    if (folder / POOLING).is_file():
        try:
            return TypeAdapter(Pooling).validate_python(read_json(folder / POOLING))
        except ValidationError as error:
            first = error.errors()[0]
            raise CheckpointError(f"{folder / POOLING}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    modules = _read_modules(folder)
    if modules is None:
        return None
    _check_prompt(folder)
    transformer = folder / modules[0][1]
    settings = _read_settings(transformer)
    normalize = any(kind == "Normalize" for kind, _ in modules)
    pool = _read_pool(folder / modules[1][1] / "config.json")
    return Pooling(pool, normalize, _max_length(transformer, settings), bool(settings.get("do_lower_case")))


def _read_modules(folder: Path) -> list[tuple[str, str]] | None:
    """Return the modules in order, as type and sub-folder; None where there is no modules.json."""
    path = folder / "modules.json"
    if not path.is_file():
        return None
    try:
        modules = json.loads(read_small_text(path))
        parts = [(str(module["type"]).rpartition(".")[2], str(module["path"])) for module in modules]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{path}: must be a list of parts, each with a type and a path: {error}") from None
    kinds = [kind for kind, _ in parts]
    unsupported = [kind for kind in kinds if kind not in _MODULE_TYPES]
    if unsupported:
        raise CheckpointError(
            f"{path}: has a part {unsupported[0]!r}, which weft does not do; it does "
            f"{', '.join(_MODULE_TYPES[:-1])} and {_MODULE_TYPES[-1]}"
        )
    if tuple(kinds) not in (_MODULE_TYPES, _MODULE_TYPES[:-1]):
        raise CheckpointError(
            f"{path}: must have the parts Transformer, Pooling and perhaps Normalize, "
            f"but has {', '.join(kinds) or 'none'}"
        )
    for _, subfolder in parts:
        if Path(subfolder).is_absolute() or ".." in Path(subfolder).parts:
            raise CheckpointError(f"{path}: names the folder {subfolder!r}, which is not inside this one")
    return parts


def _read_settings(folder: Path) -> dict[str, Any]:
    """Read sentence_*_config.json, whose name has contained different models; {} where there is none."""
    paths = sorted(folder.glob("sentence_*_config.json"))
    settings = read_json(paths[0]) if paths else {}
    if settings.get("transformer_task", FEATURES) != FEATURES:
        raise CheckpointError(
            f"{paths[0]}: transformer_task is {settings['transformer_task']!r}, but weft's is {FEATURES!r}"
        )
    return settings


def _max_length(folder: Path, settings: Mapping[str, Any]) -> int | None:
    """Return the maximum number of tokens; without a limit, tokenizers have 10^30."""
    max_length = settings.get("max_seq_length")
    if max_length is None:
        max_length = read_json(folder / CONFIG, {}).get("model_max_length")
        max_length = max_length if isinstance(max_length, int) and max_length < UNLIMITED else None
    if max_length is not None and (not isinstance(max_length, int) or max_length < 1):
        raise CheckpointError(f"{folder}: max_seq_length must be a number of tokens, but is {max_length!r}")
    return max_length


def _read_pool(path: Path) -> PoolingMode:
    config = read_json(path)
    mode = config.get("pooling_mode") or [name for key, name in _FLAGS.items() if config.get(key)] or "mean"
    modes = [str(name) for name in ([mode] if isinstance(mode, str) else mode)]
    if len(modes) != 1 or modes[0] not in _POOLS:
        raise CheckpointError(
            f"{path}: pools by {' and '.join(modes)}, which weft does not do; it does one of {', '.join(_POOLS)}"
        )
    return _POOLS[modes[0]]


def _check_prompt(folder: Path) -> None:
    """Raise an error if a default prompt would be prepended to every text."""
    path = folder / "config_sentence_transformers.json"
    name = read_json(path, {}).get("default_prompt_name")
    if name is not None:
        raise CheckpointError(
            f"{path}: puts the prompt {name!r} before every text, which weft does not do; set default_prompt_name to "
            "null and write the prompt yourself"
        )
