"""Folders of sentence-transformers: a Hugging Face directory, and how the vectors of its tokens become one of a text.

    modules.json                   the parts in order, and the folder of each
    sentence_bert_config.json      in the Transformer's folder: how many tokens of a text are read (of late that is the
                                   model_max_length of tokenizer_config.json)
    1_Pooling/config.json          which vectors are pooled, and how

A part that weft does not do is refused, never left out.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from weft.errors import CheckpointError
from weft.formats.huggingface.tokenizer import CONFIG, read_json, write_json

Pool = Literal["mean", "cls", "max", "last"]
_POOLS: Mapping[str, Pool] = {"mean": "mean", "cls": "cls", "max": "max", "lasttoken": "last"}  # theirs -> ours
_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
FEATURES, UNLIMITED = "feature-extraction", 10**9
OWN = "pooling.json"  # what a checkpoint of weft's has of it
_PARTS = ("Transformer", "Pooling", "Normalize")


@dataclass(frozen=True)
class Pooling:
    """How a folder makes one vector of a text: what is pooled of the last layer, of so many tokens at most."""

    pool: Pool
    normalize: bool = False  # whether the vector is brought to length 1
    longest: int | None = None  # tokens of a text that are read, those that begin and end it among them; None: all
    lowercase: bool = False  # whether texts are put in lower case before they are read


def transformer_folder(folder: Path) -> Path:
    """Say where the Hugging Face directory of a folder is: it may be a folder inside."""
    parts = _parts(folder)
    return folder if parts is None else folder / parts[0][1]


def write_pooling(folder: Path, pooling: Pooling) -> None:
    """Write how texts become vectors into a checkpoint of weft's."""
    write_json(folder / OWN, asdict(pooling))


def export_pooling(folder: Path, pooling: Pooling, width: int) -> None:
    """Make a Hugging Face directory one of sentence-transformers; vectors have so many numbers."""
    parts = [("Transformer", ""), ("Pooling", "1_Pooling"), *([("Normalize", "2_Normalize")] * pooling.normalize)]
    for _, inside in parts[1:]:
        (folder / inside).mkdir()
    rows = [
        {"idx": place, "name": str(place), "path": inside, "type": f"sentence_transformers.models.{kind}"}
        for place, (kind, inside) in enumerate(parts)
    ]
    (folder / "modules.json").write_text(json.dumps(rows, indent=2), encoding="utf-8")
    flags = {key: _POOLS.get(name) == pooling.pool for key, name in _FLAGS.items()}
    write_json(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": width, **flags})
    said = {"max_seq_length": pooling.longest, "do_lower_case": pooling.lowercase}
    write_json(folder / "sentence_bert_config.json", said)


def read_pooling(folder: Path) -> Pooling | None:
    """Read how texts become vectors; None of a folder that does not say so."""
    if (folder / OWN).is_file():
        try:
            return TypeAdapter(Pooling).validate_python(read_json(folder / OWN))
        except ValidationError as error:
            first = error.errors()[0]
            raise CheckpointError(f"{folder / OWN}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    parts = _parts(folder)
    if parts is None:
        return None
    _check_prompt(folder)
    inside = folder / parts[0][1]
    told = _settings(inside)
    normalize = any(kind == "Normalize" for kind, _ in parts)
    pool = _pool(folder / parts[1][1] / "config.json")
    return Pooling(pool, normalize, _longest(inside, told), bool(told.get("do_lower_case")))


def _parts(folder: Path) -> list[tuple[str, str]] | None:
    """Return the parts, in order, and the folder of each inside this one; None where it has no modules.json."""
    path = folder / "modules.json"
    if not path.is_file():
        return None
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        parts = [(str(one["type"]).rpartition(".")[2], str(one["path"])) for one in told]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{path}: must be a list of parts, each with a type and a path: {error}") from None
    kinds = [kind for kind, _ in parts]
    strange = [kind for kind in kinds if kind not in _PARTS]
    if strange:
        raise CheckpointError(
            f"{path}: has a part {strange[0]!r}, which weft does not do; it does {', '.join(_PARTS[:-1])} and "
            f"{_PARTS[-1]}"
        )
    if tuple(kinds) not in (_PARTS, _PARTS[:-1]):
        raise CheckpointError(
            f"{path}: must have the parts Transformer, Pooling and perhaps Normalize, "
            f"but has {', '.join(kinds) or 'none'}"
        )
    for _, inside in parts:
        if Path(inside).is_absolute() or ".." in Path(inside).parts:
            raise CheckpointError(f"{path}: names the folder {inside!r}, which is not inside this one")
    return parts


def _settings(folder: Path) -> dict[str, Any]:
    """Read what is said of how texts are read; the file's name has had other models in it."""
    found = sorted(folder.glob("sentence_*_config.json"))
    told = read_json(found[0]) if found else {}
    if told.get("transformer_task", FEATURES) != FEATURES:
        raise CheckpointError(
            f"{found[0]}: transformer_task is {told['transformer_task']!r}, but weft's is {FEATURES!r}"
        )
    return told


def _longest(folder: Path, told: Mapping[str, Any]) -> int | None:
    """Say how many tokens are read; a tokenizer that has no limit says 10^30."""
    longest = told.get("max_seq_length")
    if longest is None:
        longest = read_json(folder / CONFIG, {}).get("model_max_length")
        longest = longest if isinstance(longest, int) and longest < UNLIMITED else None
    if longest is not None and (not isinstance(longest, int) or longest < 1):
        raise CheckpointError(f"{folder}: max_seq_length must be a number of tokens, but is {longest!r}")
    return longest


def _pool(path: Path) -> Pool:
    told = read_json(path)
    mode = told.get("pooling_mode") or [name for key, name in _FLAGS.items() if told.get(key)] or "mean"
    modes = [str(one) for one in ([mode] if isinstance(mode, str) else mode)]
    if len(modes) != 1 or modes[0] not in _POOLS:
        raise CheckpointError(
            f"{path}: pools by {' and '.join(modes)}, which weft does not do; it does one of {', '.join(_POOLS)}"
        )
    return _POOLS[modes[0]]


def _check_prompt(folder: Path) -> None:
    """Refuse a prompt that would stand before every text."""
    path = folder / "config_sentence_transformers.json"
    name = read_json(path, {}).get("default_prompt_name")
    if name is not None:
        raise CheckpointError(
            f"{path}: puts the prompt {name!r} before every text, which weft does not do; set default_prompt_name to "
            "null and write the prompt yourself"
        )
