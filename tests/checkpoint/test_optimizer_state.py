"""The optimizer's state is restored exactly; what does not fit is an error that names it."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from weft.checkpoint.optimizer_state import OPTIMIZER_FILE, load_optimizer, optimizer_tensors
from weft.config.sections import Train
from weft.errors import CheckpointError
from weft.training.optim import make_optimizer


def linear(seed):
    torch.manual_seed(seed)
    return nn.Linear(3, 3)


def equal(ours, theirs):
    return all(torch.equal(ours[name], theirs[name]) for name in ours.keys() | theirs.keys())


def save(folder, tensors):
    (folder / "state").mkdir()
    save_file(tensors, folder / OPTIMIZER_FILE)


def step(module, optimizer, seed):
    torch.manual_seed(seed)
    optimizer.zero_grad()
    module(torch.randn(5, 3)).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("kind", ["adamw", "adam", "adagrad"])
def test_an_optimiser_goes_on_as_if_it_had_not_stopped(tmp_path, kind):
    train = Train(steps=1, optimizer=kind, lr=0.1)
    module, other = linear(1), linear(2)
    optimizer = make_optimizer(module, train)
    for seed in range(3):
        step(module, optimizer, seed)
    save(tmp_path, optimizer_tensors(optimizer, module))
    other.load_state_dict(module.state_dict())
    resumed, fresh = make_optimizer(other, train), linear(3)
    fresh.load_state_dict(module.state_dict())
    load_optimizer(tmp_path, resumed, other, 3)
    forgetful = make_optimizer(fresh, train)
    for seed in range(3, 6):
        step(module, optimizer, seed)
        step(other, resumed, seed)
        step(fresh, forgetful, seed)
    assert equal(module.state_dict(), other.state_dict())
    assert not equal(module.state_dict(), fresh.state_dict()), "the state must matter for this to mean it"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("exp_avg.wieght", torch.ones(3, 3), "exp_avg.wieght: the optimizer has no such state"),
        ("sum.weight", torch.ones(3, 3), "sum.weight: the optimizer has no such state"),
        ("exp_avg.weight", torch.ones(3, 4), r"exp_avg.weight must be \(3, 3\) of torch.float32, but is \(3, 4\)"),
        ("exp_avg.weight", torch.ones(()), r"exp_avg.weight must be \(3, 3\) of torch.float32, but is \(\)"),
        ("exp_avg.weight", torch.ones(3, 3).double(), r"exp_avg.weight must be .* but is \(3, 3\) of torch.float64"),
        ("step.weight", torch.ones(3, 3), r"step.weight must be \(\) of torch.float32, but is \(3, 3\)"),
        ("step.weight", torch.ones((), dtype=torch.int64), r"step.weight must be .* but is \(\) of torch.int64"),
        ("exp_avg.weight", torch.full((3, 3), torch.nan), "exp_avg.weight: 9 of its 9 values are NaN or infinite"),
        ("step.bias", torch.tensor(torch.inf), "step.bias: 1 of its 1 values are NaN or infinite"),
        ("exp_avg_sq.weight", -torch.ones(3, 3), "exp_avg_sq.weight: must not be negative, but is -1"),
        ("exp_avg.weight", None, "lacks exp_avg.weight"),
    ],
)
def test_state_that_does_not_fit_is_refused_by_name(tmp_path, name, value, message):
    module = nn.Linear(3, 3)
    optimizer = make_optimizer(module, Train(steps=1))
    step(module, optimizer, 0)
    tensors = {**optimizer_tensors(optimizer, module), name: value}
    save(tmp_path, {name: value for name, value in tensors.items() if value is not None})
    with pytest.raises(CheckpointError, match=message):
        load_optimizer(tmp_path, make_optimizer(module, Train(steps=1)), module, 1)


def test_no_state_after_a_step_is_refused(tmp_path):
    module = nn.Linear(3, 3)
    save(tmp_path, {})
    load_optimizer(tmp_path, make_optimizer(module, Train(steps=1)), module, 0)
    with pytest.raises(CheckpointError, match="optimizer.safetensors: is empty"):
        load_optimizer(tmp_path, make_optimizer(module, Train(steps=1)), module, 1)
