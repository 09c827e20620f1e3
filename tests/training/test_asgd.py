"""Averaged SGD against the mean taken by hand, when it begins, what is judged and saved, and a resume across it all."""

import shutil

import pytest
import torch
from safetensors.torch import load_file
from tests.training.test_trainer import Listener
from torch import nn

import weft
from weft.checkpoint.contents import weights
from weft.config.recipes import read_recipe
from weft.config.run import Run
from weft.config.schema import read_section
from weft.config.sections import Train
from weft.errors import ConfigError
from weft.training.asgd import ASGD, averaged, due, resumed
from weft.training.reporting import Eval, Notice, read_metrics
from weft.training.run import train_run


def make(seed=0):
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    return module, ASGD(module.parameters(), lr=0.5, fused=True)


def learn(module, optimizer, steps, seed=1):
    """Make steps; return the weights after each."""
    draw, iterates = torch.Generator().manual_seed(seed), []
    for _ in range(steps):
        optimizer.zero_grad()
        module(torch.randn(8, 4, generator=draw)).square().sum().backward()
        optimizer.step()
        iterates.append(flat(module))
    return iterates


def flat(module):
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def mean_of(optimizer, module):
    with averaged(optimizer):
        return flat(module)


# The mean.


def test_it_is_the_mean_of_all_iterates_from_its_beginning_on():
    module, optimizer = make()
    before = learn(module, optimizer, 3)
    assert not optimizer.averages
    assert torch.equal(mean_of(optimizer, module), before[-1]), "until then the weights are the last"
    optimizer.begin()
    after = [before[-1], *learn(module, optimizer, 7, seed=2)]
    mean = mean_of(optimizer, module)
    torch.testing.assert_close(mean, torch.stack(after).mean(0))
    for other in (after[1:], [*before, *after[1:]], after[:-1]):  # the negative control: other means are told apart
        assert not torch.allclose(mean, torch.stack(other).mean(0), atol=1e-5)


def test_averaging_does_not_change_the_way_of_the_iterates():
    (plain, first), (module, second) = make(), make()
    second.begin()
    assert all(torch.equal(*pair) for pair in zip(learn(plain, first, 6), learn(module, second, 6), strict=True))


def test_weights_are_swapped_in_and_out_exactly():
    module, optimizer = make()
    optimizer.begin()
    last = learn(module, optimizer, 5)[-1]
    mean = mean_of(optimizer, module)
    assert not torch.equal(mean, last)
    assert torch.equal(flat(module), last)
    with pytest.raises(ZeroDivisionError), averaged(optimizer):
        1 / 0  # noqa: B018
    assert torch.equal(flat(module), last)
    assert torch.equal(mean_of(optimizer, module), mean)


def test_an_update_that_is_held_back_is_not_counted():
    """On a GPU the optimiser is told by `found_inf`, a number on the device, to leave everything as it is."""
    (module, optimizer), (other, twin) = make(), make()
    for optimiser in (optimizer, twin):
        optimiser.begin()
    learn(module, optimizer, 4)
    learn(other, twin, 4)
    last, mean = flat(module), mean_of(optimizer, module)
    optimizer.found_inf = torch.ones(())
    learn(module, optimizer, 3, seed=5)
    assert torch.equal(flat(module), last)
    assert torch.equal(mean_of(optimizer, module), mean)
    optimizer.found_inf = torch.zeros(())
    learn(module, optimizer, 2, seed=9)
    learn(other, twin, 2, seed=9)
    assert torch.equal(mean_of(optimizer, module), mean_of(twin, other))


def test_it_begins_once_after_so_many_evaluations_without_a_better_one():
    module, optimizer = make()
    assert [due(optimizer, stale, 3) for stale in range(6)] == [False, False, False, True, True, True]
    assert not due(torch.optim.SGD(module.parameters(), lr=1.0), 9, 3)
    optimizer.begin()
    assert not due(optimizer, 9, 3)


# In a training.

SETTINGS = [
    "train.optimizer=asgd",
    "train.lr=2.0",
    "train.metric=loss",
    "train.eval_every=2",
    "train.asgd_after=2",
    "train.keep=20",
    "task.decode.max_length=2",  # evaluations are most of the time
]
STEPS = 26


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the recipe, the directory and the reports of a run in which averaging begins; not to be changed."""
    from tests.conftest import recipe_for, write_pairs

    folder, listener = tmp_path_factory.mktemp("averaged"), Listener()
    recipe = recipe_for(write_pairs(folder / "pairs.tsv"))
    recipe["train"]["batch_tokens"] = 60
    weft.train(recipe, [*SETTINGS, f"train.steps={STEPS}"], folder / "run", report=listener)
    return recipe, folder / "run", listener


def began(listener):
    (notice,) = [record.text for record in listener.of(Notice) if "averaged" in record.text]
    return int(notice.split("from step ")[1].split()[0])


def checkpoint(run, step):
    return run / "checkpoints" / f"step-{step:08d}"


def test_it_begins_where_evaluations_go_stale(whole):
    _, _, listener = whole
    is_best = [record.best for record in listener.of(Eval)]
    stale, first = 0, None
    for number, better in enumerate(is_best, start=1):
        stale = 0 if better else stale + 1
        if stale >= 2:
            first = 2 * number
            break
    assert first is not None
    assert began(listener) == first
    assert first < STEPS - 6, "there must be something to average for these tests to mean anything"


def test_what_is_judged_and_saved_is_the_mean(whole):
    """By hand: from the iterates that the optimiser's state has."""
    recipe, run, listener = whole
    step, checkpoints = began(listener), sorted((run / "checkpoints").iterdir())
    assert checkpoints[-1] == checkpoint(run, STEPS)
    raw = load_file(checkpoints[-1] / "state" / "optimizer.safetensors")
    mean = load_file(checkpoints[-1] / "model.safetensors")
    assert {float(raw[f"averaged.{name}"]) for name in mean} == {STEPS - step + 1}
    iterates, plain = every_iterate(recipe, run, step, run.parent / "plain")
    for name, value in mean.items():
        torch.testing.assert_close(
            value, torch.stack([iterate[name] for iterate in iterates]).mean(0), rtol=1e-5, atol=1e-6
        )
        assert torch.equal(raw[f"aside.{name}"], plain[name])
    assert any(not torch.equal(raw[f"aside.{name}"], value) for name, value in mean.items())
    at_end = read_metrics(run / "metrics.jsonl")[-1]["valid"]["loss"]
    assert weft.load(checkpoints[-1]).evaluate()["loss"] == pytest.approx(at_end, rel=1e-5)


