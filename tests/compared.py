"""Results of comparisons as `comparison.json` keeps them, made up for the tests of the table and the report."""

import math

import numpy as np

from weft.analysis.attention import Attention, View
from weft.comparison.results import (
    AnswerCell,
    AttentionFigures,
    ComparedExample,
    ComparisonResults,
    CurvePoint,
    Entry,
    LengthGroup,
    SeedResult,
    Significance,
    SurprisingText,
)

MACHINE = {"processor": "a CPU with AVX2", "cores": "2", "device": "cpu", "weft": "0.1.0", "torch": "2.12.0"}


def trained(name, final, speed=1.0, metric="accuracy", seeds=(1, 2, 3), model=None, points=12, **more):
    """An entry whose metric rises towards `final`; bits per byte fall."""
    runs, away = [], 1.5 if metric == "bits_per_byte" else -1.0
    for seed in seeds:
        off = 0.004 * (seed - 2) * final
        curve = [
            CurvePoint(
                step=100 * k,
                seconds=5.0 * k * speed,
                flops=2e12 * k * speed**2,
                loss=0.1 + 2.5 * math.exp(-k / 3 / speed) + 0.02 * seed,
                valid=(final + off) * (1 + away * math.exp(-k / 2 / speed)) if k % 2 == 0 else None,
            )
            for k in range(1, points + 1)
        ]
        runs.append(
            SeedResult(
                seed=seed,
                metrics={metric: final + off, "macro_f1": max(0.0, final - 0.02)},
                seconds=5.0 * points * speed,
                steps=100 * points,
                tokens_per_s=48_000 / speed,
                mfu=0.21 / speed,
                peak_memory=int(4e8 * speed),
                flops=2e12 * points * speed**2,
                curve=curve,
            )
        )
    costs = {"parameters": int(5e5 * speed**2), "disk_bytes": int(2e6 * speed**2), "latency_p50": 0.0012 * speed}
    costs |= {"latency_p99": 0.0031 * speed, "throughput": 5200 / speed}
    return Entry(name=name, model=model or name, kind="trained", runs=runs, **(costs | more))


def fitted(name, model, value, metric="accuracy", kind="baseline", **more):
    run = SeedResult(seed=1, metrics={metric: value, "macro_f1": value - 0.03}, seconds=0.41)
    costs = {"parameters": 41_200, "disk_bytes": 330_000, "latency_p50": 0.00021, "latency_p99": 0.0004}
    return Entry(name=name, model=model, kind=kind, runs=[run], throughput=61_000, **(costs | more))


def versus(difference, p_value, width=0.01):
    return Significance(difference=difference, low=difference - width, high=difference + width, p_value=p_value)


def by_length(*values):
    spans = [(1, 5), (6, 9), (10, 16), (17, 48)]
    return [
        LengthGroup(shortest=low, longest=high, examples=250, value=value)
        for (low, high), value in zip(spans, values, strict=True)
    ]


LANGUAGES = ["dutch", "english", "french", "german", "italian", "spanish"]


def f1(*scores):
    return {name: (score, 160 + 10 * place) for place, (name, score) in enumerate(zip(LANGUAGES, scores, strict=True))}


def classification(**changes):
    """Six trained models, two baselines and one that failed."""
    settings = [{"model.name": "gpt", "train.lr": 0.001}, {"model.name": "rnn", "model.cell": "lstm"}]
    entries = [
        fitted("character n-grams", "logistic regression", 0.951, versus_best=versus(-0.022, 0.0004),
               lengths=by_length(0.9, 0.94, 0.97, 0.98), classes=f1(0.93, 0.95, 0.96, 0.95, 0.94, 0.95)),
        fitted("bag of words", "logistic regression", 0.842, versus_best=versus(-0.131, 0.0001),
               lengths=by_length(0.71, 0.82, 0.9, 0.95), classes=f1(0.8, 0.85, 0.86, 0.83, 0.84, 0.85)),
        trained("langid-cnn", 0.973, 0.7, model="cnn", lengths=by_length(0.94, 0.97, 0.985, 0.99),
                classes=f1(0.96, 0.975, 0.98, 0.97, 0.96, 0.98), settings=settings[0]),
        trained("langid-bilstm", 0.968, 1.6, model="rnn", versus_best=versus(-0.005, 0.21), settings=settings[1],
                lengths=by_length(0.93, 0.96, 0.985, 0.985), classes=f1(0.95, 0.98, 0.98, 0.96, 0.955, 0.97)),
        trained("langid-elmo", 0.962, 3.1, model="elmo", versus_best=versus(-0.011, 0.034),
                lengths=by_length(0.92, 0.96, 0.98, 0.98), classes=f1(0.94, 0.97, 0.97, 0.96, 0.95, 0.97)),
        trained("langid-bert", 0.934, 3.6, model="bert", versus_best=versus(-0.039, 0.0001),
                lengths=by_length(0.86, 0.93, 0.96, 0.98), classes=f1(0.9, 0.94, 0.95, 0.93, 0.92, 0.94)),
        trained("langid-word2vec", 0.867, 0.4, model="word2vec", versus_best=versus(-0.106, 0.0001),
                lengths=by_length(0.77, 0.85, 0.91, 0.94), classes=f1(0.85, 0.87, 0.88, 0.86, 0.86, 0.88)),
        Entry(name="langid-huge", model="gpt", kind="trained", settings={"model.name": "gpt"}, parameters=1_558_000_000,
              failure="out of memory: weights, gradients and optimizer take 24.9 GB, and the machine has 16.4"),
    ]  # fmt: skip
    right = {name: AnswerCell(text="german", correct=True) for name in ("langid-cnn", "langid-elmo", "langid-bilstm")}
    wrong = {name: AnswerCell(text="dutch", correct=False) for name in ("bag of words", "langid-word2vec")}
    german, dutch = (dict.fromkeys(right, AnswerCell(text=label, correct=True)) for label in ("german", "dutch"))
    dutch["bag of words"] = dutch["langid-cnn"]
    split = {**right, **wrong, "langid-bert": AnswerCell(text="english", correct=False)}
    stay = "Het was een mooie dag in de stad, en wij bleven tot laat."
    examples = [
        ComparedExample(text="Der Schuss ging ins Leere.", expected="german", answers=german),
        ComparedExample(text=stay, expected="dutch", answers=dutch),
        ComparedExample(text="Das Weben ist eine alte Kunst", expected="german", answers=split),
    ]
    values = {"task": "classify", "metric": "accuracy", "higher_is_better": True, "budget": "60s", "seeds": [1, 2, 3]}
    values |= {"metric_names": ["accuracy", "macro_f1"], "split": "test", "num_examples": 1000, "machine": MACHINE}
    return ComparisonResults(**(values | {"entries": entries, "examples": examples} | changes))


