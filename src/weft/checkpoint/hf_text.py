"""A tokenizer in a Hugging Face directory: read as one of weft's kinds, written so that `AutoTokenizer` reads it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Engine
from tokenizers.processors import TemplateProcessing

from weft.config import read_section
from weft.errors import CheckpointError
from weft.models.base import HFMap
from weft.registry import names, resolve
from weft.text.tokenizer import Tokenizer
from weft.text.vocabularies import read_engine, section_of

CONFIG = "tokenizer_config.json"


def read_tokenizer(folder: Path, family: HFMap, vocab: int) -> Tokenizer:
    """Read a tokenizer of `vocab` tokens; its section has the spelling of the special ones."""
    told = read_json(folder / "special_tokens_map.json", {}) | read_json(folder / CONFIG, {})
    engine = read_engine(folder, family.vocabulary, bool(told.get("add_prefix_space", False)))
    own = told.get("weft")  # what wrote it was weft
    section = own if isinstance(own, dict) else {**section_of(engine, vocab), "specials": _specials(family, told)}
    if section.get("name") not in names("tokenizer"):
        raise CheckpointError(f"{folder / CONFIG}: weft.name: {section.get('name')!r} is no tokenizer of weft's")
    kind: type[Tokenizer] = resolve("tokenizer", section["name"])
    config = read_section(kind.Config, section, f"{folder / CONFIG}: weft")
    specials = kind.special_tokens(config)
    missing = [token for token in specials if engine.token_to_id(token) is None]
    if missing or type(engine.model).__name__ != kind.model:
        lacks = f"its vocabulary does not have {missing[0]}" if missing else "it is of another kind"
        raise CheckpointError(f"{folder}: the tokenizer does not fit what {CONFIG} says: {lacks}")
    engine.add_special_tokens(specials)
    _fill_up(folder, engine, vocab)
    return kind(config, engine)


def _specials(family: HFMap, told: Mapping[str, Any]) -> dict[str, str]:
    """Say which token has which role; what the files do not say, the family does."""
    said = {role: told.get(key) or default for role, (key, default) in family.specials.items()}
    spelt = {role: one.get("content") if isinstance(one, dict) else one for role, one in said.items()}
    return {role: str(token) for role, token in spelt.items() if token is not None}


def _fill_up(folder: Path, engine: Engine, vocab: int) -> None:
    """Bring a vocabulary to the model's: some have rows for tokens that are not there."""
    size = int(engine.get_vocab_size())
    if max(engine.get_vocab().values()) >= size or size > vocab:
        raise CheckpointError(
            f"{folder}: its tokenizer has {size} tokens with ids up to {max(engine.get_vocab().values())}, and its "
            f"model reads {vocab}; are they of one model?"
        )
    engine.add_special_tokens([f"<|unused{number}|>" for number in range(vocab - size)])


def write_tokenizer(folder: Path, tokenizer: Tokenizer, longest: int) -> None:
    """Write a tokenizer; where texts have a sign for their beginning alone, it stands before each, as in training."""
    engine = Engine.from_str(tokenizer.engine.to_str())
    spelt = tokenizer.spell(tokenizer.config)
    if spelt["bos"] != spelt["eos"]:
        engine.post_processor = TemplateProcessing(
            single=f"{spelt['bos']} $A", special_tokens=[(spelt["bos"], tokenizer.specials.bos)]
        )
    engine.save(str(folder / "tokenizer.json"))
    told = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": longest,
        "clean_up_tokenization_spaces": False,
        **{f"{role}_token": token for role, token in spelt.items()},
        "weft": tokenizer.config.model_dump(mode="json", exclude_none=True),
    }
    write_json(folder / CONFIG, told)


def read_json(path: Path, otherwise: dict[str, Any] | None = None) -> dict[str, Any]:
    """Read a JSON object; a file that is not there is `otherwise`, if that is given."""
    if otherwise is not None and not path.exists():
        return otherwise
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: must be an object, but is {type(found).__name__} instead")
    return found


def write_json(path: Path, told: Mapping[str, Any]) -> None:
    """Write a JSON object."""
    path.write_text(json.dumps(told, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
