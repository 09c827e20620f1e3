"""Which error of several processes is told: the cause, and not what follows from it."""

import json
import signal

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from weft.cli.train import _launch
from weft.errors import ConfigError
from weft.training.distributed import join_world
from weft.training.launch import ERROR_FILE, LAUNCHED, LOST_PEER, TOLD, USER_ERROR, _exit_as_failed, hand_over


@pytest.fixture
def told(tmp_path, monkeypatch, capsys):
    """Return a function from processes, each an exit code and the error that it has handed over, to what is told."""

    def tell(*processes):
        failures = {}
        for rank, (code, message) in enumerate(processes):
            file = tmp_path / f"error-{rank}.json"
            monkeypatch.setenv(LAUNCHED, "1")
            monkeypatch.setenv(ERROR_FILE, str(file))
            assert message is None or hand_over(message)
            failures[rank] = ProcessFailure(rank, 100 + rank, code, str(file))
        with pytest.raises(SystemExit) as end:
            _exit_as_failed(failures)
        return capsys.readouterr().err, end.value.code

    return tell


LOST = (LOST_PEER, "process 0: another process of this training has ended, or cannot be reached: NCCL error")


@pytest.mark.parametrize("code", [USER_ERROR, -signal.SIGTERM], ids=["by itself", "by the agent"])
def test_an_error_is_told_before_what_follows_from_it(told, code):
    assert told(LOST, (code, "the disk is full")) == ("error: the disk is full\n", USER_ERROR)


def test_a_signal_is_told_before_what_follows_from_it(told):
    error, code = told(LOST, (-signal.SIGKILL, None), (-signal.SIGTERM, None))
    assert error.startswith("error: process 1 was ended by SIGKILL; go on from")
    assert code == 128 + signal.SIGKILL


def test_where_no_process_has_a_cause_to_tell_the_error_of_pytorch_is_not_lost(told):
    assert told((-signal.SIGTERM, None), LOST) == (f"error: {LOST[1]}\n", LOST_PEER)


@pytest.mark.parametrize("process", [(USER_ERROR, TOLD), (1, None), (143, None)], ids=["told", "traceback", "stopped"])
def test_what_a_process_has_printed_itself_is_not_told_again(told, process):
    assert told(process) == ("", process[0])


def test_no_half_of_an_error_is_handed_over(tmp_path, monkeypatch):
    monkeypatch.setenv(LAUNCHED, "1")
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "error.json"))
    assert hand_over("first")
    with (tmp_path / "error.json").open() as first:
        assert hand_over("second")
        assert json.load(first)["message"] == "first", "the old file is whole, and another takes its place"
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "nowhere" / "error.json"))
    assert not hand_over("third"), "so that the process prints it"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.accumulate=4"], "an update has 4 batches, which 3 processes cannot share evenly"),
        (
            ["train.parallel=fsdp", "train.optimizer=asgd", "train.eval_every=2"],
            "a process has a shard of each; take train.parallel=ddp",
        ),
        (["train.parallel=fsdp", "train.unfreeze=2"], "fsdp does not go together with train.unfreeze"),
    ],
)
def test_what_cannot_be_shared_is_refused_before_a_process_starts(recipe_file, tmp_path, overrides, message):
    with pytest.raises(ConfigError, match=message):
        _launch(str(recipe_file), overrides, tmp_path / "run", [], 3, 0)


def test_one_gpu_for_several_processes_is_refused(monkeypatch):
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"train.device: 'cuda:1' is one GPU, .* set it to auto"):
        join_world("cuda:1")
    assert not torch.distributed.is_initialized()
