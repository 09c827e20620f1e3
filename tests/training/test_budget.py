"""Epochs as a budget: exactly so many passes over the data, in any number of steps, and evaluations that go by them."""

from collections import Counter

import pytest
from tests.training.test_trainer import Listener, trainer_for

import weft
from weft.checkpoint.contents import Progress
from weft.config.recipes import read_recipe
from weft.config.run import Run
from weft.config.sections import Train
from weft.data.batching.loader import Loader, Position
from weft.data.batching.packed_items import pack
from weft.training.budget import batches_read, epoch_batches, resolve_budget
from weft.training.reporting import CheckpointSaved, Eval, read_metrics
from weft.training.run import train_run

SIZES = [3, 9, 4, 1, 7, 7, 2, 8, 5, 6] * 6


def loader_for(rank=0, world=1, budget=13, unit="tokens", sizes=SIZES * 10):
    packed = pack(([0] * size,) for size in sizes)
    return Loader(packed, lambda items, rng: len(items), budget, 7, rank, world, unit=unit)


def resolved(loader, progress=None, processes=1, evaluates=False, **keys):
    return resolve_budget(Train(**keys), loader, progress or Progress(), processes, evaluates)


def test_the_batches_of_epochs_differ_so_one_epoch_times_n_would_be_wrong():
    loader = loader_for()
    assert len({loader.num_batches(epoch) for epoch in range(8)}) > 1
    assert epoch_batches(loader, 8) != 8 * loader.num_batches(0)


