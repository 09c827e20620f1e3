"""What a comparison has found, as it is kept in `comparison.json`: everything that the table and the report show."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class CurvePoint(_Strict):
    """A point of a learning curve: a report of a training."""

    step: int
    seconds: float
    flops: float | None = None
    loss: float | None = None
    valid: dict[str, float] = {}


class SeedResult(_Strict):
    """One training of an entry, with one seed: its metrics on the test examples, and what it took."""

    seed: int
    folder: str | None = None  # of the run, within the folder of the comparison
    metrics: dict[str, float]
    example_scores: list[float] | None = None  # of the metric, for each test example in turn, where it has one
    seconds: float
    steps: int | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    peak_memory: int | None = None  # bytes
    flops: float | None = None
    curve: list[CurvePoint] = []


class LengthBucket(_Strict):
    """The metric on the test examples whose inputs have from `shortest` to `longest` words."""

    shortest: int
    longest: int
    examples: int
    value: float


class Entry(_Strict):
    """A recipe, a fitted model or a classical baseline, with a result for each seed."""

    name: str
    model: str  # bert, rnn, ngram, tfidf, …
    kind: Literal["trained", "fitted", "baseline"]
    settings: dict[str, Any] = {}  # the keys in which it differs from the first entry
    parameters: int | None = None
    disk_bytes: int | None = None
    latency_p50: float | None = None  # seconds for one example
    latency_p99: float | None = None
    throughput: float | None = None  # examples a second
    runs: list[SeedResult] = []
    lengths: list[LengthBucket] = []
    failure: str | None = None  # why it has no result: out of memory, NaN, …
    p_value: float | None = None  # of the hypothesis that it equals the best entry; None for the best itself


class AnswerCell(_Strict):
    """The answer of an entry to an example."""

    text: str
    correct: bool | None = None  # where an answer is right or wrong


class ComparedExample(_Strict):
    """A test example with the answers of all entries."""

    text: str
    expected: str
    answers: dict[str, AnswerCell]  # by the name of the entry


class SurprisingText(_Strict):
    """A text as its pieces, with what each costs each entry in bits; the entries may cut it differently."""

    text: str
    pieces: dict[str, list[tuple[str, float]]]  # by the name of the entry: (characters, bits)


class AttentionFigures(_Strict):
    """Where an entry looked in one example: figures as SVG, drawn when the comparison was made."""

    entry: str
    text: str
    figures: list[str]


class ComparisonResults(_Strict):
    """A comparison: what was compared, on what, at which budget, and each entry's results."""

    task: str
    metric: str
    higher_is_better: bool
    metric_names: list[str]  # all metrics of the task, the selecting one first
    budget: str  # as it was given: 60s, 2000steps, 1e15flops
    seeds: list[int]
    split: str
    num_examples: int
    machine: dict[str, str]  # processor, cores, device, versions
    entries: list[Entry]
    examples: list[ComparedExample] = []
    surprising: list[SurprisingText] = []
    attention: list[AttentionFigures] = []
