"""Comparison of recipes trained at one budget: metrics, parameters, time, speed; learning curves and attention maps."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from weft.analysis.attention import legend
from weft.analysis.render.charts import line_chart
from weft.analysis.render.page import details, heading, page, table
from weft.checkpoint.contents import differences
from weft.checkpoint.store import Store
from weft.config.schema import Overrides, Run, read_recipe
from weft.data.readers.examples import Skipped
from weft.data.truncation import TruncationPolicy
from weft.errors import CheckpointError, ConfigError, RoleError
from weft.formats.pretrained import read_run
from weft.pipeline import Pipeline, run_name, train
from weft.tasks.capabilities import positive_label
from weft.tasks.classification_report import ClassificationReport, ClassScores
from weft.tasks.metrics import metric_title
from weft.tasks.prepare import data_for, has_split, read_split
from weft.training.reporting import Reporter, read_metrics

NUM_EXAMPLES = 4  # number of examples whose answers are shown side by side

Table = tuple[list[str], list[list[str]]]  # the headers and rows of a table


@dataclass(frozen=True)
class ComparedRun:
    """A trained recipe, its metrics and its training log."""

    name: str
    pipeline: Pipeline
    metrics: dict[str, float]
    rows: list[dict[str, Any]]  # of metrics.jsonl
    report: ClassificationReport | None = None  # where answers are labels

    @property
    def last(self) -> dict[str, Any]:
        """The last row of its training log."""
        return self.rows[-1]

    @property
    def tokens_per_s(self) -> float:
        """The median of the reported speeds."""
        speeds = sorted(row["tokens_per_s"] for row in self.rows)
        return float(speeds[len(speeds) // 2])


@dataclass(frozen=True)
class Comparison:
    """The trained recipes, in the order given, and their budget."""

    contenders: list[ComparedRun]
    budget: str

    @property
    def trained_for(self) -> str:
        """The budget: `1,000 steps`, or the time as given."""
        return f"{int(self.budget):,} steps" if self.budget.isdigit() else self.budget

    @property
    def metric_names(self) -> list[str]:
        """The names of the task's metrics."""
        return [name for name in self.contenders[0].metrics if name != "loss"]

    def table(self) -> Table:
        """Return the table of results, one row per recipe."""
        positive = positive_label(self.contenders[0].pipeline.task)
        headers = ["model", *(metric_title(name.replace("_", " "), positive) for name in self.metric_names)]
        return [*headers, "parameters", "time", "steps", "tokens/s"], [
            self._row(contender) for contender in self.contenders
        ]

    def _row(self, contender: ComparedRun) -> list[str]:
        return [
            contender.name,
            *(_format_metric(name, contender.metrics[name]) for name in self.metric_names),
            f"{contender.pipeline.parameters:,}",
            f"{contender.last['elapsed']:.0f} s",
            f"{contender.last['step']:,}",
            f"{contender.tokens_per_s:,.0f}",
        ]

    def answers(self) -> Table:
        """Return a table of a few unseen examples with the answer of each recipe."""
        examples = self.unseen()
        pipelines = [contender.pipeline for contender in self.contenders]
        columns = [[pipeline.task.format_answer(answer) for answer in pipeline(examples)] for pipeline in pipelines]
        previews = [self.contenders[0].pipeline.task.preview(example) for example in examples]
        headers = ["text", "should be", *(contender.name for contender in self.contenders)]
        return headers, [[*pair, *answers] for pair, *answers in zip(previews, *columns, strict=True)]

    def unseen(self) -> list[Any]:
        """Return a few examples that no recipe was trained on, from the longest to shorter ones."""
        first = self.contenders[0].pipeline
        data, split = data_for(first.run.data, None)
        examples = [
            example for _, example in islice(read_split(data, split, first.task, Skipped()), 64) if self._fits(example)
        ]
        examples.sort(key=lambda example: -len(first.task.preview(example)[0]))
        return examples[:: max(1, len(examples) // NUM_EXAMPLES)][:NUM_EXAMPLES]

    def _fits(self, example: Any) -> bool:
        """Return whether an example is short enough for the tokenizers of all."""
        pipelines = (contender.pipeline for contender in self.contenders)
        return all(
            p.task.encode(example, p.tokenizer, TruncationPolicy(p.run.data.max_length, "drop")) for p in pipelines
        )

    def page(self) -> str:
        """Return the report as one HTML page that needs no network."""
        headers, rows = self.table()
        parts = [heading("Result"), table(headers, rows), heading("Learning curves"), *self._curves()]
        parts += self._reports()
        parts += [heading("Answers to unseen examples"), table(*self.answers())]
        parts += self._alignments()
        names = " and ".join(contender.name for contender in self.contenders)
        return page(f"weft compare: {names}", parts, f"each trained for {self.trained_for} on the same data")

    def classes(self) -> Table:
        """Return a table of each class, its support and the F1 of each recipe; without labels it has no rows."""
        reports = [contender.report for contender in self.contenders if contender.report is not None]
        names = dict.fromkeys(name for report in reports for name in report.classes)
        headers = [reports[0].unit if reports else "label", "support", *(c.name for c in self.contenders)]
        return headers, [[name, *_class_cells([report.classes.get(name) for report in reports])] for name in names]

    def _reports(self) -> list[str]:
        """Return each class's F1 by recipe, and below it the classification report of each recipe."""
        headers, rows = self.classes()
        if not rows:
            return []
        reports = [
            details(f"{contender.name}: precision, recall and F1", [table(*contender.report.table())])
            for contender in self.contenders
            if contender.report is not None
        ]
        return [heading(f"F1 by {headers[0]}"), table(headers, rows), *reports]

    def _curves(self) -> list[str]:
        """Draw training loss and validation metric by seconds of training."""
        losses = {
            contender.name: [(row["elapsed"], row["loss"]) for row in contender.rows if row["loss"] is not None]
            for contender in self.contenders
        }
        charts = [line_chart(losses, "seconds of training", "loss", "Training loss", log_y=True)]
        name = self.contenders[0].pipeline.task.metric
        scores = {
            contender.name: [
                (row["elapsed"], row["valid"][name]) for row in contender.rows if name in row.get("valid", {})
            ]
            for contender in self.contenders
        }
        label = name.replace("_", " ")
        percent = _format_metric(name, 0.5).endswith("%")
        return [*charts, line_chart(scores, "seconds of training", label, f"Validation: {label}", percent=percent)]

    def _alignments(self) -> list[str]:
        """Draw the attention weights of the models that have attention, for the first example."""
        examples, attentions = self.unseen()[:1], {}
        for contender in self.contenders if examples else []:
            with suppress(RoleError):
                attentions[contender.name] = contender.pipeline.attention(examples[0])
        figures = [figure for name, attention in attentions.items() for figure in attention.figures(name)]
        return [heading("Alignment"), legend(list(attentions.values())), *figures] if figures else []


def compare(
    recipes: str | Path | Sequence[str | Path],
    budget: str | int,
    out: str | Path,
    overrides: Overrides = (),
    reporter: Callable[[str], Reporter] | None = None,
) -> Comparison:
    """Train each recipe at one budget (`60s`, `5m`, or a number of steps) in a folder of `out`; write `report.html`.

    `overrides` change every recipe: `["train.seed=2"]` or `{"train.seed": 2}`.
    """
    recipes = [recipes] if isinstance(recipes, str | Path) else recipes
    names = [run_name(recipe) for recipe in recipes]
    if len(set(names)) != len(names) or not names:
        raise ConfigError(f"compare: needs recipes with different names, but got {', '.join(names) or 'none'}")
    key, other = ("steps", "time") if str(budget).isdigit() else ("time", "steps")
    limits = [f"train.{key}={budget}", f"train.{other}=null", "train.epochs=null"]
    # All are checked before the first is trained.
    runs = [read_run(read_recipe(recipe, overrides), limits) for recipe in recipes]
    _check_same_task(dict(zip(names, runs, strict=True)))
    if not has_split(runs[0].data, data_for(runs[0].data, None)[1]):
        raise ConfigError("compare: the recipes need data.test or data.valid to be evaluated on")
    for folder in (Path(out) / name for name in names):
        if Store(folder).last():
            raise CheckpointError(f"{folder}: holds a run already; choose another --out")
    if (Path(out) / "report.html").is_dir():
        raise CheckpointError(f"{out}/report.html: must be a file, but is a folder; choose another --out")
    result = Comparison(
        [_train_contender(*pair, Path(out), reporter) for pair in zip(names, runs, strict=True)], str(budget)
    )
    (Path(out) / "report.html").write_text(result.page(), encoding="utf-8")
    return result


def _check_same_task(runs: Mapping[str, Run]) -> None:
    """Raise an error if the recipes differ in task or data; how a head is regularised by dropout is no difference."""
    if several := next((name for name, run in runs.items() if run.task_names), None):
        raise ConfigError(f"compare: {several} has several tasks, and one table is of one; compare by weft evaluate")
    (first, first_run), *others = runs.items()
    for name, run in others:
        sections = ({"task": side.task.model_dump(), "data": side.data.model_dump()} for side in (first_run, run))
        allowed = {"task.dropout", *(["data.max_length"] if _length_may_differ(first_run, run) else [])}
        changed = {key: values for key, values in differences(*sections).items() if key not in allowed}
        if changed:
            key = "task.name" if "task.name" in changed else next(iter(changed))
            here, there = changed[key]
            others_too = [] if key == "task.name" else [other for other in changed if other != key]
            more = f" ({', '.join(others_too)} differ as well)" if others_too else ""
            raise ConfigError(
                f"compare: the recipes must have the same task and data, to compare their metrics, but {key} is "
                f"{here!r} in {first} and {there!r} in {name}{more}; set it to one value in both"
            )


def _length_may_differ(first: Run, other: Run) -> bool:
    """Return whether `max_length` may be what pretrained weights allow, and no example is left out for it."""
    weights = any(getattr(run.model, "weights", None) for run in (first, other))
    return weights and other.data.truncation != "drop"


def _train_contender(name: str, run: Run, out: Path, reporter: Callable[[str], Reporter] | None) -> ComparedRun:
    pipeline = train(run, out=out / name, report=reporter(name) if reporter else None)
    result, rows = pipeline.evaluate_in_detail(), read_metrics(out / name / "metrics.jsonl")
    return ComparedRun(name, pipeline, result.metrics, rows, result.report)


def _class_cells(scores: Sequence[ClassScores | None]) -> list[str]:
    """Return a class's support and F1 in each recipe; 0 where a recipe has it neither as gold nor predicted."""
    support = max(score.support for score in scores if score is not None)
    return [f"{support:,}", *(f"{0 if score is None else score.f1:.1%}" for score in scores)]


def _format_metric(name: str, value: float) -> str:
    """Return a metric as a percentage, or with the decimals customary for it."""
    digits = {"bleu": 1, "perplexity": 2, "backward_perplexity": 2, "bits_per_byte": 3}.get(name)
    return f"{value:.1%}" if digits is None else f"{value:,.{digits}f}"
