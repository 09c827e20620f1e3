"""The evaluation of one trained model or baseline on the test examples: all that the comparison needs of it later.

It is kept as `evaluation.json` in the run's folder, with the answers to all test examples, so that a comparison that
was stopped does not repeat it, and an entry added later is compared on the same examples.
"""

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from weft.checkpoint.atomic_io import wrap_os_errors, write_atomic
from weft.comparison import measure
from weft.comparison.baselines import FittedBaseline
from weft.comparison.plan import Plan, PlannedEntry
from weft.comparison.results import CurvePoint, SeedResult
from weft.data.readers.examples import Skipped
from weft.data.truncation import TruncationPolicy
from weft.errors import ConfigError, DataError, RoleError
from weft.pipeline import Pipeline
from weft.tasks.base import Answer, Task
from weft.tasks.capabilities import CustomEvaluation, LabelPrediction
from weft.tasks.corpus.reuse import prepared_folder
from weft.tasks.encoding import EvaluationData
from weft.tasks.evaluation import answer_all
from weft.tasks.lm import scoring
from weft.tasks.lm.task import LM
from weft.tasks.lm.text_losses import TextLosses
from weft.tasks.prepare import read_split
from weft.training.reporting import read_metrics

FILE = "evaluation.json"
MAX_POINTS = 400  # of a learning curve
PASSAGES, PASSAGE_LENGTH = 3, 300  # of the texts that are shaded by surprise; in characters
MAX_BITS = 1000.0  # of a piece, in place of infinity: JSON has none
MAX_WORDS = 30  # of the example whose attention is drawn
MAX_ATTENTION = 120  # characters of the text whose attention is drawn
MAX_FIGURES = 400_000  # characters of the attention figures of an entry


class Evaluation(BaseModel):
    """The answers and costs of one model; `rows` are the numbers of the test examples that it could read."""

    # A text that a model holds for impossible costs it infinitely much.
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")

    result: SeedResult
    parameters: int | None = None
    disk_bytes: int | None = None
    latency_p50: float | None = None
    latency_p99: float | None = None
    throughput: float | None = None
    rows: list[int] = []
    answers: list[dict[str, Any]] | None = None  # of each of `rows`
    losses: dict[str, list[float] | None] | None = None  # `TextLosses` of each of `rows`
    classes: dict[str, tuple[float, int]] = {}
    class_unit: str = "label"
    surprising: list[tuple[str, list[tuple[str, float]]]] = []  # a text, and its pieces with their bits
    attention: tuple[str, list[str]] | None = None  # a text, and figures

    def text_losses(self) -> TextLosses | None:
        """Return what each text costs a language model."""
        if self.losses is None:
            return None
        parts: dict[str, Any] = {key: None if part is None else np.array(part) for key, part in self.losses.items()}
        return TextLosses(**parts)

    def write(self, folder: Path) -> None:
        """Write it to a run's folder, atomically."""
        with wrap_os_errors(folder, f"{FILE} could not be written", "free some room or mend the disk"):
            folder.mkdir(parents=True, exist_ok=True)
            write_atomic(folder / FILE, self.model_dump_json().encode("utf-8", "surrogatepass"))


def read_evaluation(folder: Path) -> Evaluation | None:
    """Return the evaluation of a run; None where there is none that can be read: it is then made again."""
    try:
        return Evaluation.model_validate_json((folder / FILE).read_bytes())
    except (OSError, ValidationError):
        return None


@dataclass(frozen=True)
class Answers:
    """The answers of an entry to the test examples that it can read, and the seconds that they took."""

    rows: list[int]
    examples: list[Any]
    answers: list[Answer]
    seconds: float


def test_examples(entry: PlannedEntry, split: str, task: Task) -> list[tuple[Any, Any]]:
    """Return the examples that all entries are evaluated on, with their places; [] of a prepared corpus."""
    if prepared_folder(entry.run.data, split):
        return []
    return list(read_split(entry.run.data, split, task, Skipped()))


