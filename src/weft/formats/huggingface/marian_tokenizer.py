"""Marian in Hugging Face directories: two SentencePiece models with one vocabulary, and the decoding options.

source.spm and target.spm segment source and target texts; vocab.json has the ids of the pieces. The decoding options
are in generation_config.json, in older directories in config.json.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict

from weft.config.run import Run
from weft.config.schema import Section, read_section
from weft.decoding.config import DecodingConfig
from weft.errors import CheckpointError, ConfigError
from weft.formats.huggingface.mapping import HFMapping
from weft.formats.huggingface.tokenizer import CONFIG, read_json, write_json_object
from weft.tokenization.base import Tokenizer
from weft.tokenization.sentencepiece.marian import SentencePiece, word_engine
from weft.tokenization.sentencepiece.model_file import read_spm
from weft.tokenization.vocab_files import token_text

GENERATION = "generation_config.json"
_EARLY_STOPPING: Mapping[str, object] = {"sure": "never", "soon": False, "first": True}  # ours -> early_stopping
# Generation options that weft does not support -> the value that has no effect.
_NEUTRAL: Mapping[str, Any] = {
    "begin_suppress_tokens": None,
    "diversity_penalty": 0.0,
    "do_sample": False,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "exponential_decay_length_penalty": None,
    "forced_bos_token_id": None,
    "min_new_tokens": None,
    "num_beam_groups": 1,
    "sequence_bias": None,
    "suppress_tokens": None,
}


def read_marian(folder: Path, family: HFMapping, vocab: int) -> SentencePiece:
    """Load the source and target tokenizers; bos is the decoder_start_token_id of config.json."""
    config = read_json(folder / "config.json")
    tokenizer_config = read_json(folder / "special_tokens_map.json", {}) | read_json(folder / CONFIG, {})
    if tokenizer_config.get("separate_vocabs"):
        raise CheckpointError(f"{folder / CONFIG}: separate_vocabs is true, but weft's marian has one vocabulary alone")
    tokens = {
        role: token_text(tokenizer_config.get(key) or default) for role, (key, default) in family.specials.items()
    }
    specials = {role: token for role, token in tokens.items() if token is not None}
    engine = word_engine(folder / "vocab.json", specials["unk"], list(specials.values()))
    size, start = int(engine.get_vocab_size()), config.get("decoder_start_token_id")
    if size != vocab or config.get("decoder_vocab_size") not in (None, vocab):
        raise CheckpointError(f"{folder}: vocab.json has {size} tokens, but the model {vocab}; are they of one model?")
    if type(start) is not int or not 0 <= start < size:
        raise CheckpointError(
            f"{folder / 'config.json'}: decoder_start_token_id must be a token, but is {repr(start)[:60]}"
        )
    specials["bos"] = str(engine.id_to_token(start))
    section = {"name": "sentencepiece", "specials": specials}
    models = [read_spm(folder / name) for name in ("source.spm", "target.spm")]
    target = SentencePiece(SentencePiece.Config(**section), engine, models[1])
    return SentencePiece(SentencePiece.Config(**section, target=section), engine, models[0], target)


def write_marian(folder: Path, tokenizer: Tokenizer, family: HFMapping, longest: int) -> None:
    """Write the source and target tokenizers as `MarianTokenizer` reads them."""
    if not isinstance(tokenizer, SentencePiece) or not isinstance(tokenizer.target, SentencePiece):
        raise CheckpointError(
            f"tokenizer.name: {tokenizer.config.name!r} is not what a Marian reads; models that begin from one "
            "(model.weights) have such"
        )
    vocab = sorted(tokenizer.engine.get_vocab().items(), key=lambda item: item[1])
    write_json_object(folder / "vocab.json", dict(vocab))
    for name, side in (("source.spm", tokenizer), ("target.spm", tokenizer.target)):
        (folder / name).write_bytes(side.spm.raw)
    tokens = tokenizer.special_tokens_map(tokenizer.config)
    special_tokens = {key: tokens[role] for role, (key, _) in family.specials.items()}
    write_json_object(
        folder / CONFIG, {"tokenizer_class": "MarianTokenizer", "model_max_length": longest, **special_tokens}
    )


def read_translation(folder: Path, config: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the decoding options for the task's section of a recipe."""
    for key in ("attention_heads", "ffn_dim"):
        if config.get(f"encoder_{key}") != config.get(f"decoder_{key}"):
            raise CheckpointError(
                f"{folder / 'config.json'}: encoder_{key} is {config.get(f'encoder_{key}')!r} and decoder_{key} "
                f"{config.get(f'decoder_{key}')!r}, but weft's marian has as many on both sides"
            )
    path = folder / GENERATION if (folder / GENERATION).exists() else folder / "config.json"
    generation = read_json(path)
    for key, value in _NEUTRAL.items():
        if generation.get(key) not in (None, value):
            raise CheckpointError(
                f"{path}: {key} is {generation[key]!r}, which weft's search does not do; take the key out to "
                "load the model and search without it"
            )
    options = _parse_generation(path, generation)
    forbidden = {id for sequence in options.bad_words_ids or [] for id in sequence}
    specials = tokenizer.target.specials
    if unsupported := forbidden - {specials.pad, specials.unk}:
        raise CheckpointError(
            f"{path}: bad_words_ids bars {min(unsupported)}, but weft bars padding and the unknown token alone"
        )
    decode = _decoding_options(options, int(config.get("max_position_embeddings") or 1024))
    return {"unknown": specials.unk not in forbidden, "decode": decode}


