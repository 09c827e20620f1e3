"""Hugging Face directories with fresh random weights and a vocabulary trained on the spot, made by `transformers`."""

import json
import os
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")
transformers.utils.logging.disable_progress_bar()

LINES = topics["lambda"].split("\n") + topics["assignment"].split("\n")
END = "<|endoftext|>"
SIZES = {"n_embd": 24, "n_head": 3, "n_layer": 2, "n_positions": 96}
TEXTS = ["The lambda expression", "x", "naïve café 東京 🙂, isn't it?", "  two  spaces\n\tand a tab"]


@cache
def byte_vocabulary() -> tuple[dict[str, int], str]:
    """Train GPT-2's kind of tokenizer: return vocab.json and merges.txt; the special is the last, as it is there."""
    engine = Tokenizer(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return _trained(engine, {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}, [END])


@cache
def word_vocabulary() -> tuple[dict[str, int], str]:
    """Train GPT's kind of tokenizer; the special is the first."""
    engine = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    engine.normalizer = normalizers.BertNormalizer(lowercase=True)
    engine.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return _trained(engine, {"special_tokens": ["<unk>"], "end_of_word_suffix": "</w>"}, [])


def _trained(engine: Tokenizer, how: dict[str, object], more: list[str]) -> tuple[dict[str, int], str]:
    engine.train_from_iterator(LINES, trainers.BpeTrainer(vocab_size=400, show_progress=False, **how))
    told = json.loads(engine.to_str())["model"]
    vocabulary = told["vocab"] | {token: len(told["vocab"]) + number for number, token in enumerate(more)}
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in told["merges"]]
    return vocabulary, "\n".join(["#version: 0.2", *merges, ""])


def write_vocabulary(folder: Path, vocabulary: dict[str, int], merges: str) -> None:
    """Write the two files that both kinds of tokenizer were published as."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    (folder / "merges.txt").write_text(merges, encoding="utf-8")


def gpt2(folder: Path, files: bool = True, seed: int = 0, head: str = "GPT2LMHeadModel", **config: object):
    """Write a GPT-2, its tokenizer as `files` or as tokenizer.json; return transformers' model and tokenizer."""
    vocabulary, merges = byte_vocabulary()
    write_vocabulary(folder, vocabulary, merges)
    tokenizer = transformers.GPT2Tokenizer.from_pretrained(folder)
    if not files:
        (folder / "vocab.json").unlink()
        (folder / "merges.txt").unlink()
        tokenizer.save_pretrained(folder)
    ends = {"bos_token_id": vocabulary[END], "eos_token_id": vocabulary[END]}
    chosen = transformers.GPT2Config(**{"vocab_size": len(vocabulary), **SIZES, **ends, **config})
    return _saved(getattr(transformers, head)(chosen), folder, seed), tokenizer


def gpt(folder: Path, seed: int = 0, **config: object):
    """Write a GPT with its vocabulary's files; return transformers' model and tokenizer."""
    vocabulary, merges = word_vocabulary()
    write_vocabulary(folder, vocabulary, merges)
    tokenizer = transformers.OpenAIGPTTokenizer.from_pretrained(folder)
    chosen = transformers.OpenAIGPTConfig(vocab_size=len(vocabulary), **{**SIZES, **config})
    return _saved(transformers.OpenAIGPTLMHeadModel(chosen), folder, seed), tokenizer


def _saved(model, folder: Path, seed: int):
    """Draw every weight anew, so that none is nought or one, and save."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(mean=float("ln_" in name and "weight" in name), std=0.2)
    model.eval().save_pretrained(folder)
    return model
