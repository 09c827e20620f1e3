"""From the evaluations of all entries to `ComparisonResults`: what is compared with what, on which examples."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np

from weft.checkpoint.contents import differences
from weft.comparison import measure
from weft.comparison.evaluate import Evaluation
from weft.comparison.plan import Plan, PlannedEntry
from weft.comparison.results import (
    AnswerCell,
    AttentionFigures,
    ComparedExample,
    ComparisonResults,
    Entry,
    LengthGroup,
    SeedResult,
    Significance,
    SurprisingText,
)
from weft.comparison.significance import (
    MIN_EXAMPLES,
    MetricOfSample,
    mean_of,
    metric_of_answers,
    metric_of_losses,
    paired_difference,
    resample,
)
from weft.tasks.base import Answer, Task
from weft.tasks.capabilities import ErrorAnalysis, positive_label
from weft.tasks.length_report import LengthReport

SHOWN_EXAMPLES, MAX_TEXT = 40, 1000  # examples with the answers of all, and characters of each text
LENGTH_GROUPS = 8
CORRELATIONS = ("spearman", "pearson")  # metrics of numbers, which are near or far and hardly ever right


@dataclass(frozen=True)
class Assembly:
    """The entries with what they answered; results are of the test examples that all of them could read."""

    plan: Plan
    task: Task  # with its labels
    examples: Sequence[Any]  # of the test split; [] of a prepared corpus
    evaluations: Mapping[str, Sequence[Evaluation]]  # by entry, one a seed; not of those that failed
    failures: Mapping[str, str]  # by entry, why it has no result

    def results(self) -> ComparisonResults:
        """Return all that the table and the report show."""
        firsts = {name: over_seeds[0] for name, over_seeds in self.evaluations.items()}
        entries = [self._entry(entry) for entry in self.plan.entries]
        return ComparisonResults(
            task=self.plan.entries[0].run.task.name,
            metric=self._metric,
            higher_is_better=not self.task.lower_is_better,
            metric_names=self._metric_names(),
            positive_label=positive_label(self.task),
            budget=self.plan.budget.text,
            seeds=list(self.plan.seeds),
            split=self.plan.split,
            num_examples=len(self._rows),
            length_unit=next((report.unit for reports in self._lengths.values() for report in reports), "words"),
            class_unit=next((first.class_unit for first in firsts.values() if first.classes), "label"),
            machine=measure.machine(),
            entries=entries,
            examples=self._examples(),
            surprising=self._surprising(),
            attention=[
                AttentionFigures(entry=name, text=first.attention[0], figures=first.attention[1])
                for name, first in firsts.items()
                if first.attention
            ],
        )

    @cached_property
    def _metric(self) -> str:
        return self.plan.metric(self.task)

    def _all_evaluations(self) -> Iterator[Evaluation]:
        """Yield the evaluations of all entries."""
        return chain.from_iterable(self.evaluations.values())

    @cached_property
    def _rows(self) -> list[int]:
        """The numbers of the examples that all entries could read."""
        readable = [set(evaluation.rows) for evaluation in self._all_evaluations() if evaluation.rows]
        return sorted(set.intersection(*readable)) if readable else list(range(len(self.examples)))

    @cached_property
    def _shared(self) -> list[Any]:
        return [self.examples[row] for row in self._rows]

    def _answers(self, evaluation: Evaluation) -> list[Answer]:
        """Return the answers to the shared examples; [] of a task without answers."""
        return [] if evaluation.answers is None else [evaluation.answers[place] for place in self._places(evaluation)]

    def _places(self, evaluation: Evaluation) -> list[int]:
        places = {row: place for place, row in enumerate(evaluation.rows)}
        return [places[row] for row in self._rows]

    def _metrics(self, evaluation: Evaluation) -> dict[str, float | None]:
        """Return the metrics on the shared examples: where an entry could read more, they are computed again."""
        if len(evaluation.rows) in (0, len(self._rows)):
            return evaluation.result.metrics
        if evaluation.answers is not None:
            computed = self.task.score(self._answers(evaluation), self._shared)
        elif (losses := evaluation.text_losses()) is not None:
            places = np.array(self._places(evaluation))
            computed = {name: losses.metric(name, places) for name in evaluation.result.metrics}
        else:
            return evaluation.result.metrics
        return {name: value if math.isfinite(value) else None for name, value in computed.items()}

    def _metric_names(self) -> list[str]:
        """Return the metrics that some entry has, the ordering one first."""
        known = [name for evaluation in self._all_evaluations() for name in evaluation.result.metrics]
        return list(dict.fromkeys([self._metric, *known]))

    def _entry(self, entry: PlannedEntry) -> Entry:
        """Return an entry's results, or why it has none."""
        over_seeds = self.evaluations.get(entry.name, ())
        first = over_seeds[0] if over_seeds else None
        costs = ("parameters", "disk_bytes", "latency_p50", "latency_p99", "throughput", "classes")
        return Entry(
            name=entry.name,
            model="logistic regression" if entry.baseline else entry.run.model.name,
            kind=entry.kind,
            settings=self._settings(entry),
            runs=[self._seed_result(evaluation) for evaluation in over_seeds],
            lengths=self._groups(entry.name),
            failure=self.failures.get(entry.name),
            versus_best=self._significance.get(entry.name),
            **({} if first is None else {key: getattr(first, key) for key in costs}),
        )

    def _seed_result(self, evaluation: Evaluation) -> SeedResult:
        return evaluation.result.model_copy(update={"metrics": self._metrics(evaluation)})

    def _settings(self, entry: PlannedEntry) -> dict[str, Any]:
        """Return the keys in which the trained entries differ, with this one's values."""
        if entry.baseline:
            return {"features": entry.baseline}
        dumps = [_own_settings(other) for other in self.plan.entries if not other.baseline]
        keys = dict.fromkeys(key for dump in dumps for key in differences(dumps[0], dump))
        own = differences(_own_settings(entry), {})
        return {key: own[key][0] for key in keys if key in own}

    @cached_property
    def _significance(self) -> dict[str, Significance]:
        """The significance of each entry's difference from the best."""
        values = {name: self._mean(over_seeds) for name, over_seeds in self.evaluations.items()}
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        systems = {name: system for name in finite if (system := self._system(name)) is not None}
        if len(self._rows) < MIN_EXAMPLES or len(systems) < 2:
            return {}
        best = (min if self.task.lower_is_better else max)(finite, key=lambda name: finite[name])
        if best not in systems:
            return {}
        samples = dict(zip(systems, resample(list(systems.values()), len(self._rows)).T, strict=True))
        compared = {
            name: paired_difference(finite[name] - finite[best], samples[name], samples[best])
            for name in systems
            if name != best
        }
        return {name: significance for name, significance in compared.items() if significance is not None}

    def _mean(self, over_seeds: Sequence[Evaluation]) -> float:
        """Return the mean of the ordering metric over the seeds; NaN where one is not finite."""
        values = [self._metrics(evaluation).get(self._metric) for evaluation in over_seeds]
        return math.nan if None in values else sum(value or 0.0 for value in values) / len(values)

    def _system(self, name: str) -> MetricOfSample | None:
        """Return an entry's metric as a function of the sample of shared examples."""
        systems = []
        for evaluation in self.evaluations[name]:
            losses = evaluation.text_losses()
            if evaluation.answers is not None:
                systems.append(metric_of_answers(self.task, self._metric, self._answers(evaluation), self._shared))
            elif losses is not None:
                systems.append(metric_of_losses(losses.of(np.array(self._places(evaluation))), self._metric))
            else:
                return None
        return mean_of(systems)

    @cached_property
    def _lengths(self) -> dict[str, list[LengthReport]]:
        """The metrics by length of the input of each entry, a report a seed."""
        return {
            name: [
                LengthReport.of(self.task, self._answers(evaluation), self._shared, LENGTH_GROUPS)
                for evaluation in over_seeds
                if evaluation.answers
            ]
            for name, over_seeds in self.evaluations.items()
            if self._rows
        }

    def _groups(self, name: str) -> list[LengthGroup]:
        reports = self._lengths.get(name, [])
        groups = []
        for same in zip(*(report.groups for report in reports), strict=True):
            values = [group.metrics.get(self._metric) for group in same]
            value = None if None in values else sum(value or 0.0 for value in values) / len(values)
            first = same[0]
            groups.append(
                LengthGroup(shortest=first.shortest, longest=first.longest, examples=first.examples, value=value)
            )
        return groups

    def _examples(self) -> list[ComparedExample]:
        """Return the examples on which the entries disagree most, by right and wrong and then by their answers."""
        task, columns = self.task, dict[str, list[AnswerCell]]()
        for name, over_seeds in self.evaluations.items():
            if answers := self._answers(over_seeds[0]):
                right = self._right(answers)
                texts = (task.format_answer(answer)[:MAX_TEXT] for answer in answers)
                columns[name] = [AnswerCell(text=text, correct=ok) for text, ok in zip(texts, right, strict=True)]
        if not columns:
            return []
        order = sorted(range(len(self._shared)), key=lambda row: _agreement([cells[row] for cells in columns.values()]))
        shown = []
        for row in order[:SHOWN_EXAMPLES]:
            text, expected = task.preview(self._shared[row])
            answers_by_entry = {name: cells[row] for name, cells in columns.items()}
            shown.append(ComparedExample(text=text[:MAX_TEXT], expected=expected[:MAX_TEXT], answers=answers_by_entry))
        return shown

    def _right(self, answers: Sequence[Answer]) -> list[bool | None]:
        if not isinstance(self.task, ErrorAnalysis) or self._metric in CORRELATIONS:
            return [None] * len(answers)
        return [error is None for error in self.task.errors(answers, self._shared)]

    def _surprising(self) -> list[SurprisingText]:
        """Return the texts that are shaded by surprise, with the pieces of each entry."""
        texts: dict[str, dict[str, list[tuple[str, float]]]] = {}
        for name, over_seeds in self.evaluations.items():
            for text, pieces in over_seeds[0].surprising:
                texts.setdefault(text, {})[name] = pieces
        return [SurprisingText(text=text, pieces=pieces) for text, pieces in texts.items()]


def _own_settings(entry: PlannedEntry) -> dict[str, Any]:
    """Return what an entry may set as it likes: all but data, seed and budget."""
    dump = entry.run.dump()
    budget = {"steps", "epochs", "time", "flops", "seed", "seeds"}
    train = {key: value for key, value in dump["train"].items() if key not in budget}
    return {"task": dump["task"], "tokenizer": dump["tokenizer"], "model": dump["model"], "train": train}


def _agreement(cells: Sequence[AnswerCell]) -> tuple[float, int]:
    """Return a sort key: least for an example that half of the entries have right, then by the number of answers."""
    known = [cell.correct for cell in cells if cell.correct is not None]
    share = sum(known) / len(known) if known else 0.0
    return -share * (1 - share), -len({cell.text for cell in cells})
