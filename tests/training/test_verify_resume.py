"""`--verify-resume` tells a training that resumes exactly from one that depends on more than its checkpoint."""

import re

import pytest
import torch

from weft.cli.train import train as train_command
from weft.config.run import Run
from weft.errors import ConfigError, TrainingError
from weft.models.rnn import RNN
from weft.training.verify_resume import Slice, _compare, verify_resume


class Counting(RNN):
    """A model that counts its calls, which is in no checkpoint."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.calls = 0

    def read(self, tokens, state=None):
        """Return the states, which grow from call to call."""
        states, new = super().read(tokens, state)
        self.calls += 1
        return states * (1 + self.calls / 100), new


def lm(folder, **model):
    (folder / "text.txt").write_text("a b c d e f\n" * 60)
    return Run.parse(
        {
            "task": {"name": "lm", "sequences": "bptt", "bptt": 8},
            "data": {"train": str(folder / "text.txt")},
            "tokenizer": {"name": "words"},
            "model": {"name": "rnn", "width": 8, "dropout": 0.2, **model},
            "train": {"steps": 100, "batch_tokens": 32, "device": "cpu", "schedule": "cosine"},
        }
    )


def test_a_training_that_resumes_exactly_is_found_to_do_so_and_leaves_nothing(tmp_path):
    found = verify_resume(lm(tmp_path), tmp_path / "run", lambda message: None)
    assert re.match(
        r"steps 5 to 8 after a resume are those of the unbroken training, bit for bit: .* \d+ weights", found
    )
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


def test_what_depends_on_more_than_the_checkpoint_is_found_at_its_first_step(tmp_path):
    run = lm(tmp_path, name=f"{__name__}:Counting")
    with pytest.raises(
        TrainingError, match=r"step 5 differs: its loss is .* after a resume from step 4, but .* unbroken"
    ):
        verify_resume(run, tmp_path / "run", lambda message: None)
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


def test_weights_are_compared_to_the_bit():
    steps, value = {5: (1.0, 2.0)}, torch.ones(3)
    other = value.nextafter(torch.tensor(2.0))
    assert "bit for bit" in _compare(Slice(steps, {"a": value}), Slice(steps, {"a": value.clone()}))
    with pytest.raises(TrainingError, match="a differs after step 8"):
        _compare(Slice(steps, {"a": value}), Slice(steps, {"a": other}))


@pytest.mark.parametrize("option", ["plan", "resume"])
def test_it_goes_with_no_other_training(tmp_path, option):
    with pytest.raises(ConfigError, match="--verify-resume: makes two short trainings of its own"):
        train_command("recipe.yaml", out=tmp_path, verify=True, **{option: True})
