"""What is Marian's own in a Hugging Face directory: two SentencePiece models with one vocabulary, and how it decodes.

source.spm, target.spm and vocab.json say how texts are cut, on each side, and number the pieces. How translations are
searched for is in generation_config.json, of older ones in config.json.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.config.schema import Run
from weft.decoding.generate import DecodingConfig
from weft.errors import CheckpointError
from weft.formats.huggingface.mapping import HFMap
from weft.formats.huggingface.tokenizer import CONFIG, read_json, write_json
from weft.tokenization.base import Tokenizer
from weft.tokenization.sentencepiece.marian import SentencePiece, word_engine
from weft.tokenization.sentencepiece.model_file import read_spm
from weft.tokenization.vocab_files import spelling

GENERATION = "generation_config.json"
_STOPS: Mapping[str, object] = {"sure": "never", "soon": False, "first": True}  # ours -> early_stopping
# What changes a search in ways that ours does not have, and what leaves it as it is.
_NEUTRAL: Mapping[str, Any] = {
    "begin_suppress_tokens": None,
    "diversity_penalty": 0.0,
    "do_sample": False,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "exponential_decay_length_penalty": None,
    "forced_bos_token_id": None,
    "min_new_tokens": None,
    "no_repeat_ngram_size": 0,
    "num_beam_groups": 1,
    "repetition_penalty": 1.0,
    "sequence_bias": None,
    "suppress_tokens": None,
}


def read_marian(folder: Path, family: HFMap, vocab: int) -> SentencePiece:
    """Read the tokenizers of both sides; what a translation begins with is config.json's to say."""
    config = read_json(folder / "config.json")
    told = read_json(folder / "special_tokens_map.json", {}) | read_json(folder / CONFIG, {})
    if told.get("separate_vocabs"):
        raise CheckpointError(f"{folder / CONFIG}: separate_vocabs is true, but weft's marian has one vocabulary alone")
    spelt = {role: spelling(told.get(key) or default) for role, (key, default) in family.specials.items()}
    specials = {role: token for role, token in spelt.items() if token is not None}
    engine = word_engine(folder / "vocab.json", specials["unk"], list(specials.values()))
    size, start = int(engine.get_vocab_size()), config.get("decoder_start_token_id")
    if size != vocab or config.get("decoder_vocab_size") not in (None, vocab):
        raise CheckpointError(f"{folder}: vocab.json has {size} tokens, but the model {vocab}; are they of one model?")
    if not isinstance(start, int) or not 0 <= start < size:
        raise CheckpointError(f"{folder / 'config.json'}: decoder_start_token_id must be a token, but is {start!r}")
    specials["bos"] = str(engine.id_to_token(start))
    section = {"name": "sentencepiece", "specials": specials}
    sides = [read_spm(folder / name) for name in ("source.spm", "target.spm")]
    target = SentencePiece(SentencePiece.Config(**section), engine, sides[1])
    return SentencePiece(SentencePiece.Config(**section, target=section), engine, sides[0], target)


def write_marian(folder: Path, tokenizer: Tokenizer, family: HFMap, longest: int) -> None:
    """Write the tokenizers of both sides, as `MarianTokenizer` reads them."""
    if not isinstance(tokenizer, SentencePiece) or not isinstance(tokenizer.target, SentencePiece):
        raise CheckpointError(
            f"tokenizer.name: {tokenizer.config.name!r} is not what a Marian reads; models that begin from one "
            "(model.weights) have such"
        )
    vocab = sorted(tokenizer.engine.get_vocab().items(), key=lambda one: one[1])
    write_json(folder / "vocab.json", dict(vocab))
    for name, side in (("source.spm", tokenizer), ("target.spm", tokenizer.target)):
        (folder / name).write_bytes(side.spm.raw)
    spelt = tokenizer.spell(tokenizer.config)
    told = {key: spelt[role] for role, (key, _) in family.specials.items()}
    write_json(folder / CONFIG, {"tokenizer_class": "MarianTokenizer", "model_max_length": longest, **told})


