"""What a task declares it can do: each capability has its methods, and what is not declared is refused."""

import inspect

import pytest

import weft
from weft.errors import ConfigError, RoleError
from weft.registry import TABLE, resolve
from weft.tasks import capabilities
from weft.tasks.base import Task
from weft.tasks.capabilities import (
    CustomEvaluation,
    LabelPrediction,
    SelfFitting,
    StreamReading,
    TeacherForcing,
    TextGeneration,
    TextStreaming,
    positive_label,
)
from weft.tasks.metrics import ConfusionMatrix

CAPABILITIES = [
    value
    for value in vars(capabilities).values()
    if inspect.isclass(value) and issubclass(value, Task) and value is not Task
]
TASKS = [resolve("task", name) for name in TABLE["task"]]


def lacking(task):
    """Return the methods that a task declares by its capabilities and does not define."""
    declared = [cls for cls in CAPABILITIES if issubclass(task, cls)]
    names = {name for cls in declared for name, value in vars(cls).items() if "missing_method" in _names(value)}
    return {name for name in names if "missing_method" in _names(getattr(task, name))}


def _names(value):
    return getattr(getattr(value, "__code__", None), "co_names", ())


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.__name__)
def test_a_task_defines_what_it_declares(task):
    assert not lacking(task)


def test_a_declaration_without_its_method_is_seen():
    class Mute(TextStreaming):
        pass

    assert lacking(Mute) == {"stream"}
    with pytest.raises(ConfigError, match=r"Mute does not define stream\(\)"):
        Mute(Task.Config(name="mute")).stream(None, None, None, None)

    class Half(TextGeneration):
        def stream(self, *arguments):
            return iter(())

    assert lacking(Half) == {"generation_request", "decode_generated"}


def test_capabilities_differ_between_tasks():
    declared = {task.__name__: {cls for cls in CAPABILITIES if issubclass(task, cls)} for task in TASKS}
    assert {SelfFitting, StreamReading, CustomEvaluation, TextStreaming, TeacherForcing} <= declared["LM"]
    assert TextStreaming not in declared["Classify"]
    assert declared["Embed"] == set()


def test_what_is_not_declared_is_refused_with_its_task(tmp_path):
    (tmp_path / "rows.tsv").write_text("a warm day\tgood\na cold night\tbad\n")
    recipe = {
        "task": {"name": "classify"},
        "data": {"train": str(tmp_path / "rows.tsv")},
        "tokenizer": {"name": "words"},
        "model": {"name": "cnn", "width": 9},
        "train": {"steps": 1},
    }
    pipeline = weft.train(recipe, (), tmp_path / "run")
    with pytest.raises(RoleError, match="'classify' does not generate text, so it cannot be streamed"):
        pipeline.stream("a day")


class Sorted(LabelPrediction):
    """A task of a user's own, which defines the confusion matrix and no more."""

    def confusion(self, answers, examples):
        return ConfusionMatrix.of(["a", "b"], zip(examples, answers, strict=True)) if answers else None


def test_a_confusion_matrix_is_enough_for_a_report():
    task = Sorted(Task.Config(name="sorted"))
    report = task.report(["a", "b", "b"], ["a", "a", "b"])
    assert (report.classes["a"].recall, report.classes["b"].precision) == (0.5, 0.5)
    assert task.report([], []) is None
    assert positive_label(task) is positive_label(Task(Task.Config(name="none"))) is None


def test_errors_of_a_task_without_wrong_answers_are_refused(tmp_path):
    (tmp_path / "text.txt").write_text("a warm day\na cold night\n")
    recipe = {
        "task": {"name": "lm"},
        "data": {"train": str(tmp_path / "text.txt"), "valid": str(tmp_path / "text.txt")},
        "tokenizer": {"name": "words"},
        "model": {"name": "ngram", "order": 2},
        "train": {"steps": 1},
    }
    pipeline = weft.train(recipe, (), tmp_path / "run")
    with pytest.raises(RoleError, match="errors: the task 'lm' has no answers that are right or wrong; leave it out"):
        pipeline.evaluate_in_detail(errors=True)
    assert pipeline.evaluate_in_detail().errors is None
