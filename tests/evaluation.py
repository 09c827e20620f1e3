"""Labelled examples, encoded for an evaluation."""

from weft.tasks.encoding import EvaluationData


def encoded(task, examples, limit):
    """Return examples of a task as evaluation data."""
    return EvaluationData.of(task, [(f"example {row}", example) for row, example in enumerate(examples, 1)], limit)
