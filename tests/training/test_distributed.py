"""Two processes are one run: the losses of `torchrun` are those of one process that accumulates."""

import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import weft
from weft.errors import ConfigError
from weft.training.distributed import World, join_world, leave_world, pick_device
from weft.training.parallel import Replicated
from weft.training.reporting import read_metrics

ONE = World(0, 1, torch.device("cpu"))


def losses(folder):
    return [row["loss"] for row in read_metrics(folder / "metrics.jsonl")]


TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "weft"]
FORKED = ["tests.training.ranks"]


def two_processes(launch, *arguments):
    """Run a command of weft's as two processes, by `torchrun` or by a quicker start of our own."""
    quiet = {"GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-m", *launch, *map(str, arguments)],
        env={**os.environ, **quiet},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


SETTINGS = ["model.dropout=0", "train.report_every=1", "train.batch_tokens=100"]


def test_two_processes_train_and_resume_as_one_that_accumulates(recipe, recipe_file, tmp_path):
    averaged = [*SETTINGS, "train.save_every=4", "train.average=3"]
    weft.train(recipe, [*averaged, "train.steps=14", "train.accumulate=2"], tmp_path / "one")
    weft.train(recipe, [*SETTINGS, "train.steps=14"], tmp_path / "half")
    first = two_processes(TORCHRUN, "train", recipe_file, *averaged, "train.steps=8", "--out", tmp_path / "two")
    assert first.stdout.count("exact_match") == 1, "one process prints, the other is silent"
    second = two_processes(
        FORKED, "train", recipe_file, *averaged, "train.steps=14", "--out", tmp_path / "two", "--resume"
    )
    assert second.stderr.count("the average of the last 3 checkpoints is") == 1
    assert (tmp_path / "two" / "best").readlink() == (tmp_path / "one" / "best").readlink()
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    assert losses(tmp_path / "half") != pytest.approx(losses(tmp_path / "one"), rel=1e-2)
    ours, theirs = (load_file(tmp_path / name / "last" / "model.safetensors") for name in ("two", "one"))
    for name, value in ours.items():
        assert torch.allclose(value, theirs[name], atol=1e-4), name


def test_a_world_of_one_needs_no_one():
    head = nn.Linear(2, 2)
    assert ONE.main
    assert ONE.sum({"b": 2, "a": 0.5}) == {"b": 2, "a": 0.5}
    value = torch.ones(2)
    gathered = ONE.gather(value)
    value.zero_()
    assert gathered[0].tolist() == [1, 1], "training goes on while it is written"
    ONE.barrier()
    parallel = Replicated(head, ONE)
    assert parallel.module is parallel.trained is head
    with parallel.accumulating(last=False), parallel.whole() as whole:
        assert whole is head
    leave_world(ONE)


def test_without_torchrun_one_process_is_all(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert join_world("cpu") == ONE
    assert not torch.distributed.is_initialized()


def test_devices_go_by_name():
    assert pick_device("cpu") == torch.device("cpu")
    assert pick_device("auto").type in ("cpu", "cuda")


@pytest.mark.parametrize("name", ["gpu", "cuda:99", "", "cpu:x"])
def test_a_device_that_is_not_there_is_refused_with_the_remedy(name):
    with pytest.raises(ConfigError, match=f"train.device: '{name}' cannot be used here: .*try auto or cpu"):
        pick_device(name)


@pytest.mark.parametrize(("name", "near"), [("gpu", "cuda"), ("GPU:1", "cuda"), ("cuad", "cuda"), ("CPU", "cpu")])
def test_a_misspelt_device_gets_a_suggestion(name, near):
    with pytest.raises(ConfigError, match=f"there is no such device .did you mean '{near}'"):
        pick_device(name)


@pytest.mark.parametrize("name", ["zebra", "cuda:99", "cpu:x"])
def test_where_no_device_is_near_there_is_none(name):
    with pytest.raises(ConfigError, match="cannot be used here") as error:
        pick_device(name)
    assert "did you mean" not in str(error.value)


def test_a_device_is_checked_before_data_is_read(recipe, tmp_path):
    recipe["data"] = {"train": "nowhere.tsv"}
    with pytest.raises(ConfigError, match="'gpu' cannot be used here"):
        weft.train(recipe, ["train.device=gpu"], tmp_path / "run")
