"""A tokenizer in a Hugging Face directory: read as one of weft's kinds, written so that `AutoTokenizer` reads it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Engine
from tokenizers.processors import TemplateProcessing

from weft.config.schema import read_section
from weft.errors import CheckpointError
from weft.formats.huggingface.mapping import HFMap
from weft.registry import names, resolve
from weft.tokenization.trainable import Tokenizer
from weft.tokenization.vocab_files import read_engine, section_of, settle_specials, spelling

CONFIG = "tokenizer_config.json"


def read_tokenizer(folder: Path, family: HFMap, vocab: int) -> Tokenizer:
    """Read a tokenizer of `vocab` tokens; its section has the spelling of the special ones."""
    told = read_json(folder / "special_tokens_map.json", {}) | read_json(folder / CONFIG, {})
    engine = read_engine(folder, family.vocabulary, told)
    own = told.get("weft")  # what wrote it was weft
    section = own if isinstance(own, dict) else _section(engine, vocab, family, told)
    if section.get("name") not in names("tokenizer"):
        raise CheckpointError(f"{folder / CONFIG}: weft.name: {section.get('name')!r} is no tokenizer of weft's")
    kind: type[Tokenizer] = resolve("tokenizer", section["name"])
    config = read_section(kind.Config, section, f"{folder / CONFIG}: weft")
    specials = kind.special_tokens(config)
    missing = [token for token in specials if engine.token_to_id(token) is None]
    if missing or type(engine.model).__name__ != kind.model:
        lacks = f"its vocabulary does not have {missing[0]}" if missing else "it is of another kind"
        raise CheckpointError(f"{folder}: the tokenizer does not fit what {CONFIG} says: {lacks}")
    if isinstance(own, dict):
        engine.add_special_tokens(specials)
    else:
        settle_specials(engine, specials)
    _fill_up(folder, engine, vocab)
    return kind(config, engine)


def _section(engine: Engine, vocab: int, family: HFMap, told: Mapping[str, Any]) -> dict[str, Any]:
    """Say which section of a recipe it has; which token has which role the files say, or else the family."""
    spelt = {role: spelling(told.get(key) or default) for role, (key, default) in family.specials.items()}
    specials = {role: token for role, token in spelt.items() if token is not None}
    section = {**section_of(engine, vocab), "specials": specials}
    gap = family.gap
    if family.framed and engine.post_processor is not None:  # which puts the tokens of a pair together
        gap = max(engine.encode("a", "b").tokens.count(specials["eos"]) - 1, 1)
    return section if gap == 1 else {**section, "gap": gap}


def _fill_up(folder: Path, engine: Engine, vocab: int) -> None:
    """Bring a vocabulary to the model's: some have rows for tokens that are not there."""
    size = int(engine.get_vocab_size())
    if max(engine.get_vocab().values()) >= size or size > vocab:
        raise CheckpointError(
            f"{folder}: its tokenizer has {size} tokens with ids up to {max(engine.get_vocab().values())}, and its "
            f"model reads {vocab}; are they of one model?"
        )
    engine.add_special_tokens([f"<|unused{number}|>" for number in range(vocab - size)])


def write_tokenizer(folder: Path, tokenizer: Tokenizer, family: HFMap, longest: int) -> None:
    """Write a tokenizer; what begins and ends a text in training stands around each there, too."""
    engine = Engine.from_str(tokenizer.engine.to_str())
    spelt = tokenizer.spell(tokenizer.config)
    engine.post_processor = _processor(tokenizer, family)
    if "mask" in spelt and tokenizer.model == "BPE":  # where the space before a word is the word's, it is the mask's
        engine.add_special_tokens([AddedToken(spelt["mask"], lstrip=True)])
    engine.save(str(folder / "tokenizer.json"))
    keys = {family.specials[role][0] if role in family.specials else f"{role}_token": role for role in spelt}
    told = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": longest,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", *(["token_type_ids"] if family.kinds else []), "attention_mask"],
        **{key: spelt[role] for key, role in keys.items()},
        "weft": tokenizer.config.model_dump(mode="json", exclude_none=True),
    }
    write_json(folder / CONFIG, told)


def _processor(tokenizer: Tokenizer, family: HFMap) -> Any:
    """Return what puts special tokens around texts: where they have a sign for their beginning alone, before each."""
    ids, spelt = tokenizer.specials, tokenizer.spell(tokenizer.config)
    bos, eos = spelt["bos"], spelt["eos"]
    known = [(bos, ids.bos), (eos, ids.eos)]
    if family.framed:
        second = int(family.kinds)
        between = " ".join([eos] * len(tokenizer.between))
        pair = f"{bos} $A {between} $B:{second} {eos}:{second}"
        return TemplateProcessing(single=f"{bos} $A {eos}", pair=pair, special_tokens=known)
    return None if bos == eos else TemplateProcessing(single=f"{bos} $A", special_tokens=known[:1])


def read_json(path: Path, otherwise: dict[str, Any] | None = None) -> dict[str, Any]:
    """Read a JSON object; a file that is not there is `otherwise`, if that is given."""
    if otherwise is not None and not path.exists():
        return otherwise
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: must be an object, but is {type(found).__name__} instead")
    return found


def write_json(path: Path, told: Mapping[str, Any]) -> None:
    """Write a JSON object."""
    path.write_text(json.dumps(told, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
