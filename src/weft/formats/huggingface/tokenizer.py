"""Tokenizers in Hugging Face directories: read as one of weft's, written so that `AutoTokenizer` loads them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Engine
from tokenizers.processors import TemplateProcessing

from weft.config.schema import read_section
from weft.config.small_files import read_small_text
from weft.errors import CheckpointError
from weft.formats.huggingface.mapping import HFMapping
from weft.registry import names, resolve
from weft.tokenization.tokenizer_file import panics_as_errors
from weft.tokenization.trainable import Tokenizer
from weft.tokenization.vocab_files import read_engine, register_special_tokens, section_of, token_text

CONFIG = "tokenizer_config.json"
MAX_UNUSED = 1 << 16  # embeddings of tokens that do not exist


def read_tokenizer(folder: Path, family: HFMapping, vocab: int) -> Tokenizer:
    """Load a tokenizer of `vocab` tokens; its recipe section names the special tokens."""
    config = read_json(folder / "special_tokens_map.json", {}) | read_json(folder / CONFIG, {})
    engine = read_engine(folder, family.vocab_format, config)
    own_section = config.get("weft")  # written by weft's export
    section = own_section if isinstance(own_section, dict) else _tokenizer_section(engine, vocab, family, config)
    if section.get("name") not in names("tokenizer"):
        raise CheckpointError(f"{folder / CONFIG}: weft.name: {section.get('name')!r} is no tokenizer of weft's")
    kind: type[Tokenizer] = resolve("tokenizer", section["name"])
    parsed = read_section(kind.Config, section, f"{folder / CONFIG}: weft")
    specials = kind.special_tokens(parsed)
    missing = [token for token in specials if engine.token_to_id(token) is None]
    if missing or type(engine.model).__name__ != kind.model:
        reason = f"its vocabulary does not have {missing[0]}" if missing else "it is of another kind"
        raise CheckpointError(f"{folder}: the tokenizer does not fit what {CONFIG} says: {reason}")
    if isinstance(own_section, dict):
        engine.add_special_tokens(specials)
    else:
        register_special_tokens(engine, specials)
    _pad_vocab(folder, engine, vocab)
    return kind(parsed, engine)


def _tokenizer_section(engine: Engine, vocab: int, family: HFMapping, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tokenizer's section of a recipe; special tokens are those of the files, else of the family."""
    tokens = {role: token_text(config.get(key) or default) for role, (key, default) in family.specials.items()}
    specials = {role: token for role, token in tokens.items() if token is not None}
    section = {**section_of(engine, vocab), "specials": specials}
    num_separators = family.num_separators
    if family.framed and engine.post_processor is not None:  # it adds the special tokens of a pair
        num_separators = max(_pair_tokens(engine).count(specials["eos"]) - 1, 1)
    return section if num_separators == 1 else {**section, "num_separators": num_separators}


def _pair_tokens(engine: Engine) -> list[str]:
    """Return the tokens of a pair of texts, with the special ones that the post-processor adds."""
    try:
        with panics_as_errors():
            return list(engine.encode("a", "b").tokens)
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(f"tokenizer.json: its post_processor cannot be applied: {error}") from None


def _pad_vocab(folder: Path, engine: Engine, vocab: int) -> None:
    """Pad the vocabulary to the model's size: some models have embeddings for tokens that do not exist."""
    size = int(engine.get_vocab_size())
    if max(engine.get_vocab().values()) >= size or size > vocab:
        raise CheckpointError(
            f"{folder}: its tokenizer has {size} tokens with ids up to {max(engine.get_vocab().values())}, and its "
            f"model reads {vocab}; are they of one model?"
        )
    if vocab - size > MAX_UNUSED:
        raise CheckpointError(
            f"{folder}: its tokenizer has {size} tokens, and its model reads {vocab}, more than {MAX_UNUSED:,} "
            "others; are they of one model?"
        )
    engine.add_special_tokens([f"<|unused{number}|>" for number in range(vocab - size)])


def write_tokenizer(folder: Path, tokenizer: Tokenizer, family: HFMapping, longest: int) -> None:
    """Write a tokenizer that adds the same special tokens as in training."""
    engine = Engine.from_str(tokenizer.engine.to_str())
    tokens = tokenizer.special_tokens_map(tokenizer.config)
    engine.post_processor = _post_processor(tokenizer, family)
    if "mask" in tokens and tokenizer.model == "BPE":  # a space before the mask belongs to it, as to any token
        engine.add_special_tokens([AddedToken(tokens["mask"], lstrip=True)])
    engine.save(str(folder / "tokenizer.json"))
    keys = {family.specials[role][0] if role in family.specials else f"{role}_token": role for role in tokens}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": longest,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", *(["token_type_ids"] if family.token_types else []), "attention_mask"],
        "unk_token": tokens["eos"],  # GPT-2's, which has no unknown token; CTranslate2 asks for one
        **{key: tokens[role] for key, role in keys.items()},
        "weft": tokenizer.config.model_dump(mode="json", exclude_none=True),
    }
    write_json_object(folder / CONFIG, config)


def _post_processor(tokenizer: Tokenizer, family: HFMapping) -> Any:
    """Return the post-processor that adds bos and eos, or only bos; None where bos and eos are one token."""
    ids, tokens = tokenizer.specials, tokenizer.special_tokens_map(tokenizer.config)
    bos, eos = tokens["bos"], tokens["eos"]
    special_tokens = [(bos, ids.bos), (eos, ids.eos)]
    if family.framed:
        second_type = int(family.token_types)
        separators = [(str(tokenizer.engine.id_to_token(id)), id) for id in tokenizer.pair_separator]
        between = " ".join(token for token, _ in separators)
        pair = f"{bos} $A {between} $B:{second_type} {eos}:{second_type}"
        special_tokens = list(dict.fromkeys([*special_tokens, *separators]))
        return TemplateProcessing(single=f"{bos} $A {eos}", pair=pair, special_tokens=special_tokens)
    return None if bos == eos else TemplateProcessing(single=f"{bos} $A", special_tokens=special_tokens[:1])


def read_json(path: Path, otherwise: dict[str, Any] | None = None) -> dict[str, Any]:
    """Read a JSON object; return `otherwise`, if given, where the file does not exist."""
    if otherwise is not None and not path.exists():
        return otherwise
    try:
        value = json.loads(read_small_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must be an object, but is {type(value).__name__} instead")
    return value


def write_json_object(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
