"""`weft average`; what `weft convert` makes is looked at in tests/conversion."""

from tests.cli.conftest import good, refused


def test_average(run, recipe_file, tmp_path):
    folder = tmp_path / "run"
    changes = ["train.save_every=2", "train.steps=6", "train.average=3", "data.valid=null"]
    done = good(run("train", recipe_file, *changes, "--out", folder))
    assert "the average of the last 3 checkpoints is the best model" in done.err
    done = good(run("average", folder, "--last", 2, "--out", tmp_path / "mean"))
    assert done.out == f"{tmp_path / 'mean'}: the mean of step-00000004, step-00000006\n"
    assert len(good(run("predict", tmp_path / "mean", "abc")).lines) == 1
    refused(run("average", folder, "--last", 2, "--out", tmp_path / "mean"), "mean: exists already")
    refused(run("average", folder, "--out", tmp_path / "five"), "its last 5 checkpoints", "it has step-00000002, ")
    refused(run("average", folder / "last", "--out", tmp_path / "one"), "name two checkpoints or more, or a run")