def read_translation(folder: Path, told: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """Return what the section of the task says: how translations are searched for."""
    for key in ("attention_heads", "ffn_dim"):
        if told.get(f"encoder_{key}") != told.get(f"decoder_{key}"):
            raise CheckpointError(
                f"{folder / 'config.json'}: encoder_{key} is {told.get(f'encoder_{key}')!r} and decoder_{key} "
                f"{told.get(f'decoder_{key}')!r}, but weft's marian has as many on both sides"
            )
    path = folder / GENERATION if (folder / GENERATION).exists() else folder / "config.json"
    said = read_json(path)
    for key, value in _NEUTRAL.items():
        if said.get(key) not in (None, value):
            raise CheckpointError(
                f"{path}: {key} is {said[key]!r}, which weft's search does not do; take the key out to load the model "
                "and search without it"
            )
    barred = {one for words in said.get("bad_words_ids") or [] for one in words}
    specials = tokenizer.target.specials
    if strange := barred - {specials.pad, specials.unk}:
        raise CheckpointError(
            f"{path}: bad_words_ids bars {min(strange)}, but weft bars padding and the unknown token alone"
        )
    decode = _decode(path, said, int(told.get("max_position_embeddings", 1024)))
    return {"unknown": specials.unk not in barred, "decode": decode}


def _decode(path: Path, said: Mapping[str, Any], longest: int) -> dict[str, Any]:
    early = said.get("early_stopping") or False
    stops = [ours for ours, theirs in _STOPS.items() if theirs == early]
    if not stops:
        raise CheckpointError(f"{path}: early_stopping must be true, false or never, but is {early!r}")
    written = said.get("max_new_tokens") or int(said.get("max_length") or longest) - 1  # theirs counts the first token
    alpha = said.get("length_penalty")
    return {
        "beam": said.get("num_beams") or 1,
        "candidates": said.get("num_return_sequences") or 1,
        "length_bias": "average",
        "alpha": 1.0 if alpha is None else alpha,
        "max_length": written,
        "min_length": max(int(said.get("min_length") or 0) - 1, 0),
        "finish": said.get("forced_eos_token_id") is not None,
        "rescale": bool(said.get("renormalize_logits")),
        "stopping": stops[0],
    }


def write_translation(run: Run, tokenizer: Tokenizer) -> tuple[dict[str, Any], dict[str, Any]]:
    """Say what config.json says besides, and what generation_config.json says."""
    specials = tokenizer.target.specials
    decode = DecodingConfig.model_validate(run.task.decode.model_dump())  # type: ignore[attr-defined]
    if decode.sample or (decode.beam > 1 and decode.length_bias == "gnmt" and decode.alpha):
        what = "sample" if decode.sample else "length_bias"
        raise CheckpointError(
            f"task.decode.{what}: {getattr(decode, what)!r} cannot be said in the format of marian; choose another, "
            "such as a beam with length_bias average"
        )
    barred = [specials.pad] if run.task.unknown else [specials.pad, specials.unk]  # type: ignore[attr-defined]
    ids = {"decoder_start_token_id": specials.bos, "eos_token_id": specials.eos, "pad_token_id": specials.pad}
    ids |= {"forced_eos_token_id": specials.eos if decode.finish else None}
    generation = {
        **ids,
        "bad_words_ids": [[one] for one in barred],
        "num_beams": decode.beam,
        "num_return_sequences": decode.candidates,
        "length_penalty": decode.alpha if decode.length_bias == "average" else 0.0,
        "max_length": decode.max_length + 1,
        "min_length": decode.min_length + 1 if decode.min_length else 0,
        "early_stopping": _STOPS[decode.stopping],
        "renormalize_logits": decode.rescale,
    }
    return {**ids, "decoder_vocab_size": len(tokenizer.target)}, generation
