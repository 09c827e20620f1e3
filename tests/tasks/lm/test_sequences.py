"""What is read as one sequence: by default what the model can read, and never what it cannot."""

import pytest

from weft.config.run import Run
from weft.errors import ConfigError
from weft.tasks.factory import make_task


def task_of(model, **task):
    recipe = {
        "task": {"name": "lm", **task},
        "data": {"train": "none.txt", "max_length": 8},
        "tokenizer": {"name": "words"},
        "model": model,
        "train": {"steps": 1},
    }
    return make_task(Run.parse(recipe))


RNN = {"name": "rnn", "width": 16}


@pytest.mark.parametrize(
    ("model", "sequences"),
    [
        (RNN, "bptt"),
        ({**RNN, "direction": "backward"}, "windows"),
        ({**RNN, "direction": "both"}, "documents"),
        ({"name": "gpt", "width": 16, "heads": 2, "layers": 1, "max_positions": 8}, "windows"),
        ({"name": "ngram", "order": 2}, "windows"),
    ],
)
def test_by_default_they_are_what_the_model_can_read(model, sequences):
    assert task_of(model).sequences == sequences


@pytest.mark.parametrize(
    ("model", "task", "message"),
    [
        ({**RNN, "direction": "both"}, {"sequences": "windows"}, "task.sequences: a model that sees both sides"),
        ({**RNN, "direction": "backward"}, {"sequences": "bptt"}, "task.sequences: the model 'rnn' cannot read on"),
        ({"name": "ngram"}, {"sequences": "documents"}, "task.sequences: the model 'ngram' is fitted to the stream"),
        ({"name": "gpt", "max_positions": 7}, {}, "data.max_length: windows of 8 tokens, but the model learns 7 pos"),
        (RNN, {"stride": 9}, "task.stride: must be at most data.max_length: got 9 and 8"),
        (RNN, {"stride": 4}, "task.stride: is of windows, but here there are none"),
    ],
)
def test_what_the_model_cannot_read_is_refused(model, task, message):
    with pytest.raises(ConfigError, match=message):
        task_of(model, **task)