def evaluate_pipeline(plan: Plan, entry: PlannedEntry, seed: int, pipeline: Pipeline, out: Path) -> Evaluation:
    """Evaluate the best model of a run."""
    folder, task, metric = plan.folder(entry, seed), pipeline.task, plan.metric(pipeline.task)
    memory = measure.peak_memory(pipeline.device)  # of training
    result = _training(read_metrics(out / folder / "metrics.jsonl"), metric)
    evaluation = Evaluation(
        result=SeedResult(seed=seed, folder=str(folder), metrics={}, peak_memory=memory, **result),
        parameters=pipeline.parameters,
        disk_bytes=measure.disk_bytes(out / folder),
    )
    located = test_examples(entry, plan.split, task)
    if not located:
        return _with_metrics(evaluation, pipeline.evaluate())
    data = pipeline.run.data
    skipped = Skipped() if data.on_bad_rows == "skip" else None
    encoded = EvaluationData.of(task, located, TruncationPolicy(data.max_length, data.truncation), skipped)
    numbers = {id(example): row for row, (_, example) in enumerate(located)}
    rows = [numbers[id(example)] for example in encoded.examples]
    if not rows:
        raise DataError(f"data.{plan.split}: not one example is left to evaluate on")
    if isinstance(task, CustomEvaluation):
        return _evaluate_custom(evaluation, entry.name, pipeline, encoded, rows)
    began = time.perf_counter()
    answers = list(answer_all(task, pipeline.head, encoded))
    seconds = time.perf_counter() - began
    evaluation = _with_answers(evaluation, task, Answers(rows, encoded.examples, answers, seconds))
    questions = [task.without_labels(example) for example in encoded.examples[: measure.LATENCY_EXAMPLES]]
    evaluation = _with_latency(evaluation, measure.latencies(lambda example: pipeline([example]), questions))
    attention = _attention(entry.name, pipeline, _short_example(task, encoded.examples))
    return evaluation.model_copy(update={"attention": attention})


def evaluate_baseline(plan: Plan, entry: PlannedEntry, baseline: FittedBaseline, out: Path) -> Evaluation:
    """Evaluate a baseline on the same examples; its answers are scored by the same task."""
    located = test_examples(entry, plan.split, baseline.task)
    examples = [example for _, example in located]
    result = SeedResult(
        seed=plan.seeds[0], metrics={}, seconds=baseline.seconds, peak_memory=measure.peak_memory(torch.device("cpu"))
    )
    began = time.perf_counter()
    answers = baseline.answers(examples)
    answered = Answers(list(range(len(examples))), examples, answers, time.perf_counter() - began)
    evaluation = Evaluation(result=result, parameters=baseline.parameters)
    evaluation = _with_answers(evaluation, baseline.task, answered)
    return _with_latency(evaluation, measure.latencies(lambda example: baseline.answers([example]), examples))


def _with_answers(evaluation: Evaluation, task: Task, answered: Answers) -> Evaluation:
    """Add answers, their metrics and those of each class."""
    update: dict[str, Any] = {"rows": answered.rows, "answers": answered.answers}
    update["throughput"] = len(answered.answers) / max(answered.seconds, 1e-9)
    if isinstance(task, LabelPrediction) and (report := task.report(answered.answers, answered.examples)):
        update["classes"] = {name: (scores.f1, scores.support) for name, scores in report.classes.items()}
        update["class_unit"] = report.unit
    return _with_metrics(evaluation.model_copy(update=update), task.score(answered.answers, answered.examples))


def _with_metrics(evaluation: Evaluation, metrics: dict[str, float]) -> Evaluation:
    """Add metrics; those that are not finite are None, and the loss is left out."""
    kept = {name: value if math.isfinite(value) else None for name, value in metrics.items() if name != "loss"}
    return evaluation.model_copy(update={"result": evaluation.result.model_copy(update={"metrics": kept})})


def _with_latency(evaluation: Evaluation, seconds: tuple[float, float] | None) -> Evaluation:
    p50, p99 = seconds or (None, None)
    return evaluation.model_copy(update={"latency_p50": p50, "latency_p99": p99})


