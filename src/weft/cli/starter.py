"""The recipes that `weft init` starts from: every number in them is in the table `STARTERS`.

`propose_recipe` chooses a starter by the task and by what the texts are like, and completes it by the amount of data.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weft.cli.data_check import DataCheck

if TYPE_CHECKING:
    from weft.data.profile import ColumnProfile

Sections = dict[str, dict[str, Any]]

VALIDATION_FRACTIONS = (0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001)
MIN_VALIDATION_ROWS = 2  # fewer say nothing
MAX_VALIDATION_ROWS = 4000  # more take time at each evaluation, and tell hardly more
LONG_TEXT = 120  # words of a text, on average, from which convolutions are preferred: they are fast
LITTLE_TEXT = 20_000  # words in all, below which a language model reads characters
FEW_ROWS = 5000  # below which a pretrained model is advised
TRANSFORMER_ROWS = 20_000  # pairs from which a Transformer is better than a recurrent model
GPU_BATCH = 2  # a GPU reads batches so many times as large
MAX_LENGTH = 1024  # tokens: the default of data.max_length
TOKENS_PER_WORD = {"words": 1.3, "bpe": 2.0, "wordpiece": 1.6, "characters": 6.0}


@dataclass(frozen=True)
class Starter:
    """The sections of a first recipe, and what is added to them for less than so many rows, or words of plain text."""

    note: str  # on the model
    sections: Sections
    sizes: Mapping[float, Sections]  # the first that is more than there is holds; math.inf: all that is more
    pretrained: bool = False  # whether a pretrained model is better, however many rows there are

    def recipe(self, amount: float) -> Sections:
        """Return the sections for an amount of data."""
        update = next(self.sizes[limit] for limit in sorted(self.sizes) if amount < limit)
        names = ("task", "data", "tokenizer", "model", "train")
        return {name: {**self.sections.get(name, {}), **update.get(name, {})} for name in names}


_DECAY = {"schedule": "warmup-linear", "warmup": 0.1}
_COSINE = {"schedule": "cosine", "warmup": 0.1, "weight_decay": 0.1}
_LSTM = {"name": "rnn", "cell": "lstm", "direction": "both"}
_WORDS = {"name": "words", "size": 20_000, "lowercase": True}
_WORDPIECE = {"name": "wordpiece", "size": 8000, "lowercase": True}
_WINDOWS = {"max_length": 128, "truncation": "window"}

STARTERS = {
    "classify": Starter(
        "a bidirectional LSTM over words, as in the recipe sst2",
        {"task": {"dropout": 0.5}, "tokenizer": _WORDS, "model": _LSTM, "train": {**_DECAY, "patience": 3}},
        {
            2_000: {
                "model": {"width": 64, "embedding": 64, "dropout": 0.3},
                "train": {"epochs": 30, "batch_size": 16, "lr": 2e-3},
            },
            20_000: {
                "model": {"width": 128, "embedding": 128, "dropout": 0.3},
                "train": {"epochs": 10, "batch_size": 32, "lr": 2e-3},
            },
            100_000: {
                "model": {"width": 300, "embedding": 300, "dropout": 0.3},
                "train": {"epochs": 6, "batch_size": 64, "lr": 2e-3},
            },
            math.inf: {
                "model": {"width": 300, "embedding": 300, "dropout": 0.3},
                "train": {"epochs": 2, "batch_size": 128, "lr": 2e-3},
            },
        },
    ),
    "classify-characters": Starter(
        "a bidirectional LSTM over characters, as in the recipe langid",
        {
            "task": {"dropout": 0.2},
            "tokenizer": {"name": "characters"},
            "model": {**_LSTM, "dropout": 0.1},
            "train": {**_DECAY, "patience": 3},
        },
        {
            2_000: {"model": {"width": 64}, "train": {"epochs": 30, "batch_size": 16, "lr": 5e-3}},
            20_000: {"model": {"width": 128}, "train": {"epochs": 10, "batch_size": 32, "lr": 5e-3}},
            100_000: {"model": {"width": 300}, "train": {"epochs": 6, "batch_size": 64, "lr": 2e-3}},
            math.inf: {"model": {"width": 300}, "train": {"epochs": 2, "batch_size": 128, "lr": 2e-3}},
        },
    ),
    "classify-long": Starter(
        "convolutions (Kim 2014): fast on long texts",
        {
            "task": {"dropout": 0.5},
            "tokenizer": _WORDS,
            "model": {"name": "cnn", "width": 300, "kernels": [3, 4, 5], "embedding": 128},
            "train": {"lr": 1e-3, **_DECAY, "patience": 3},
        },
        {
            2_000: {"train": {"epochs": 30, "batch_size": 16}},
            20_000: {"train": {"epochs": 10, "batch_size": 32}},
            math.inf: {"train": {"epochs": 4, "batch_size": 64}},
        },
    ),
    "tag": Starter(
        "a bidirectional LSTM over words and their characters",
        {
            "task": {"dropout": 0.5},
            "tokenizer": {"name": "words", "size": 40_000, "lowercase": True},
            "model": {**_LSTM, "embedding": 100, "chars": 50, "dropout": 0.3},
            "train": {"lr": 4e-3, **_DECAY, "patience": 3},
        },
        {
            2_000: {"model": {"width": 100}, "train": {"epochs": 30, "batch_size": 16}},
            20_000: {
                "tokenizer": {"min_count": 2},
                "model": {"width": 200},
                "train": {"epochs": 15, "batch_size": 32},
            },
            math.inf: {
                "tokenizer": {"min_count": 2},
                "model": {"width": 400},
                "train": {"epochs": 5, "batch_size": 64},
            },
        },
        pretrained=True,
    ),
    "translate": Starter(
        "a recurrent encoder-decoder with attention, as in the recipe dates",
        {
            "tokenizer": {"name": "bpe"},
            "model": {"name": "seq2seq", "attention": "additive"},
            "train": {**_DECAY, "patience": 3},
        },
        {
            5_000: {
                "tokenizer": {"size": 500},
                "model": {"width": 128},
                "train": {"epochs": 30, "batch_tokens": 1024, "lr": 5e-3},
            },
            math.inf: {
                "tokenizer": {"size": 2000},
                "model": {"width": 256},
                "train": {"epochs": 15, "batch_tokens": 4096, "lr": 2e-3},
            },
        },
    ),
    "translate-transformer": Starter(
        "a small Transformer, as in the recipe multi30k-de-en",
        {
            "task": {"label_smoothing": 0.1},
            "tokenizer": {"name": "bpe", "size": 8000},
            "model": {"name": "transformer", "norm": "pre", "dropout": 0.2},
            "train": {"lr": 1e-3, "schedule": "inverse-sqrt", "warmup": 0.1},
        },
        {
            100_000: {
                "model": {"width": 256, "heads": 4, "layers": 2, "ffn_width": 512},
                "train": {"epochs": 10, "batch_tokens": 8192},
            },
            math.inf: {
                "model": {"width": 512, "heads": 8, "layers": 3, "ffn_width": 1024},
                "train": {"epochs": 5, "batch_tokens": 8192},
            },
        },
    ),
    "lm-characters": Starter(
        "an LSTM over characters: there is too little text for words",
        {
            "data": _WINDOWS,
            "tokenizer": {"name": "characters"},
            "model": {"name": "rnn", "cell": "lstm", "width": 128, "dropout": 0.2},
            "train": {"batch_tokens": 1024, "lr": 5e-3, **_COSINE},
        },
        {math.inf: {"train": {"epochs": 30}}},
    ),
    "lm": Starter(
        "a small GPT, as in the recipe pydoc-gpt; model: {name: ngram} is the baseline to beat",
        {
            "data": _WINDOWS,
            "tokenizer": {"name": "bpe"},
            "model": {"name": "gpt", "max_positions": 256, "dropout": 0.15},
            "train": _COSINE,
        },
        {
            1_000_000: {
                "tokenizer": {"size": 2000},
                "model": {"width": 128, "heads": 4, "layers": 4},
                "train": {"epochs": 15, "batch_tokens": 4096, "lr": 2e-3},
            },
            math.inf: {
                "tokenizer": {"size": 8000},
                "model": {"width": 256, "heads": 8, "layers": 6},
                "train": {"epochs": 4, "batch_tokens": 8192, "lr": 1e-3},
            },
        },
    ),
    "mlm": Starter(
        "a small BERT with masked words and next sentences, as in the recipe pydoc-bert-tiny",
        {
            "data": _WINDOWS,
            "model": {"name": "bert", "max_positions": 128},
            "train": {"weight_decay": 0.01, **_DECAY},
        },
        {
            1_000_000: {
                "tokenizer": {**_WORDPIECE, "size": 2500},
                "model": {"preset": "bert-tiny", "dropout": 0.0},
                "train": {"epochs": 20, "batch_tokens": 2048, "lr": 2e-3},
            },
            math.inf: {
                "tokenizer": _WORDPIECE,
                "model": {"preset": "bert-mini", "dropout": 0.1},
                "train": {"epochs": 4, "batch_tokens": 8192, "lr": 1e-3},
            },
        },
    ),
    "span": Starter(
        "the smallest BERT, untrained: it shows that all works, no more",
        {
            "data": {"max_length": 381, "truncation": "window"},
            "tokenizer": _WORDPIECE,
            "model": {"name": "bert", "preset": "bert-tiny"},
            "train": {"lr": 1e-3, **_DECAY},
        },
        {
            20_000: {"train": {"epochs": 5, "batch_size": 16}},
            math.inf: {"train": {"epochs": 2, "batch_size": 32}},
        },
        pretrained=True,
    ),
    "choice": Starter(
        "a bidirectional LSTM over words: it shows that all works, no more",
        {
            "task": {"dropout": 0.3},
            "tokenizer": _WORDS,
            "model": {**_LSTM, "width": 128, "embedding": 128, "dropout": 0.3},
            "train": {"lr": 2e-3, **_DECAY, "patience": 3},
        },
        {
            20_000: {"train": {"epochs": 10, "batch_size": 16}},
            math.inf: {"train": {"epochs": 4, "batch_size": 32}},
        },
        pretrained=True,
    ),
}


@dataclass(frozen=True)
class DataSize:
    """The amount of training data, the lengths of its texts, and the machine, by which a starter is chosen."""

    rows: int
    words: float  # of a row, on average
    longest: int  # words
    long: int  # words of the row that 95 % are not longer than
    by_characters: bool  # few words a row, or none that spaces part
    gpu: bool


@dataclass(frozen=True)
class StarterRecipe:
    """The sections of a recipe but for where its data is, and a note on its model."""

    sections: Sections
    note: str
    advise_pretrained: bool  # whether a pretrained model is worth a hint


def validation_fraction(rows: int) -> float:
    """Return the share of the training rows to hold out: a tenth, and less of very many."""
    return next((part for part in VALIDATION_FRACTIONS if part * rows <= MAX_VALIDATION_ROWS), VALIDATION_FRACTIONS[-1])


def measure_data(check: DataCheck, gpu: bool) -> DataSize:
    """Return the amount of training data and the lengths of its texts."""
    texts = _text_columns(check)
    rows = check.profiles["train"].rows
    words = sum(length * times for column in texts for length, times in column.word_lengths.items()) / rows
    longest, long = sum(column.words.max for column in texts), sum(column.words.p95 for column in texts)
    unspaced = texts[0].characters.median > 15 * max(1, texts[0].words.median)
    return DataSize(rows, words, longest, long, texts[0].words.median <= 2 or unspaced, gpu)


def _text_columns(check: DataCheck) -> list["ColumnProfile"]:
    profile = check.profiles["train"]
    names = ("text", "pair", "words", "passage", "choices")
    inputs = {column for column, name in check.fields.items() if name in names}
    return [column for column in profile.columns if column.name in inputs] or profile.columns[:1]


def propose_recipe(check: DataCheck, size: DataSize) -> StarterRecipe:
    """Return the sections that fit the task and the amount of data, after the recipes that ship with weft."""
    task = str(check.task["name"])
    name = _choose_starter(check, size)
    starter = STARTERS[name]
    sections = starter.recipe(size.rows * size.words if task in ("lm", "mlm") else size.rows)
    sections["task"] = {**check.task, **sections["task"]}
    note = starter.note
    if task == "tag" and _has_entities(check):
        sections["task"]["crf"], note = True, f"{note}, with a CRF"
    sections["data"] |= {} if sections["data"] else _limits(size, task, sections["tokenizer"]["name"])
    if size.gpu:
        sections["train"] = _for_gpu(sections["train"])
    few = task == "classify" and (size.rows < FEW_ROWS or "pair" in check.fields.values())
    return StarterRecipe(sections, note, starter.pretrained or few)


def _choose_starter(check: DataCheck, size: DataSize) -> str:
    """Return the name of the starter for the task and its texts."""
    task = str(check.task["name"])
    if task == "classify" and size.by_characters:
        return "classify-characters"
    if task == "classify" and size.words > LONG_TEXT and "pair" not in check.fields.values():
        return "classify-long"
    if task == "translate" and size.rows >= TRANSFORMER_ROWS:
        return "translate-transformer"
    if task == "lm" and size.rows * size.words < LITTLE_TEXT:
        return "lm-characters"
    return task


def _has_entities(check: DataCheck) -> bool:
    tags = next(column for column, name in check.fields.items() if name == "tags")
    return any(label.startswith("B-") for label in check.profiles["train"].column(tags).labels)


def _limits(size: DataSize, task: str, tokenizer: str) -> dict[str, Any]:
    """Return the keys for sequences that are longer than the default allows, where there are any."""
    per_word = TOKENS_PER_WORD[tokenizer]
    if size.longest * per_word * 1.5 <= MAX_LENGTH:
        return {}
    truncation = {"tag": "window", "translate": "drop"}.get(task, "cut")
    return {"max_length": min(MAX_LENGTH, 64 * (int(size.long * per_word) // 64 + 1)), "truncation": truncation}


def _for_gpu(train: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section with larger batches and bf16."""
    larger = {key: GPU_BATCH * train[key] for key in ("batch_size", "batch_tokens") if key in train}
    return {**train, **larger, "precision": "bf16"}
