"""Hugging Face directories of BERT's family with fresh random weights, their vocabularies as the files they come as."""

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from tests.hf_folders import LINES, transformers, write_vocabulary

FAMILIES = {"bert": "Bert", "distilbert": "DistilBert", "roberta": "Roberta", "albert": "Albert", "electra": "Electra"}
HEADS = {
    "Model": {},
    "ForMaskedLM": {},
    "ForPreTraining": {},
    "ForSequenceClassification": {"num_labels": 3},
    "ForTokenClassification": {"num_labels": 4},
    "ForQuestionAnswering": {},
    "ForMultipleChoice": {},
}
SIZES = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "max_position_embeddings": 96,
}
DISTILLED = {"dim": 24, "n_layers": 2, "n_heads": 3, "hidden_dim": 40, "max_position_embeddings": 96}
OWN = {
    "distilbert": DISTILLED,
    "roberta": {**SIZES, "type_vocab_size": 1, "layer_norm_eps": 1e-5},
    "albert": {**SIZES, "embedding_size": 8},
    "electra": {**SIZES, "embedding_size": 8},
}
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
BYTES = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
USER = ["(", ")", '"', "-", "."]  # which ALBERT's model has as symbols of their own


@cache
def wordpieces() -> str:
    """Train BERT's kind of vocabulary: return vocab.txt."""
    engine = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    engine.normalizer = normalizers.BertNormalizer(lowercase=False, strip_accents=False)
    engine.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    lines = [*LINES, *map(str.lower, LINES), "é É ñ 東 京"]
    engine.train_from_iterator(
        lines, trainers.WordPieceTrainer(vocab_size=400, special_tokens=PIECES, show_progress=False)
    )
    return "".join(f"{token}\n" for token, _ in sorted(engine.get_vocab().items(), key=lambda pair: pair[1]))


@cache
def byte_pairs() -> tuple[dict[str, int], str]:
    """Train RoBERTa's kind of vocabulary: return vocab.json and merges.txt."""
    engine = Tokenizer(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    how = {"vocab_size": 400, "special_tokens": BYTES, "initial_alphabet": alphabet, "show_progress": False}
    engine.train_from_iterator(LINES, trainers.BpeTrainer(**how))
    told = json.loads(engine.to_str())["model"]
    return told["vocab"], "\n".join(["#version: 0.2", *map(" ".join, told["merges"]), ""])


@cache
def pieces(folder: Path) -> bytes:
    """Train ALBERT's kind of vocabulary, by SentencePiece in a folder: return spiece.model."""
    trainer = pytest.importorskip("sentencepiece").SentencePieceTrainer
    (folder / "text").write_text("\n".join(LINES), encoding="utf-8")
    trainer.train(
        input=str(folder / "text"),
        model_prefix=str(folder / "spiece"),
        vocab_size=300,
        pad_id=0,
        unk_id=1,
        bos_id=-1,
        eos_id=-1,
        control_symbols=["[CLS]", "[SEP]", "[MASK]"],
        user_defined_symbols=USER,
        normalization_rule_name="nmt_nfkc_cf",
        minloglevel=2,
    )
    return (folder / "spiece.model").read_bytes()


def write_files(folder: Path, family: str) -> int:
    """Write a family's vocabulary by its files; return its size."""
    folder.mkdir(parents=True, exist_ok=True)
    if family == "roberta":
        write_vocabulary(folder, *byte_pairs())
        return len(byte_pairs()[0])
    if family == "albert":
        work = folder.parent / "sentencepiece"
        work.mkdir(exist_ok=True)
        (folder / "spiece.model").write_bytes(pieces(work))
        return 300
    (folder / "vocab.txt").write_text(wordpieces(), encoding="utf-8")
    return wordpieces().count("\n")


def make(folder: Path, family: str, head: str, seed: int = 0, **config: object):
    """Write a model with the files of its vocabulary; return transformers' model and tokenizer."""
    size, name = write_files(folder, family), FAMILIES[family]
    sizes = {"vocab_size": size, **OWN.get(family, SIZES), **HEADS[head], **config}
    model = getattr(transformers, name + head)(getattr(transformers, f"{name}Config")(**sizes)).eval()
    torch.manual_seed(seed)
    with torch.no_grad():
        for place, weight in model.named_parameters():
            weight.normal_(mean=float("norm" in place.lower() and "weight" in place), std=0.2)
    model.save_pretrained(folder)
    kind = "Bert" if family == "electra" else name
    return model, getattr(transformers, f"{kind}Tokenizer").from_pretrained(folder)