@pytest.mark.parametrize(("processes", "accumulate"), [(1, 1), (2, 2), (1, 3), (2, 4)])
def test_so_many_passes_are_read_however_a_step_is_made_up(processes, accumulate):
    loaders = [loader_for(rank, processes) for rank in range(processes)]
    steps = resolved(loaders[0], processes=processes, epochs=3, accumulate=accumulate).steps
    read = []
    for loader in loaders:
        indices = loader.batch_indices(Position())
        read += [next(indices) for _ in range(steps * accumulate // processes)]
    times = Counter(item for index in read if index.position.epoch < 3 for item in index.items.tolist())
    assert set(times.values()) == {3}
    assert len(times) == len(SIZES * 10)
    assert len(read) - epoch_batches(loaders[0], 3) < accumulate, "not a step more than that takes"


@pytest.mark.parametrize(("epochs", "batches"), [(0.5, 8), (1, 15), (1.1, 17), (2, 30)])
def test_a_share_of_an_epoch_is_a_share_of_its_batches(epochs, batches):
    loader = loader_for(budget=4, unit="items", sizes=SIZES)
    assert loader.num_batches(0) == loader.num_batches(5) == 15
    assert epoch_batches(loader, epochs) == batches


def test_the_steps_are_the_same_wherever_a_run_resumes():
    loader = loader_for()
    steps = resolved(loader, epochs=4, accumulate=2).steps
    indices = loader.batch_indices(Position())
    for step in range(1, steps + 5):
        position = [next(indices) for _ in range(2)][-1].after
        progress = Progress(step=step, position=position)
        assert batches_read(loader, progress) == 2 * step
        assert resolved(loader, progress, epochs=4, accumulate=2).steps == steps


def test_with_more_processes_the_rest_takes_fewer_steps():
    loader = loader_for(budget=4, unit="items", sizes=SIZES)
    progress = Progress(step=10, position=Position(0, 10))
    assert resolved(loader, progress, epochs=2).steps == 30
    assert resolved(loader, progress, processes=2, epochs=2).steps == 20


def test_of_steps_and_epochs_the_smaller_counts():
    loader = loader_for(budget=4, unit="items", sizes=SIZES)
    assert resolved(loader, epochs=2, steps=7).steps == 7
    assert resolved(loader, epochs=2, steps=99).steps == 30


@pytest.mark.parametrize(
    ("keys", "every"),
    [
        ({"epochs": 1}, 2),  # 15 steps: ten times would be every other one
        ({"epochs": 2}, "epoch"),
        ({"epochs": 10}, "epoch"),
        ({"epochs": 40}, 60),
        ({"steps": 45}, "epoch"),
        ({"steps": 45, "eval_every": 7}, 7),
        ({"epochs": 40, "report_every": 50}, 100),  # with a report
        ({"time": 60}, None),  # by its share
        ({"epochs": 3, "time": 60}, None),
    ],
)
def test_where_nothing_is_said_evaluations_are_each_epoch_or_ten(keys, every):
    loader = loader_for(budget=4, unit="items", sizes=SIZES)
    assert resolved(loader, evaluates=True, **{"report_every": 2, **keys}).eval_every == every
    assert resolved(loader, evaluates=False, **keys).eval_every == keys.get("eval_every")


# Whole trainings.


def losses(folder):
    return [(row["step"], row["loss"], row["lr"]) for row in read_metrics(folder / "metrics.jsonl")]


LINEAR = ["train.schedule=warmup-linear", "train.warmup=0.2"]


def test_epochs_are_the_steps_that_they_take_bit_for_bit(recipe, tmp_path):
    steps = trainer_for(recipe, "train.steps=null", "train.epochs=3").train.steps
    assert 9 < steps < 18
    for name, change in (("epochs", ["train.steps=null", "train.epochs=3"]), ("steps", [f"train.steps={steps}"])):
        weft.train(recipe, [*LINEAR, *change], tmp_path / name)
    assert losses(tmp_path / "epochs") == losses(tmp_path / "steps")
    assert losses(tmp_path / "epochs")[-1][0] == steps
    assert losses(tmp_path / "epochs")[-1][2] < 0.2 * recipe["train"]["lr"], "the decay ends with the budget"
    assert "steps" not in weft.load(tmp_path / "epochs").run.dump()["train"], "run.yaml has what was asked for"


class Stop(Listener):
    """Stops a run at a step, as a kill would."""

    def __call__(self, record):
        super().__call__(record)
        if isinstance(record, CheckpointSaved) and record.step == 6:
            raise KeyboardInterrupt


def test_a_run_of_epochs_resumes_exactly(recipe, tmp_path):
    changes = [*LINEAR, "train.steps=null", "train.epochs=3", "train.save_every=6"]
    weft.train(recipe, changes, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        weft.train(recipe, changes, tmp_path / "broken", report=Stop())
    weft.train(recipe, changes, tmp_path / "broken", resume=True)
    assert losses(tmp_path / "broken") == losses(tmp_path / "whole")
    for name in ("last", "best"):
        ours, theirs = ((tmp_path / run / name / "model.safetensors").read_bytes() for run in ("broken", "whole"))
        assert ours == theirs


def test_evaluations_and_checkpoints_each_epoch(recipe, tmp_path):
    listener = Listener()
    changes = ["train.steps=null", "train.epochs=3", "train.accumulate=3", "train.save_every=epoch"]
    run = Run.parse(read_recipe(recipe, [*changes, "train.eval_every=epoch"]))
    train_run(run, tmp_path / "run", report=listener)
    loader = trainer_for(recipe).loader
    ends = [-(-epoch_batches(loader, epoch) // 3) for epoch in (1, 2, 3)]
    assert [record.step for record in listener.of(Eval)] == ends
    assert [record.step for record in listener.of(CheckpointSaved)] == [0, *ends]


def test_by_time_it_is_evaluated_at_each_tenth(recipe, tmp_path):
    listener = Listener()
    weft.train(recipe, ["train.steps=null", "train.time=1s"], tmp_path / "run", report=listener)
    spent = [row["spent"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if "valid" in row]
    assert 2 <= len(spent) <= 10
    assert len({int(10 * share) for share in spent}) == len(spent), "at most once a tenth"


def test_the_averaged_checkpoints_may_be_those_of_epochs(recipe, tmp_path):
    changes = ["train.steps=null", "train.epochs=4", "train.save_every=epoch", "train.average=3", "train.lr=1"]
    listener = Listener()
    weft.train(recipe, changes, tmp_path / "run", report=listener)
    assert any("the average of the last 3 checkpoints" in record.text for record in listener.records[-1:])


def test_a_batch_of_so_many_items_is_still_of_like_lengths():
    loader = loader_for(budget=4, unit="items", sizes=SIZES)
    batches = loader.epoch(0)
    assert {len(batch) for batch in batches} == {4}
    spread = [max(SIZES[item] for item in batch) - min(SIZES[item] for item in batch) for batch in batches]
    assert sum(spread) / len(spread) < 2, "9 - 1 = 8 at random"


def test_batch_size_takes_the_place_of_batch_tokens(recipe, tmp_path):
    changes = ["train.batch_tokens=null", "train.batch_size=7", "train.steps=null", "train.epochs=1"]
    trained = train_run(Run.parse(read_recipe(recipe, changes)), tmp_path / "run")
    assert trained.progress.step == 9  # of 60 items
    saved = weft.load(tmp_path / "run").run.train
    assert (saved.batch_size, saved.batch_tokens) == (7, None)
