"""First recipes by task and amount of data, which `weft init` and the estimators start from.

Every number in them is in the table `STARTERS`; docs/defaults.md says how those of `classify` were chosen.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Sections = dict[str, dict[str, Any]]

NEEDS_VALIDATION = ("eval_every", "metric", "patience")  # keys of `train` that are nothing without validation data


@dataclass(frozen=True)
class Starter:
    """The sections of a first recipe, and what is added to them for less than so many rows, or words of plain text."""

    note: str  # on the model
    sections: Sections
    sizes: Mapping[float, Sections]  # the first that is more than there is holds; math.inf: all that is more
    pretrained: bool = False  # whether a pretrained model is better, however many rows there are

    def recipe(self, amount: float) -> Sections:
        """Return the sections for an amount of data."""
        return next(self.recipes(amount))

    def recipes(self, amount: float) -> Iterator[Sections]:
        """Yield the sections for an amount of data, then the same with the models for less data, the largest first."""
        limits = sorted(self.sizes)
        own = next(index for index, limit in enumerate(limits) if amount < limit)
        tokenizer, epochs = self.sizes[limits[own]].get("tokenizer", {}), self.sizes[limits[own]]["train"]["epochs"]
        for index in range(own, -1, -1):
            update = {**self.sizes[limits[index]], "tokenizer": tokenizer}
            update["train"] = {**update["train"], "epochs": epochs}
            yield {name: {**self.sections.get(name, {}), **update.get(name, {})} for name in _SECTIONS}


_SECTIONS = ("task", "data", "tokenizer", "model", "train")
_DECAY = {"schedule": "warmup-linear", "warmup": 0.1}
_COSINE = {"schedule": "cosine", "warmup": 0.1, "weight_decay": 0.1}
_LSTM = {"name": "rnn", "cell": "lstm", "direction": "both"}
_WORDS = {"name": "words", "size": 20_000, "lowercase": True}
_WORDPIECE = {"name": "wordpiece", "size": 8000, "lowercase": True}
_WINDOWS = {"max_length": 128, "truncation": "window"}

STARTERS = {
    "classify": Starter(
        "the mean of embeddings of words and bigrams (fastText, Joulin et al. 2017)",
        {
            "task": {"dropout": 0.5},
            "tokenizer": {"name": "words", "size": 30_000, "lowercase": True},
            "model": {"name": "fasttext", "dropout": 0.3},
            "train": {"lr": 3e-3, "eval_every": "epoch", "metric": "loss", "patience": 3},
        },
        {
            200: {"model": {"width": 16, "buckets": 50_000}, "train": {"epochs": 60, "batch_size": 8}},
            2_000: {"model": {"width": 16, "buckets": 100_000}, "train": {"epochs": 30, "batch_size": 16}},
            6_000: {"model": {"width": 16, "buckets": 250_000}, "train": {"epochs": 20, "batch_size": 32}},
            20_000: {"model": {"width": 16, "buckets": 250_000}, "train": {"epochs": 20, "batch_size": 64}},
            100_000: {"model": {"width": 32, "buckets": 500_000}, "train": {"epochs": 10, "batch_size": 128}},
            math.inf: {"model": {"width": 32, "buckets": 1_000_000}, "train": {"epochs": 5, "batch_size": 256}},
        },
    ),
    "classify-pairs": Starter(
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
        pretrained=True,
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
            20_000: {
                "tokenizer": {"size": 2000},
                "model": {"width": 128},
                "train": {"epochs": 20, "batch_tokens": 2048, "lr": 4e-3},
            },
            math.inf: {
                "tokenizer": {"size": 4000},
                "model": {"width": 256},
                "train": {"epochs": 15, "batch_tokens": 4096, "lr": 2e-3},
            },
        },
    ),
    "translate-characters": Starter(
        "a recurrent encoder-decoder with attention, over characters",
        {
            "tokenizer": {"name": "characters"},
            "model": {"name": "seq2seq", "attention": "additive", "width": 128},
            "train": {**_DECAY, "patience": 3},
        },
        {
            5_000: {"train": {"epochs": 30, "batch_tokens": 1024, "lr": 5e-3}},
            math.inf: {"train": {"epochs": 15, "batch_tokens": 2048, "lr": 4e-3}},
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
    "encoder": Starter(
        "the English encoder that ships with weft, adapted: weft models encoder-en",
        {
            "model": {"name": "bert", "weights": "encoder-en", "dropout": 0.1},
            "train": {**_DECAY, "weight_decay": 0.01},
        },
        {
            2_000: {"train": {"epochs": 10, "batch_size": 16, "lr": 1e-4}},
            20_000: {"train": {"epochs": 5, "batch_size": 32, "lr": 2e-4}},
            math.inf: {"train": {"epochs": 2, "batch_size": 32, "lr": 2e-4}},
        },
    ),
}


def has_few_words(words: float, most_words: float, characters: float) -> bool:
    """Return whether texts are better read by characters: names of 3 words at most, or no spaces between words.

    `words` and `characters` are the medians of a text, `most_words` is what 95 % of the texts do not exceed.
    """
    return most_words <= 3 or characters > 15 * max(1, words)
