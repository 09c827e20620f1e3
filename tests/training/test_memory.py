"""Models that do not fit into memory: refused before they are allocated, or with a notice."""

import pytest
import torch

from weft.config.run import Run
from weft.errors import ConfigError
from weft.tasks.factory import build, make_task
from weft.tokenization.base import train_tokenizer
from weft.training import memory
from weft.training.memory import check_memory, total_memory

CPU = torch.device("cpu")


@pytest.fixture
def parts(recipe):
    """Return what makes a run, its tokenizer and its task, with another model section."""

    def make(**model):
        run = Run.parse({**recipe, "model": {**recipe["model"], **model}})
        return run, train_tokenizer(run.tokenizer, ["abcdef"]), make_task(run)

    return make


def test_a_model_that_cannot_fit_is_refused_before_it_is_allocated(parts):
    with pytest.raises(
        ConfigError, match=r"^model: weights, gradients and optimizer take [\d,.]+ GB, and this machine"
    ):
        check_memory(*parts(width=1_000_000), CPU)


def test_a_small_model_is_not_built_twice(parts, monkeypatch):
    monkeypatch.setattr(memory, "total_memory", lambda device: 0)
    assert check_memory(*parts(), CPU) == ""


@pytest.mark.parametrize(("optimizer", "tensors"), [("adamw", 4), ("adagrad", 3), ("sgd", 2)])
def test_weights_gradients_and_optimizer_are_counted(parts, monkeypatch, optimizer, tensors):
    run, tokenizer, task = parts()
    run = run.model_copy(update={"train": run.train.model_copy(update={"optimizer": optimizer})})
    needed = tensors * 4 * sum(parameter.numel() for parameter in build(run, tokenizer)[1].parameters())
    monkeypatch.setattr(memory, "_SMALL", 0)
    for total, outcome in ((2 * needed, "fits"), (needed, "notice"), (needed - 1, "error")):
        monkeypatch.setattr(memory, "total_memory", lambda device, total=total: total)
        if outcome == "error":
            with pytest.raises(ConfigError, match="choose a smaller model"):
                check_memory(run, tokenizer, task, CPU)
        else:
            notice = check_memory(run, tokenizer, task, CPU)
            assert ("there may be too little left for a batch" in notice) == (outcome == "notice")


def test_with_fsdp_a_process_needs_its_share_and_the_whole_weights(parts, monkeypatch):
    run, tokenizer, task = parts()
    sharded = run.model_copy(update={"train": run.train.model_copy(update={"parallel": "fsdp"})})
    weights = 4 * sum(parameter.numel() for parameter in build(run, tokenizer)[1].parameters())
    monkeypatch.setattr(memory, "_SMALL", 0)
    monkeypatch.setattr(memory, "total_memory", lambda device: 2 * weights)  # of the 4 that one process has
    for alone in ((run, tokenizer, task, CPU, 4), (sharded, tokenizer, task, CPU)):
        with pytest.raises(ConfigError, match="choose a smaller model"):
            check_memory(*alone)
    assert "there may be too little left" in check_memory(sharded, tokenizer, task, CPU, 4)
    assert check_memory(sharded, tokenizer, task, CPU, 16) == ""


def test_the_check_draws_no_random_numbers(parts, monkeypatch):
    monkeypatch.setattr(memory, "_SMALL", 0)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    check_memory(*parts(), CPU)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_container_may_have_less_than_the_machine(tmp_path, monkeypatch):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(memory, "_CGROUP_LIMIT", limit)
    machine = total_memory(CPU)
    assert machine > 1 << 20
    limit.write_text("1048576\n")
    assert total_memory(CPU) == 1 << 20
    limit.write_text("max\n")
    assert total_memory(CPU) == machine
