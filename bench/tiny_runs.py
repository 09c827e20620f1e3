"""Small data files and a recipe of every family of models and tasks: what `reliability.py` kills and `fuzz.py` changes.

Each trains in about a second on one core. `write_data` writes the files that the recipes name.
"""

import json
import random
from pathlib import Path
from typing import Any

Recipe = dict[str, dict[str, Any]]

WORDS = ["the", "weft", "warp", "loom", "thread", "crosses", "holds", "a", "red", "été", "東京", "of", "over", "under"]
TAGS = {"the": "DET", "a": "DET", "of": "ADP", "over": "ADP", "under": "ADP", "crosses": "VERB", "holds": "VERB"}


def write_data(folder: Path, rows: int = 60, seed: int = 0) -> None:
    """Write text.txt, pairs.tsv, tuples.tsv, labels.tsv, tags.conll, squad.json and choices.jsonl."""
    rng = random.Random(seed)
    sentences = [rng.choices(WORDS, k=rng.randint(4, 9)) for _ in range(rows)]
    files = {
        "text.txt": [" ".join(words) for words in sentences],
        "pairs.tsv": [f"{' '.join(words)}\t{' '.join(reversed(words))}" for words in sentences],
        "tuples.tsv": [f"{words[0]}\tIsNear\t{words[1]}" for words in sentences],
        "labels.tsv": [f"{' '.join(words)}\t{'long' if len(words) > 6 else 'short'}" for words in sentences],
        "tags.conll": ["\n".join(f"{word} {TAGS.get(word, 'NOUN')}" for word in words) + "\n" for words in sentences],
        "squad.json": [json.dumps({"version": "1.1", "data": [_article(sentences)]}, ensure_ascii=False)],
        "choices.jsonl": [json.dumps(_choice(words, rng), ensure_ascii=False) for words in sentences],
    }
    for name, lines in files.items():
        (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _article(sentences: list[list[str]]) -> dict[str, Any]:
    """Return an article in SQuAD's format: the answer to each question is the word after the one it asks about."""
    paragraphs = []
    for number, words in enumerate(sentences):
        start = len(words[0]) + 1
        answer = {"text": words[1], "answer_start": start}
        question = {"id": str(number), "question": f"what follows {words[0]}", "answers": [answer]}
        paragraphs.append({"context": " ".join(words), "qas": [question]})
    return {"title": "weaving", "paragraphs": paragraphs}


def _choice(words: list[str], rng: random.Random) -> dict[str, Any]:
    choices = [" ".join(reversed(words)), "under", "red red"]
    rng.shuffle(choices)
    return {"text": " ".join(words), "choices": choices, "label": choices.index(" ".join(reversed(words)))}


LM = ({"name": "lm"}, "text.txt", {"name": "bpe", "size": 300})
TRANSLATE = ({"name": "translate"}, "pairs.tsv", {"name": "characters"})
CLASSIFY = ({"name": "classify"}, "labels.tsv", {"name": "characters"})
TAG = ({"name": "tag"}, "tags.conll", {"name": "words"})
MLM = ({"name": "mlm"}, "text.txt", {"name": "wordpiece", "size": 80})
SPAN = ({"name": "span", "max_question_length": 16}, "squad.json", {"name": "wordpiece", "size": 80})
CONTRASTIVE = ({"name": "contrastive"}, "text.txt", {"name": "wordpiece", "size": 80})
ELECTRA = ({"name": "electra", "generator_size": 0.5}, *MLM[1:])
COMPLETE = ({"name": "complete", "decode": {"max_length": 8}}, "tuples.tsv", LM[2])
CHOICE = ({"name": "choice"}, "choices.jsonl", {"name": "wordpiece", "size": 80})

SMALL = {"width": 16, "dropout": 0.2}
BERT = {"name": "bert", **SMALL, "heads": 2, "layers": 2, "ffn_width": 32, "max_positions": 64}
GPT = {"name": "gpt", **SMALL, "heads": 2, "layers": 2, "max_positions": 64}
TRANSFORMER = {"name": "transformer", **SMALL, "heads": 2, "layers": 1, "ffn_width": 32}
ELMO = {"name": "elmo", **SMALL, "embedding": 8, "filters": {1: 8, 2: 8}, "highways": 1, "cells": 24}
CBOW = {"name": "word2vec", "method": "cbow", "context": "left", "width": 16, "window": 2}
SKIPGRAM = {"name": "word2vec", "method": "skipgram", "width": 16, "subsample": 0.0, "window": 2}


def rnn(cell: str, **options: Any) -> dict[str, Any]:
    """Return the section of a recurrent model."""
    return {"name": "rnn", "cell": cell, **SMALL, **options}


def recipe(parts: tuple[dict[str, Any], str, dict[str, Any]], model: dict[str, Any], **train: Any) -> Recipe:
    """Return a recipe: a task with its data and tokenizer, a model, and changes to its training."""
    task, file, tokenizer = parts
    budget = {"steps": 40, "batch_tokens": 200, "report_every": 1, "save_every": 2, "eval_every": 10, "lr": 0.01}
    data = {"train": file, "valid": file, "max_length": 60, "truncation": "window" if task["name"] == "lm" else "cut"}
    return {"task": task, "data": data, "tokenizer": tokenizer, "model": model, "train": {**budget, **train}}


def passes(parts: tuple[dict[str, Any], str, dict[str, Any]], model: dict[str, Any], count: int) -> Recipe:
    """Return a recipe of a model that fits itself: a step is a pass, and one thread adds in one order."""
    fitted = recipe(parts, model)
    return {**fitted, "train": {"steps": count, "lr": 0.05, "deterministic": True}}


RECIPES: dict[str, Recipe] = {
    "ngram lm": passes(LM, {"name": "ngram", "order": 4}, 1),
    "word2vec lm": passes(LM, CBOW, 20),
    "word2vec skipgram": passes(({"name": "skipgram"}, "text.txt", {"name": "words"}), SKIPGRAM, 20),
    **{f"rnn ({cell}) lm": recipe(LM, rnn(cell)) for cell in ("elman", "jordan", "lstm", "peephole", "gru")},
    "rnn (lstm) classify": recipe(CLASSIFY, rnn("lstm", direction="both")),
    "rnn (lstm) tag": recipe(TAG, rnn("lstm", direction="both", chars=8)),
    "cnn classify": recipe(CLASSIFY, {"name": "cnn", "width": 16, "kernels": [2, 3], "embedding": 8}),
    "fasttext classify": recipe(CLASSIFY, {"name": "fasttext", "width": 8, "buckets": 64}),
    "seq2seq translate": recipe(TRANSLATE, {"name": "seq2seq", "layers": 2, **SMALL}),
    "transformer translate": recipe(TRANSLATE, TRANSFORMER),
    "elmo lm": recipe(LM, ELMO),
    "gpt lm": recipe(LM, GPT),
    "gpt complete": recipe(COMPLETE, GPT),
    "transformer-xl lm": recipe(LM, {"name": "transformer-xl", **SMALL, "heads": 2, "layers": 2, "mem_len": 16}),
    "context2vec mlm": recipe(MLM, {"name": "context2vec", **SMALL, "embedding": 8, "cells": 12}),
    "bert mlm": recipe(MLM, BERT),
    "bert classify": recipe((CLASSIFY[0], CLASSIFY[1], MLM[2]), BERT),
    "bert tag": recipe((TAG[0], TAG[1], MLM[2]), BERT),
    "bert span": recipe(SPAN, BERT),
    "bert choice": recipe(CHOICE, BERT),
    "bert electra": recipe(ELECTRA, BERT),
    "bert contrastive": recipe(CONTRASTIVE, BERT),
}