def attention_of(entry, text):
    source, target = text.split(), [*reversed(text.split()), "</s>"]
    weights = np.random.default_rng(len(entry)).dirichlet(np.full(len(source), 0.3), (1, len(target)))
    look = Attention(text, {"text": text}, text, [View("cross", 0, [0], weights, target, source)])
    return AttentionFigures(entry=entry, text=text, figures=look.figures(entry))


def translation(**changes):
    """A fixed vector, attention and a Transformer, one seed; answers that all differ, and attention."""
    entries = [
        trained("dates-fixed", 0.412, 0.9, "exact_match", (1,), "seq2seq", versus_best=versus(-0.57, 0.0001),
                lengths=by_length(0.83, 0.52, 0.2, 0.05), settings={"model.attention": "none"}),
        trained("dates-additive", 0.981, 1.1, "exact_match", (1,), "seq2seq",
                lengths=by_length(0.99, 0.985, 0.98, 0.97), settings={"model.attention": "additive"}),
        trained("dates-transformer", 0.979, 1.3, "exact_match", (1,), "transformer", versus_best=versus(-0.002, 0.62),
                lengths=by_length(0.985, 0.985, 0.975, 0.97), settings={}),
    ]  # fmt: skip
    names = [entry.name for entry in entries]
    dates = [("monday 3 january 2017", "2017-01-03"), ("the fourth of may, nineteen ninety-nine", "1999-05-04")]
    examples = [
        ComparedExample(
            text=text,
            expected=date,
            answers={
                names[0]: AnswerCell(text=date[:-1] + "8", correct=False),
                **{name: AnswerCell(text=date, correct=True) for name in names[1:]},
            },
        )
        for text, date in dates
    ]
    attention = [attention_of(name, dates[0][0]) for name in names[1:]]
    values = {"task": "translate", "metric": "exact_match", "higher_is_better": True, "budget": "2000steps"}
    values |= {"seeds": [1], "metric_names": ["exact_match", "bleu"], "split": "test", "num_examples": 1000}
    values |= {"machine": MACHINE, "entries": entries, "examples": examples, "attention": attention}
    return ComparisonResults(**(values | changes))


CODE = "def opened(path: str) -> bool:\n    '''Return whether a file is open.'''\n    return path in _files\n"


def surprise(seed, bits, by_word=False):
    """Pieces of CODE with made-up bits: the first character of a word, or a rare word, costs most."""
    rng = np.random.default_rng(seed)
    pieces = CODE.replace(" ", " \0").split("\0") if by_word else list(CODE)
    before = [" ", *pieces]
    costs = [
        bits * (2.4 if before[i].endswith((" ", "\n", "_")) else 0.7) * (3 if by_word else 1)
        for i in range(len(pieces))
    ]
    return [(piece, float(cost * rng.uniform(0.3, 1.7))) for piece, cost in zip(pieces, costs, strict=True)] + [
        ("", 0.4)
    ]


def language_models(**changes):
    """An n-gram, recurrent models and a GPT by bits per byte, lower is better, with a text shaded by surprise."""
    finals = {"pydoc-elman": 2.41, "pydoc-lstm": 2.12, "pydoc-gru": 2.15, "pydoc-gpt": 1.98}
    entries = [
        trained(
            name,
            final,
            1 + place,
            "bits_per_byte",
            (1,),
            name.split("-")[1],
            versus_best=None if name == "pydoc-gpt" else versus(final - 1.98, 0.001),
        )
        for place, (name, final) in enumerate(finals.items())
    ]
    entries.append(fitted("pydoc-ngram", "ngram", 2.33, "bits_per_byte", "fitted", versus_best=versus(0.35, 0.001)))
    entries.append(fitted("pydoc-unsmoothed", "ngram", 0.0, "bits_per_byte", "fitted").model_copy(
        update={"runs": [SeedResult(seed=1, metrics={"bits_per_byte": None}, seconds=0.2)]}
    ))  # fmt: skip
    pieces = {name: surprise(place, final, name == "pydoc-gpt") for place, (name, final) in enumerate(finals.items())}
    values = {"task": "lm", "metric": "bits_per_byte", "higher_is_better": False, "budget": "1e15flops", "seeds": [1]}
    values |= {"metric_names": ["bits_per_byte"], "split": "test", "num_examples": 64, "machine": MACHINE}
    values |= {"entries": entries, "surprising": [SurprisingText(text=CODE, pieces=pieces)]}
    return ComparisonResults(**(values | changes))
