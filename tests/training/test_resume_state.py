"""A run resumes from state that fits it, and from no other: what is wrong is named, before a step is made.

The state is changed under a manifest that fits it: the checks are those of the content, not of the digest.
"""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import weft
from weft.checkpoint.contents import CARRIED_FILE, RANDOM_FILE
from weft.checkpoint.manifest import CHECKPOINT_MANIFEST, seal
from weft.checkpoint.optimizer_state import OPTIMIZER_FILE
from weft.errors import CheckpointError


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return the recipe of a language model that carries its state over, and the folder of its run after 4 steps."""
    folder = tmp_path_factory.mktemp("carried")
    (folder / "text.txt").write_text("a b c d e f\n" * 60)
    recipe = {
        "task": {"name": "lm", "sequences": "bptt", "bptt": 8},
        "data": {"train": str(folder / "text.txt")},
        "tokenizer": {"name": "words"},
        "model": {"name": "rnn", "width": 8},
        "train": {"steps": 4, "batch_tokens": 32, "device": "cpu", "save_every": 4},
    }
    weft.train(recipe, out=folder / "run")
    return {**recipe, "train": {**recipe["train"], "steps": 6}}, folder / "run"


def halve(tensors, name):
    tensors[name] = tensors[name][:2].contiguous()


CASES = {
    "sound": (CARRIED_FILE, lambda tensors: None, None),
    "fewer rows": (CARRIED_FILE, lambda tensors: halve(tensors, "0.0"), "does not fit the model and its batches"),
    "one row for all": (
        CARRIED_FILE,
        lambda tensors: tensors.update({name: value[:1].contiguous() for name, value in tensors.items()}),
        "does not fit the model and its batches",
    ),
    "another dtype": (
        CARRIED_FILE,
        lambda tensors: tensors.update({"0.0": tensors["0.0"].double()}),
        "does not fit the model and its batches",
    ),
    "no dimension": (
        CARRIED_FILE,
        lambda tensors: tensors.update({"0.0": torch.ones(())}),
        "does not fit the model and its batches",
    ),
    "a part too few": (CARRIED_FILE, lambda tensors: tensors.pop("1.0"), "does not fit the model and its batches"),
    "not a number": (CARRIED_FILE, lambda tensors: tensors["0.0"].fill_(torch.nan), "0.0: 32 of its 32 values are NaN"),
    "odd names": (CARRIED_FILE, lambda tensors: tensors.update({"x.0": torch.ones(1)}), None),  # nothing reads it
    "random": (RANDOM_FILE, lambda tensors: tensors.update({"cpu.0": torch.ones(3)}), "no state of a random generator"),
    "random bytes": (
        RANDOM_FILE,
        lambda tensors: tensors.update({"cpu.0": torch.full_like(tensors["cpu.0"], 255)}),
        "no state of a random generator",
    ),
    "optimizer": (
        OPTIMIZER_FILE,
        lambda tensors: tensors["exp_avg.body.embed.weight"].fill_(torch.nan),
        "exp_avg.body.embed.weight: .* values are NaN or infinite",
    ),
    "optimizer shape": (
        OPTIMIZER_FILE,
        lambda tensors: tensors.update({"exp_avg.body.embed.weight": torch.ones(())}),
        r"exp_avg.body.embed.weight must be .* but is \(\) of torch.float32",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_state_that_does_not_fit_is_refused_by_name(run, tmp_path, case):
    recipe, trained = run
    file, change, message = CASES[case]
    shutil.copytree(trained, tmp_path / "run", symlinks=True)
    last = (tmp_path / "run" / "last").resolve()
    tensors = load_file(last / file)
    change(tensors)
    save_file(tensors, last / file)
    (last / CHECKPOINT_MANIFEST).unlink()
    seal(last, 4)
    if message is None:
        weft.train(recipe, out=tmp_path / "run", resume=True)
        return
    with pytest.raises(CheckpointError, match=message):
        weft.train(recipe, out=tmp_path / "run", resume=True)