class _GenerationConfig(Section):
    """The keys of generation_config.json that are read."""

    model_config = ConfigDict(extra="ignore")

    bad_words_ids: list[list[int]] | None = None
    early_stopping: bool | Literal["never"] | None = None
    forced_eos_token_id: int | list[int] | None = None
    length_penalty: float | None = None
    max_length: int | None = None
    max_new_tokens: int | None = None
    min_length: int | None = None
    no_repeat_ngram_size: int | None = None
    num_beams: int | None = None
    num_return_sequences: int | None = None
    renormalize_logits: bool | None = None
    repetition_penalty: float | None = None


def _parse_generation(path: Path, raw: Mapping[str, Any]) -> _GenerationConfig:
    try:
        return read_section(_GenerationConfig, raw, "generation")
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from None


def _decoding_options(generation: _GenerationConfig, longest: int) -> dict[str, Any]:
    theirs = generation.early_stopping or False
    max_length = (generation.max_length or longest) - 1  # theirs includes the first token
    return {
        "beam": generation.num_beams or 1,
        "num_return_sequences": generation.num_return_sequences or 1,
        "length_penalty": "average",
        "alpha": 1.0 if generation.length_penalty is None else generation.length_penalty,
        "max_length": generation.max_new_tokens or max_length,
        "min_length": max((generation.min_length or 0) - 1, 0),
        "finish": generation.forced_eos_token_id is not None,
        "renormalize_logits": bool(generation.renormalize_logits),
        "early_stopping": next(ours for ours, value in _EARLY_STOPPING.items() if value == theirs),
        "repetition_penalty": generation.repetition_penalty or 1.0,
        "no_repeat_ngram_size": generation.no_repeat_ngram_size or 0,
    }


def write_translation(run: Run, tokenizer: Tokenizer) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return additional keys of config.json, and generation_config.json."""
    specials = tokenizer.target.specials
    decode = DecodingConfig.model_validate(run.task.decode.model_dump())  # type: ignore[attr-defined]
    if decode.sample or (decode.beam > 1 and decode.length_penalty == "gnmt" and decode.alpha):
        key = "sample" if decode.sample else "length_penalty"
        raise CheckpointError(
            f"task.decode.{key}: {getattr(decode, key)!r} cannot be expressed in the format of marian; choose another, "
            "such as a beam with length_penalty average"
        )
    if decode.bad_words:
        raise CheckpointError(
            f"task.decode.bad_words: {list(decode.bad_words)} cannot be expressed in the format of marian; leave it out"
        )
    if prefix := run.task.prefix:  # type: ignore[attr-defined]
        raise CheckpointError(
            f"task.prefix: {prefix!r} cannot be expressed in the format of marian, where it is a part of each text; "
            "leave it out, by task.prefix=null"
        )
    forbidden = [specials.pad] if run.task.unknown else [specials.pad, specials.unk]  # type: ignore[attr-defined]
    ids = {"decoder_start_token_id": specials.bos, "eos_token_id": specials.eos, "pad_token_id": specials.pad}
    ids |= {"forced_eos_token_id": specials.eos if decode.finish else None}
    generation = {
        **ids,
        "bad_words_ids": [[id] for id in forbidden],
        "num_beams": decode.beam,
        "num_return_sequences": decode.num_return_sequences,
        "length_penalty": decode.alpha if decode.length_penalty == "average" else 0.0,
        "max_length": decode.max_length + 1,
        "min_length": decode.min_length + 1 if decode.min_length else 0,
        "early_stopping": _EARLY_STOPPING[decode.early_stopping],
        "renormalize_logits": decode.renormalize_logits,
        "repetition_penalty": decode.repetition_penalty,
        "no_repeat_ngram_size": decode.no_repeat_ngram_size,
    }
    return {**ids, "decoder_vocab_size": len(tokenizer.target)}, generation