def every_iterate(recipe, run, step, folder):
    """Train the same with plain SGD, a checkpoint at each step; return the weights from `step` on, and the last."""
    changes = [setting for setting in SETTINGS if "asgd" not in setting]
    changes += ["train.optimizer=sgd", "train.save_every=1", "train.keep=99", f"train.steps={STEPS}"]
    weft.train(recipe, changes, folder)
    iterates = [load_file(checkpoint(folder, number) / "model.safetensors") for number in range(step, STEPS + 1)]
    return iterates, iterates[-1]


@pytest.mark.parametrize("ahead", [-2, 0, 2, 4])
def test_a_resume_before_at_and_after_the_beginning_is_exact(whole, tmp_path, ahead):
    recipe, run, listener = whole
    step, again = began(listener) + ahead, tmp_path / "again"
    settings = Run.parse(read_recipe(recipe, [*SETTINGS, f"train.steps={STEPS}"]))
    shutil.copytree(run, again, symlinks=True)
    for folder in (again / "checkpoints").iterdir():
        if folder.name > checkpoint(again, step).name:
            shutil.rmtree(folder)
    for name in ("last", "best"):
        (again / name).unlink()
    (again / "last").symlink_to(checkpoint(again, step).relative_to(again))
    later = Listener()
    train_run(settings, again, resume=True, report=later)
    assert losses(again) == losses(run)
    for name in ("model.safetensors", "state/optimizer.safetensors"):
        ours, theirs = (load_file(checkpoint(folder, STEPS) / name) for folder in (again, run))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert any("averaged" in record.text for record in later.of(Notice)) is (ahead < 0)


def losses(run):
    return [(row["step"], row["loss"], row.get("valid")) for row in read_metrics(run / "metrics.jsonl")]


def test_to_go_on_from_the_mean_would_be_another_run():
    """The negative control of a resume."""
    module, optimizer = make()
    optimizer.begin()
    learn(module, optimizer, 4)
    with averaged(optimizer):
        saved, state = weights(module), {key: dict(value) for key, value in optimizer.state.items()}
        saved = {name: value.clone() for name, value in saved.items()}
        state = {key: {name: tensor.clone() for name, tensor in value.items()} for key, value in state.items()}
    must = (learn(module, optimizer, 3, seed=8)[-1], mean_of(optimizer, module))
    for goes_on in (True, False):
        with torch.no_grad():
            for name, value in module.named_parameters():
                value.copy_(saved[name])
        for key, value in state.items():
            optimizer.state[key] = {name: tensor.clone() for name, tensor in value.items()}
        if goes_on:
            resumed(optimizer)
        got = (learn(module, optimizer, 3, seed=8)[-1], mean_of(optimizer, module))
        assert all(torch.equal(*pair) for pair in zip(got, must, strict=True)) is goes_on


def test_it_needs_evaluations():
    with pytest.raises(ConfigError, match="train: optimizer asgd starts averaging by the results of evaluations"):
        read_section(Train, {"steps": 1, "optimizer": "asgd"}, "train")
    assert read_section(Train, {"steps": 1, "optimizer": "asgd", "eval_every": 1}, "train").asgd_after == 5


def test_it_needs_validation_data(recipe, tmp_path):
    recipe["data"].pop("valid")
    with pytest.raises(ConfigError, match=r"train\.optimizer: asgd .* no validation data; give data\.valid, or take"):
        weft.train(recipe, ["train.optimizer=asgd", "train.eval_every=2"], tmp_path / "run")
    weft.train(recipe, ["train.optimizer=sgd", "train.steps=2"], tmp_path / "plain")


def test_plain_sgd_goes_on_from_a_checkpoint_though_it_has_no_state(recipe, tmp_path):
    changes = ["train.optimizer=sgd", "train.lr=0.5", "train.eval_every=3"]
    whole = weft.train(recipe, [*changes, "train.steps=6"], tmp_path / "whole")
    weft.train(recipe, [*changes, "train.steps=3"], tmp_path / "parts")
    on = weft.train(recipe, [*changes, "train.steps=6"], tmp_path / "parts", resume=True)
    assert torch.equal(flat(on.head), flat(whole.head))
