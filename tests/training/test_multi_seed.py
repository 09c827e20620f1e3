"""Several seeds: each as if it were alone, the best found again from outside, and what a stop in between changes."""

import json
import statistics

import pytest
import torch
from safetensors.torch import load_file
from tests.training.test_distributed import FORKED, two_processes
from tests.training.test_finetuning import reviews
from tests.training.test_trainer import Listener
from typer.testing import CliRunner

import weft
from weft.cli.main import app
from weft.config.yaml import read_yaml
from weft.training.multi_seed import SeedRun, SeedRuns, read_seeds
from weft.training.reporting import Notice, Step, read_metrics

THREE = ["train.seeds=3", "train.seed=5", "train.steps=6", "train.eval_every=3", "task.decode.max_length=6"]
ONE = THREE[2:]


def weights(folder):
    return load_file(folder / "model.safetensors")


def same(actual, expected):
    ours, theirs = weights(actual), weights(expected)
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the recipe, the directory and the best model of three trainings; not to be changed."""
    from tests.conftest import recipe_for, write_pairs

    folder = tmp_path_factory.mktemp("seeds")
    recipe = recipe_for(write_pairs(folder / "pairs.tsv"))
    return recipe, folder / "run", weft.train(recipe, THREE, folder / "run")


def test_each_is_the_training_that_it_would_be_alone(whole, tmp_path):
    recipe, run, _ = whole
    for number in range(3):
        weft.train(recipe, [*ONE, f"train.seed={5 + number}"], tmp_path / str(number))
        for link in ("last", "best"):
            assert same(run / f"seed-{number + 1}" / link, tmp_path / str(number) / link)
    assert not same(run / "seed-1" / "last", run / "seed-2" / "last"), "the negative control: seeds differ"
    assert sorted(path.name for path in run.iterdir()) == [
        *("best", "last", "lock", "metrics.jsonl", "run.yaml"),
        *("seed-1", "seed-2", "seed-3", "seeds.json"),
    ]


def test_the_best_by_validation_is_that_of_the_directory(whole):
    _, run, pipeline = whole
    seeds_read = read_seeds(run)
    rows = [read_metrics(run / f"seed-{number}" / "metrics.jsonl") for number in (1, 2, 3)]
    valid = [[row["valid"] for row in some if "valid" in row] for some in rows]
    judged = [min((-metrics["exact_match"], metrics["loss"]) for metrics in some) for some in valid]
    best = judged.index(min(judged)) + 1
    assert seeds_read.best == f"seed-{best}"
    assert len(set(judged)) == 3
    assert same(run / "best", run / f"seed-{best}" / "best")
    assert same(run / "last", run / f"seed-{best}" / "last")
    assert read_metrics(run / "metrics.jsonl") == rows[best - 1]
    assert pipeline.run.train.seed == 4 + best
    loaded = weft.load(run, device="cpu")
    assert loaded(["abcde"]) == pipeline(["abcde"])
    assert read_yaml((run / "run.yaml").read_text(), "run.yaml")["train"]["seeds"] == 3


def test_the_table_has_the_mean_and_the_deviation(whole):
    _, run, pipeline = whole
    seeds_read, written = read_seeds(run), json.loads((run / "seeds.json").read_text())
    losses = [seed_run.metrics["loss"] for seed_run in seeds_read.runs]
    assert pipeline.evaluate()["loss"] == losses[int(seeds_read.best[-1]) - 1]
    assert seeds_read.mean()["loss"] == pytest.approx(statistics.mean(losses))
    assert seeds_read.deviation()["loss"] == pytest.approx(statistics.stdev(losses))
    assert written["mean"] == seeds_read.mean()
    assert written["std"] == seeds_read.deviation()
    assert [seed_run["seed"] for seed_run in written["runs"]] == [5, 6, 7]
    headers, rows = seeds_read.table()
    assert [row[0].removesuffix(" (best)") for row in rows] == ["5", "6", "7", "mean ± std"]
    assert rows[int(seeds_read.best[-1]) - 1][0].endswith(" (best)")
    at = headers.index("loss")
    assert rows[-1][at] == f"{statistics.mean(losses):.4f} ± {statistics.stdev(losses):.4f}"


class StopError(Exception):
    pass


class Stopper(Listener):
    """Stop where the second training has come to a step."""

    def __call__(self, record):
        super().__call__(record)
        begun = sum("train.seeds: " in record.text for record in self.of(Notice))
        if begun == 2 and isinstance(record, Step) and record.step == 4:
            raise StopError


def test_a_resume_goes_on_where_it_stopped_and_trains_nothing_twice(whole, tmp_path):
    recipe, run, _ = whole
    with pytest.raises(StopError):
        weft.train(recipe, THREE, tmp_path / "run", report=Stopper())
    assert read_seeds(tmp_path / "run").best == "seed-1"
    assert weft.load(tmp_path / "run", device="cpu").run.train.seed == 5, "the best so far"
    before = (tmp_path / "run" / "seed-1" / "last" / "model.safetensors").stat().st_mtime_ns
    listener = Listener()
    weft.train(recipe, THREE, tmp_path / "run", resume=True, report=listener)
    assert (tmp_path / "run" / "seed-1" / "last" / "model.safetensors").stat().st_mtime_ns == before
    assert [record.step for record in listener.of(Step)] == [4, 6, 2, 3, 4, 6]
    for number in (1, 2, 3):
        assert same(tmp_path / "run" / f"seed-{number}" / "last", run / f"seed-{number}" / "last")
    assert read_seeds(tmp_path / "run") == read_seeds(run)


def test_more_seeds_go_on_with_those_that_were_trained(whole, tmp_path):
    recipe, run, _ = whole
    weft.train(recipe, [*THREE, "train.seeds=2"], tmp_path / "run")
    listener = Listener()
    weft.train(recipe, THREE, tmp_path / "run", resume=True, report=listener)
    assert [record.step for record in listener.of(Step)] == [2, 3, 4, 6]
    assert read_seeds(tmp_path / "run") == read_seeds(run)


def test_a_directory_that_is_in_use_is_refused(whole, tmp_path):
    recipe, run, _ = whole
    with pytest.raises(weft.CheckpointError, match="seed-1: holds a run already; go on with it by --resume"):
        weft.train(recipe, THREE, run)
    for resume in (False, True):
        with pytest.raises(weft.CheckpointError, match="holds trainings of several seeds, such as seed-1; go on with"):
            weft.train(recipe, ONE, run, resume=resume)
    weft.train(recipe, ["train.steps=1"], tmp_path / "one")
    for resume in (False, True):
        with pytest.raises(weft.CheckpointError, match="one: holds a run of one seed; choose another --out, or leave"):
            weft.train(recipe, THREE, tmp_path / "one", resume=resume)


def test_another_recipe_is_refused_on_resume(whole):
    recipe, run, _ = whole
    with pytest.raises(weft.CheckpointError, match="seed-1.*the recipe has changed.*train.lr was 0.01 and is 0.5 now"):
        weft.train(recipe, [*THREE, "train.lr=0.5"], run, resume=True)


def test_mistakes_are_told_before_anything_is_written(recipe, tmp_path):
    with pytest.raises(weft.ConfigError, match="train.seeds: 3 from train.seed=4294967294 on are more than there are"):
        weft.train(recipe, ["train.seeds=3", "train.seed=4294967294"], tmp_path / "run")
    with pytest.raises(weft.ConfigError, match="train.metric: the task has no metric"):
        weft.train(recipe, ["train.seeds=3", "train.metric=taste"], tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_patience_ends_each_on_its_own(recipe, tmp_path):
    changes = ["train.seeds=2", "train.steps=50", "train.eval_every=1", "train.patience=2", "train.lr=1e-9"]
    weft.train(recipe, [*changes, "task.decode.max_length=2"], tmp_path / "run")
    ends = [read_metrics(tmp_path / "run" / f"seed-{number}" / "metrics.jsonl")[-1]["step"] for number in (1, 2)]
    assert max(ends) < 50


def test_where_there_is_nothing_to_judge_by_the_first_is_taken_and_it_is_told(recipe, tmp_path):
    del recipe["data"]["valid"]
    listener = Listener()
    pipeline = weft.train(recipe, ["train.seeds=2", "train.steps=2"], tmp_path / "run", report=listener)
    assert pipeline.run.train.seed == 1
    assert any("no validation data to judge by" in record.text for record in listener.of(Notice))
    assert read_seeds(tmp_path / "run").mean() == {}
    assert weft.load(tmp_path / "run").run.train.seed == 1


def test_the_command_line_prints_the_table(recipe_file, tmp_path):
    arguments = ["train", str(recipe_file), "train.seeds=2", "train.steps=3", "--out", str(tmp_path / "run")]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert "mean ± std" in done.stdout
    assert done.stdout.count("(best)") == 1
    assert f"weft predict {tmp_path / 'run'}" in done.stderr
    answered = CliRunner().invoke(app, ["predict", str(tmp_path / "run"), "abcde"])
    assert answered.exit_code == 0, answered.output


def test_a_plan_is_of_all_of_them(recipe_file):
    done = CliRunner().invoke(app, ["train", str(recipe_file), "train.seeds=4", "--plan"])
    assert "4 trainings, one after the other" in done.stdout


def test_two_processes_train_them_one_after_the_other(tmp_path):
    """With frozen groups, too, which they do not exchange."""
    recipe = reviews(tmp_path, seeds=2, freeze=2, layer_decay=0.7, batch_tokens=60, report_every=4)
    recipe["model"]["dropout"] = recipe["task"]["dropout"] = 0
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    done = two_processes(FORKED, "train", tmp_path / "recipe.yaml", "--out", tmp_path / "two")
    assert done.stdout.count("mean ± std") == 1
    weft.train(recipe, ["train.accumulate=2"], tmp_path / "one")
    for number in (1, 2):
        ours, theirs = (weights(tmp_path / name / f"seed-{number}" / "last") for name in ("two", "one"))
        assert all(torch.allclose(ours[name], theirs[name], atol=1e-4) for name in ours)
        assert torch.equal(ours["body.embed.weight"], theirs["body.embed.weight"])


# The figures.


def seeds(*values):
    return SeedRuns(
        "loss", "seed-1", [SeedRun(at, f"seed-{at}", {"loss": value}) for at, value in enumerate(values, 1)]
    )


def test_of_one_there_is_no_deviation_and_what_is_no_number_stays_none():
    assert seeds(2.0).table()[1][-1] == ["mean ± std", "2.0000 ± nan"]
    assert seeds(2.0).table("yes")[0] == ["seed", "loss"]
    assert SeedRuns("f1", "seed-1", [SeedRun(1, "seed-1", {"f1": 1.0})]).table("yes")[0] == ["seed", "f1 (yes)"]
    written = json.loads(seeds(2.0, None).text())
    assert written["mean"] == written["std"] == {"loss": None}
    assert json.loads(seeds(1.0, 2.0).text())["std"]["loss"] == pytest.approx(0.5**0.5)


def test_a_damaged_file_is_refused_and_one_of_what_is_gone_is_passed_over(tmp_path):
    (tmp_path / "seeds.json").write_text(seeds(1.0).text())
    assert read_seeds(tmp_path) is None
    (tmp_path / "seed-1").mkdir()
    assert read_seeds(tmp_path) == seeds(1.0)
    for text in ("{", '{"metric": "loss", "best": "seed-1", "runs": [1]}', "[]", '{"best": "seed-1"}'):
        (tmp_path / "seeds.json").write_text(text)
        with pytest.raises(weft.CheckpointError, match="seeds.json: cannot be read: .*; delete it, and run again"):
            read_seeds(tmp_path)
    assert read_seeds(tmp_path / "nowhere") is None
