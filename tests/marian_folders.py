"""Marian's directories with fresh random weights, and SentencePiece models trained on the spot."""

import io
import json
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from tests.hf_folders import transformers

with warnings.catch_warnings():  # of how it was built
    warnings.simplefilter("ignore")
    sentencepiece = pytest.importorskip("sentencepiece")

SOURCES = [line for name in ("lambda", "assignment", "function", "exceptions") for line in topics[name].split("\n")]
TARGETS = [line[::-1] for line in SOURCES] + ["über café naïve 東京 ｶﾞｷﾞ ﬁn １２３ Ångström 🙂"] * 3
SIZES = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "max_position_embeddings": 160}
TEXTS = [
    "Hello world, this is a test.",
    "the value of the object is returned, " * 3,
    "a",
    "",
    "café 東京 unknown 🙂",
    ">>fra<< The statement",
    ">>zzz<< yes",
    " if  x\tthen >>y<<",
    *(line for line in SOURCES if len(line) > 50),
][:18]

# Runs of letters have many ways to be cut that are equally probable, and decide by how sums are rounded.
PARTS = ["a", "aa", "the", "ab", " ", "  ", "\t", "\n", "é", "e\u0301", "ｶﾞ", "東京", "🙂", "(", "<x>", "</s>", "<unk>"]
PARTS += [
    "👩\u200d👧",
    "▁",
    "\u00a0",
    "\u200b",
    "ﬁ",
    "Å",
    "\u0300",
    "\0",
    "[MASK]",
    "Ĳ",
    "½",
    ">>fra<<",
    "\u1112\u1161\u11ab",
]
TEXT = st.one_of(
    st.text(max_size=60),
    st.lists(st.sampled_from(PARTS), max_size=30).map("".join),
    st.text(alphabet="aeth ", max_size=200),
    st.text(alphabet=st.characters(min_codepoint=0x300, max_codepoint=0x3200, exclude_categories=["Cs"]), max_size=50),
)
MANY = st.lists(TEXT, min_size=10, max_size=10)


def spm(lines: Sequence[str], kind: str = "unigram", **settings: Any) -> bytes:
    """Train a SentencePiece model; return its file."""
    file = io.BytesIO()
    how = {"vocab_size": 300, "model_type": kind, "hard_vocab_limit": False, "minloglevel": 2, "num_threads": 1}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=file, **how, **settings)
    return file.getvalue()


@cache
def sides() -> tuple[bytes, bytes]:
    """Train the models of the two sides."""
    return spm(SOURCES), spm(TARGETS)


def write_tokenizer(folder: Path) -> int:
    """Write the files of a tokenizer; some pieces are not in the vocabulary. Return its size."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {"</s>": 0, "<unk>": 1}
    for name, file in zip(("source", "target"), sides(), strict=True):
        (folder / f"{name}.spm").write_bytes(file)
        read = sentencepiece.SentencePieceProcessor(model_proto=file)
        for id in range(3, len(read)):
            if id % 17:
                vocabulary.setdefault(read.id_to_piece(id), len(vocabulary))
    for token in (">>fra<<", "<pad>"):
        vocabulary[token] = len(vocabulary)
    (folder / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    told = {"source_lang": "en", "target_lang": "de", "tokenizer_class": "MarianTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(told), encoding="utf-8")
    return len(vocabulary)


def read_tokenizer(folder: Path) -> Any:
    """Let transformers read the tokenizer."""
    with warnings.catch_warnings():  # of a package that it likes to have
        warnings.simplefilter("ignore")
        return transformers.AutoTokenizer.from_pretrained(folder)


def marian(folder: Path, seed: int = 0, bias: float = 5.0, search: dict[str, Any] | None = None, **config: Any) -> Any:
    """Write a Marian that ends some of its texts; return transformers' model and tokenizer."""
    vocab = write_tokenizer(folder)
    ids = {"pad_token_id": vocab - 1, "decoder_start_token_id": vocab - 1, "eos_token_id": 0, "bos_token_id": 0}
    heads = {f"{side}_attention_heads": 4 for side in ("encoder", "decoder")}
    hidden = {f"{side}_ffn_dim": 48 for side in ("encoder", "decoder")}
    shape = {**SIZES, **heads, **hidden, "activation_function": "swish", "scale_embedding": True, **config}
    whole = transformers.MarianConfig(vocab_size=vocab, forced_eos_token_id=0, **ids, **shape)
    made = transformers.MarianMTModel(whole)
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if "embed_positions" not in name:
                weight.normal_(mean=float("norm.weight" in name), std=0.25)
        if bias:
            made.final_logits_bias.normal_()
            made.final_logits_bias[0, [0, -1]] += bias  # of the end, and of what may not be
    how = {"num_beams": 4, "max_length": 40, "forced_eos_token_id": 0, "renormalize_logits": True, **(search or {})}
    made.generation_config = transformers.GenerationConfig(bad_words_ids=[[vocab - 1]], **ids, **how)
    made.save_pretrained(folder)
    return made.eval(), read_tokenizer(folder)