def _evaluate_custom(
    evaluation: Evaluation, entry: str, pipeline: Pipeline, data: EvaluationData, rows: list[int]
) -> Evaluation:
    """Evaluate a task whose metrics are not of answers; of a language model also what each text costs it."""
    task, head = pipeline.task, pipeline.head.eval()
    with torch.inference_mode():
        losses = task.text_losses(head, data) if isinstance(task, LM) else None
    if losses is None:
        return _with_metrics(evaluation, pipeline.evaluate()).model_copy(update={"rows": rows})
    metrics = {name: losses.metric(name) for name in task.metrics}
    parts = {key: None if part is None else part.tolist() for key, part in asdict(losses).items()}
    texts = passages([example.text for example in data.examples])
    began = time.perf_counter()
    with suppress(DataError):  # more tokens than the model has positions
        pipeline.log_probs(texts * 4)
        throughput = 4 * len(texts) / (time.perf_counter() - began)
        latency = measure.latencies(lambda text: pipeline.log_probs([text]), texts * (measure.LATENCY_EXAMPLES // 3))
        evaluation = _with_latency(evaluation, latency).model_copy(update={"throughput": throughput})
    shown = [(text, pieces) for text in texts if (pieces := surprise(pipeline, text))]
    attention = _attention(entry, pipeline, texts[0][:MAX_ATTENTION])
    update = {"rows": rows, "losses": parts, "surprising": shown, "attention": attention}
    return _with_metrics(evaluation.model_copy(update=update), {k: v for k, v in metrics.items() if not math.isnan(v)})


def passages(texts: Sequence[str]) -> list[str]:
    """Return the beginnings of a few texts, spread over all, the same for every model."""
    long = [text for text in texts if len(text) >= PASSAGE_LENGTH // 3] or list(texts)
    chosen = long[:: max(1, len(long) // PASSAGES)][:PASSAGES]
    return [text if len(text) <= PASSAGE_LENGTH else text[:PASSAGE_LENGTH].rsplit(" ", 1)[0] for text in chosen]


def surprise(pipeline: Pipeline, text: str) -> list[tuple[str, float]]:
    """Return the pieces of a text with what each costs a language model that reads forward, in bits; [] of others."""
    task, tokenizer, head = pipeline.task, pipeline.tokenizer, pipeline.head.eval()
    assert isinstance(task, LM)
    if task.directions[0] != "forward":
        return []
    items = task.encode(task.Example(text=text), tokenizer, TruncationPolicy(1 << 30, "error"))
    batch = task.collate(items, np.random.default_rng(0)).to(head.device)
    if batch.tokens.longest > (getattr(head.body, "max_positions", None) or math.inf):
        return []
    with torch.inference_mode():
        targets = scoring.targets_of(batch, task.directions)[0].clamp(min=0)
        bits = (-head.body.log_prob(batch.tokens, targets, "forward").double() / math.log(2)).tolist()
    starts = [start for start, _ in tokenizer.encode(text).offsets]
    bounds = [0, *starts[1:], len(text)]
    pieces, cost = list[tuple[str, float]](), 0.0
    for (start, stop), more in zip(pairwise(bounds), bits, strict=False):  # without the end of the text
        cost += more
        if start < stop:  # else it is a byte of a character that the next one completes
            pieces.append((text[start:stop], round(min(cost, MAX_BITS), 4)))
            cost = 0.0
    return pieces


def _short_example(task: Task, examples: Sequence[Any]) -> Any:
    """Return the longest of the first examples whose alignment can still be read."""
    texts = [" ".join(task.texts(example)[0]) for example in examples[:64]]
    short = [row for row, text in enumerate(texts) if len(text.split()) <= MAX_WORDS and len(text) <= 6 * MAX_WORDS]
    best = max(short, key=lambda row: len(texts[row])) if short else 0
    return task.without_labels(examples[best])


def _attention(entry: str, pipeline: Pipeline, example: Any) -> tuple[str, list[str]] | None:
    """Return a text and the figures of an entry's attention; None where it has none that can be drawn."""
    with suppress(RoleError, DataError, ConfigError):
        for layers in (None, [0]):
            attention = pipeline.attention(example, layers)
            figures = attention.figures(entry)
            if sum(map(len, figures)) <= MAX_FIGURES:
                return attention.text, figures
    return None


def _training(rows: Sequence[dict[str, Any]], metric: str) -> dict[str, Any]:
    """Return what a training took, by its log."""
    if not rows:
        return {"seconds": 0.0}
    last, step = rows[-1], max(1, math.ceil(len(rows) / MAX_POINTS))
    curve = [
        CurvePoint(
            step=row["step"],
            seconds=row["elapsed"],
            flops=row.get("flops"),
            loss=row["loss"],
            valid=row.get("valid", {}).get(metric),
        )
        for number, row in enumerate(rows)
        if number % step == 0 or "valid" in row or row is last
    ]
    return {
        "seconds": last["elapsed"],
        "steps": last["step"],
        "tokens_per_s": _median(rows, "tokens_per_s"),
        "mfu": _median(rows, "mfu"),
        "flops": last.get("flops"),
        "curve": curve,
    }


def _median(rows: Sequence[dict[str, Any]], key: str) -> float | None:
    values = sorted(row[key] for row in rows if row.get(key) is not None)
    return values[len(values) // 2] if values else None
