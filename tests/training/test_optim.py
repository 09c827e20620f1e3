"""Schedules against their formulas, optimisers against torch's own."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from weft.config.sections import Train
from weft.training.optim import clip_gradients, lr_factor, make_optimizer, schedule_uses_budget


def factors(**settings):
    train = Train(**{"steps": 100, **settings})
    return [lr_factor(train, step, step / 100) for step in range(1, 101)]


def test_constant():
    assert set(factors()) == {1.0}


def test_warm_up_rises_in_a_line():
    assert factors(warmup=10)[:12] == pytest.approx([step / 10 for step in range(1, 11)] + [1, 1])


def test_warm_up_as_a_share_of_the_budget():
    assert factors(warmup=0.1) == factors(warmup=10)


def test_linear_falls_to_nothing():
    layer_lr_factors = factors(schedule="warmup-linear", warmup=20)
    assert layer_lr_factors[19] == 1
    assert layer_lr_factors[59] == pytest.approx(0.5)
    assert layer_lr_factors[-1] == 0


def test_cosine_is_half_way_in_the_middle():
    layer_lr_factors = factors(schedule="cosine", warmup=20)
    assert (layer_lr_factors[19], layer_lr_factors[59], layer_lr_factors[-1]) == pytest.approx((1, 0.5, 0))


def test_inverse_square_root_is_vaswanis_up_to_its_peak():
    train = Train(steps=100_000, schedule="inverse-sqrt", warmup=4000)

    def vaswani(step):
        return min(step**-0.5, step * 4000**-1.5)

    for step in (1, 100, 4000, 4001, 90_000):
        assert lr_factor(train, step, step / 100_000) == pytest.approx(vaswani(step) / vaswani(4000))


def test_exponential_ends_at_its_share():
    layer_lr_factors = factors(schedule="exponential", decay=0.04)
    assert layer_lr_factors[49] == pytest.approx(0.2)
    assert layer_lr_factors[-1] == pytest.approx(0.04)


def howard_and_ruder(t, steps, cut_frac, ratio):
    """Return the factor of equation 3 at update t."""
    cut = math.floor(steps * cut_frac)
    p = t / cut if t < cut else 1 - (t - cut) / (cut * (1 / cut_frac - 1))
    return (1 + p * (ratio - 1)) / ratio


@given(st.sampled_from([0.1, 0.2, 0.25, 0.5]), st.floats(1, 100))
def test_slanted_triangular_is_equation_3(cut_frac, ratio):
    ours = factors(schedule="slanted-triangular", warmup=cut_frac, ratio=ratio)
    cut = int(100 * cut_frac)
    assert ours[:cut] == pytest.approx([howard_and_ruder(t, 100, cut_frac, ratio) for t in range(1, cut + 1)])
    # A rate falls by what is spent before an update, in every schedule: one update late.
    fall = [
        lr_factor(Train(steps=100, schedule="slanted-triangular", warmup=cut_frac, ratio=ratio), t + 1, t / 100)
        for t in range(cut, 100)
    ]
    assert fall == pytest.approx([howard_and_ruder(t, 100, cut_frac, ratio) for t in range(cut, 100)])


def test_a_time_budget_has_its_schedule_by_time():
    train = Train(time="100s", schedule="warmup-linear", warmup=0.2)
    assert lr_factor(train, 7, 0.1) == pytest.approx(0.5)
    assert lr_factor(train, 7, 0.6) == pytest.approx(0.5)


schedules = st.sampled_from(
    ["constant", "warmup-linear", "cosine", "inverse-sqrt", "exponential", "slanted-triangular"]
)


@given(schedules, st.floats(0, 300), st.integers(1, 200), st.integers(1, 250))
def test_factors_are_between_nothing_and_one(schedule, warmup, steps, step):
    factor = lr_factor(Train(steps=steps, schedule=schedule, warmup=warmup), step, min(1, step / steps))
    assert 0 <= factor <= 1
    assert math.isfinite(factor)


def test_which_schedules_hang_on_the_budget():
    assert not schedule_uses_budget(Train(steps=1, warmup=10))
    assert schedule_uses_budget(Train(steps=1, warmup=0.1))
    assert schedule_uses_budget(Train(steps=1, schedule="cosine"))
    assert schedule_uses_budget(Train(steps=1, schedule="slanted-triangular"))


@pytest.mark.parametrize("name", ["adamw", "adam", "adagrad", "sgd", "asgd"])
def test_optimisers_step_as_torchs_plain_ones(name):
    torch.manual_seed(0)
    ours, theirs = nn.Linear(4, 3), nn.Linear(4, 3)
    theirs.load_state_dict(ours.state_dict())
    decay = 0.1
    kinds = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "adagrad": torch.optim.Adagrad}
    kind = kinds.get(name, torch.optim.SGD)  # asgd, before it averages
    plain = kind(
        [{"params": [theirs.weight], "weight_decay": decay}, {"params": [theirs.bias], "weight_decay": 0.0}], lr=0.01
    )
    optimizer = make_optimizer(ours, Train(steps=1, optimizer=name, lr=0.01, weight_decay=decay, eval_every=1))
    for _ in range(5):
        inputs = torch.randn(8, 4)
        for module, chosen in ((ours, optimizer), (theirs, plain)):
            chosen.zero_grad()
            module(inputs).square().sum().backward()
            chosen.step()
    assert torch.allclose(ours.weight, theirs.weight, atol=1e-6)
    assert torch.allclose(ours.bias, theirs.bias, atol=1e-6)


def test_clip_scales_only_what_is_too_long():
    weight = nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([3.0, 4.0])
    assert float(clip_gradients([weight], None)) == 5
    assert weight.grad.tolist() == [3, 4]
    assert float(clip_gradients([weight], 1.0)) == 5
    assert weight.grad.tolist() == pytest.approx([0.6, 0.8], abs=1e-5)
