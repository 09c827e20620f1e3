"""The results of a comparison, as kept in `comparison.json`: everything that the table and the report show.

It is plain data: the report is made from it alone, so that it can be made again without a model.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class CurvePoint(_Strict):
    """A point of a learning curve: a report of a training."""

    step: int
    seconds: float
    flops: float | None = None
    loss: float | None = None  # None: not finite
    valid: float | None = None  # the metric on the validation data, where it was computed


class SeedResult(_Strict):
    """One training of an entry, with one seed: its metrics on the test examples, and what it took."""

    seed: int
    folder: str | None = None  # of the run, within the folder of the comparison
    metrics: dict[str, float | None]  # None: not finite, such as the perplexity of a text of probability 0
    seconds: float  # of training
    steps: int | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    peak_memory: int | None = None  # bytes: of the GPU, or of the process
    flops: float | None = None  # of training
    curve: list[CurvePoint] = []


class LengthGroup(_Strict):
    """The metric on the test examples whose inputs have from `shortest` to `longest` words or characters."""

    shortest: int
    longest: int
    examples: int
    value: float | None  # the mean over the seeds; None: not defined for these examples


class Significance(_Strict):
    """An entry's difference from the best one, on the same examples: `difference` = metric - the best one's."""

    difference: float
    low: float  # of the 95 % confidence interval of the difference
    high: float
    p_value: float  # of the hypothesis that there is no difference


class Entry(_Strict):
    """A recipe, a fitted model or a classical baseline, with a result for each seed."""

    name: str
    model: str  # bert, rnn, ngram, logistic regression, …
    kind: Literal["trained", "fitted", "baseline"]
    settings: dict[str, Any] = {}  # the keys in which entries differ, with this entry's values
    parameters: int | None = None
    disk_bytes: int | None = None  # of the model, as `weft.load` needs it
    latency_p50: float | None = None  # seconds for one example
    latency_p99: float | None = None
    throughput: float | None = None  # examples a second
    runs: list[SeedResult] = []
    lengths: list[LengthGroup] = []
    classes: dict[str, tuple[float, int]] = {}  # F1 and support of each label or type of entity, of the first seed
    failure: str | None = None  # why it has no result: out of memory, NaN, …
    versus_best: Significance | None = None  # None for the best itself, and where it cannot be computed


class AnswerCell(_Strict):
    """The answer of an entry to an example."""

    text: str
    correct: bool | None = None  # None: answers are neither right nor wrong


class ComparedExample(_Strict):
    """A test example with the answers of the entries."""

    text: str
    expected: str
    answers: dict[str, AnswerCell]  # by the name of the entry


class SurprisingText(_Strict):
    """A text in pieces, with what each costs each entry in bits; entries may cut it differently."""

    text: str
    pieces: dict[str, list[tuple[str, float]]]  # by the name of the entry: (characters, bits)


class AttentionFigures(_Strict):
    """Where an entry looked in one example: figures of `weft.analysis.attention`, drawn when it was evaluated."""

    entry: str
    text: str
    figures: list[str]  # HTML fragments of `Attention.figures`


class ComparisonResults(_Strict):
    """A comparison: what was compared, on what, at which budget, and each entry's results."""

    task: str
    metric: str  # the one by which entries are ordered
    higher_is_better: bool
    metric_names: list[str]  # all metrics of the task that are shown, the ordering one first
    positive_label: str | None = None  # the label that `f1` is of, where there are two
    budget: str  # as it was given: 60s, 2000steps, 1e15flops
    seeds: list[int]
    split: str  # test or valid
    num_examples: int
    length_unit: str = "words"  # or characters
    class_unit: str = "label"  # or entity, tag
    machine: dict[str, str]  # processor, cores, device, versions
    entries: list[Entry]
    examples: list[ComparedExample] = []  # those on which the entries disagree first
    surprising: list[SurprisingText] = []
    attention: list[AttentionFigures] = []

    @property
    def direction(self) -> str:
        """Which values of the metric are better, in words."""
        return f"{'higher' if self.higher_is_better else 'lower'} is better"

    @property
    def split_name(self) -> str:
        """The split in words: test, or validation."""
        return "validation" if self.split == "valid" else self.split
