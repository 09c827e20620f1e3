"""Updates that the device decides, and that the CPU hears of one step late: nothing else may differ."""

import pytest
import torch
from tests.training.test_trainer import poisoned, trainer_for

import weft
from weft.training.reporting import Notice, Step

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"))]


def ready(recipe, late, device, *overrides):
    trainer = trainer_for(recipe, "model.dropout=0", *overrides, device=device)
    trainer._late = late
    return trainer


def trained(recipe, late, device, bad, *overrides):
    trainer = poisoned(ready(recipe, late, device, *overrides), set(bad))
    trainer.fit()
    return trainer


def numbers(trainer):
    """What a training is judged by, but for its speed."""
    steps = [
        (record.step, record.loss, record.lr, record.grad_norm, record.epoch) for record in trainer.report.of(Step)
    ]
    return steps, trainer.report.of(Notice), trainer.progress.bad_steps, trainer.progress.position


def weights(trainer):
    return torch.cat([parameter.detach().flatten() for parameter in trainer.head.parameters()])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [(), (3,), (1, 6, 12)])
def test_a_training_that_looks_late_is_the_same(recipe, device, bad):
    soon, late = (trained(recipe, when, device, bad) for when in (False, True))
    assert numbers(late) == numbers(soon)
    assert torch.equal(weights(late), weights(soon))
    assert late.progress.bad_steps == len(bad)
    assert {float(state["step"]) for state in late.optimizer.state.values()} == {12.0 - len(bad)}
    if bad:  # the negative control: it was felt that some were not made
        assert not torch.equal(weights(late), weights(trained(recipe, True, device, ())))


@pytest.mark.parametrize("device", DEVICES)
def test_too_many_bad_updates_stop_it_one_step_late(recipe, device):
    trainer = poisoned(ready(recipe, True, device, "train.steps=50", "train.bad_steps=3"), set(range(4, 50)))
    trainer.train = trainer.train.model_copy(update={"report_every": 50})
    with pytest.raises(weft.TrainingError, match=r"step 6: .*3 updates were skipped"):
        trainer.fit()
    assert trainer.progress.step == 7


@pytest.mark.parametrize("device", DEVICES)
def test_a_report_knows_of_its_own_step(recipe, device):
    trainer = trained(recipe, True, device, (4,), "train.steps=8", "train.report_every=4")
    kinds = [type(record) for record in trainer.report.records if isinstance(record, Notice | Step)]
    assert kinds == [Notice, Step, Step]
    assert trainer.report.of(Step)[0].loss == pytest.approx(sum(first_losses(recipe, device)) / 3, rel=1e-6)


def first_losses(recipe, device):
    return [
        record.loss
        for record in trained(recipe, False, device, (), "train.steps=3", "train.report_every=1").report.of(Step)
    ]


@pytest.mark.parametrize("device", DEVICES)
def test_a_checkpoint_waits_for_what_it_saves(recipe, device):
    trainer = ready(recipe, True, device, "train.report_every=9")
    batches = trainer.loader.stream()
    for _ in range(3):
        trainer.update(batches)
    assert trainer.progress.loss_steps == 2  # of the third, nobody has heard
    trainer.save()
    assert trainer.progress.loss_steps == 3
