"""Examples to items: once for a run's evaluations, and one question without a file, a digest or a thread."""

import tempfile
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.evaluation import encoded

import weft
from weft.config.run import Run
from weft.data.truncation import TruncationPolicy
from weft.errors import DataError
from weft.tasks import encoding, evaluation, factory, inference_batches
from weft.tasks.factory import make_task
from weft.tasks.translate import Translate, TranslateExample


@pytest.fixture
def calls(monkeypatch):
    """Return the sizes of the calls of `Translate.encode_batch`."""
    sizes, encode_batch = [], Translate.encode_batch

    def counted(self, examples, tokenizer, limit):
        sizes.append(len(examples))
        return encode_batch(self, examples, tokenizer, limit)

    monkeypatch.setattr(Translate, "encode_batch", counted)
    return sizes


def pairs(*texts):
    return [TranslateExample(text=text, target=text[::-1]) for text in texts]


def test_evaluation_data_is_encoded_once_with_labels_and_once_without(reverser, calls):
    data = encoded(reverser.task, pairs("ab", "abc", "b"), TruncationPolicy(20, "error"))
    assert calls == [3]
    first = evaluation.evaluate(reverser.task, reverser.head, data)
    assert calls == [3, 3]
    assert evaluation.evaluate(reverser.task, reverser.head, data) == first
    assert calls == [3, 3]


def test_an_evaluation_answers_as_predict_does(reverser):
    examples = pairs("ab", "abba", "b", "aab")
    data = encoded(reverser.task, examples, TruncationPolicy(20, "error"))
    answers = list(evaluation.answer_all(reverser.task, reverser.head, data))
    assert answers == reverser([example.text for example in examples])
    items, starts = data.unlabelled
    assert starts.tolist() == [0, 1, 2, 3, 4]
    assert all(len(items[row][1]) == 2 for row in range(4)), "the target is in the question"
    assert all(len(data.items[row][1]) > 2 for row in range(4)), "the target is not in the labelled item"


def test_examples_of_which_nothing_is_left_are_left_out_of_evaluation_data(reverser):
    examples = pairs("ab", "a" * 50, "b")
    assert encoded(reverser.task, examples, TruncationPolicy(20, "drop")).examples == [examples[0], examples[2]]
    with pytest.raises(DataError, match="example 2: got 50 tokens"):
        encoded(reverser.task, examples, TruncationPolicy(20, "error"))


def test_one_question_needs_no_file_and_no_thread(reverser, monkeypatch):
    expected = reverser("abba")

    def refused(*args, **kwargs):
        raise AssertionError("a file or a thread")

    monkeypatch.setattr(tempfile, "TemporaryFile", refused)
    monkeypatch.setattr(encoding, "ThreadPoolExecutor", refused)
    monkeypatch.setattr(inference_batches, "ThreadPoolExecutor", refused)
    assert reverser("abba") == expected
    with pytest.raises(AssertionError, match="a file or a thread"):
        reverser.evaluate([{"text": "ab", "target": "ba"}])


def test_the_control_would_see_a_thread():
    assert encoding.ThreadPoolExecutor is ThreadPoolExecutor
    assert inference_batches.ThreadPoolExecutor is ThreadPoolExecutor


def test_a_run_makes_its_task_once(tmp_path, monkeypatch):
    (tmp_path / "rows.tsv").write_text("a warm day\tgood\na cold night\tbad\n" * 4)
    recipe = {
        "task": {"name": "classify"},
        "data": {"train": str(tmp_path / "rows.tsv"), "valid": str(tmp_path / "rows.tsv")},
        "tokenizer": {"name": "words"},
        "model": {"name": "cnn", "width": 9},
        "train": {"steps": 2, "eval_every": 1, "batch_tokens": 64},
    }
    made = []

    def counted(run):
        made.append(make_task(run))
        return made[-1]

    monkeypatch.setattr(factory, "make_task", counted)
    monkeypatch.setattr("weft.training.run.make_task", counted)
    pipeline = weft.train(recipe, (), tmp_path / "run")
    assert len(made) == 1
    assert pipeline.task is made[0]
    assert pipeline.task.labels.names == ("bad", "good") == Run.parse(pipeline.run.dump()).task.labels
