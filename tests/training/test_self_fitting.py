import json

import pytest
import torch

import weft
from weft.errors import ConfigError

TEXT = "a b a c\nb a\nc c a\n"


def recipe(folder, **model):
    (folder / "a.txt").write_text(TEXT)
    return {
        "task": {"name": "lm"},
        "data": {"train": str(folder / "a.txt"), "valid": str(folder / "a.txt")},
        "tokenizer": {"name": "words"},
        "model": {"name": "tests.fitted:Unigram", **model},
        "train": {"steps": 3},
    }


def test_a_fit_leaves_what_a_training_leaves(tmp_path):
    pipeline = weft.train(recipe(tmp_path), out=tmp_path / "run")
    assert float(pipeline.head.body.counts.sum()) == len(pipeline.tokenizer) + 3 * (9 + 3)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "tokens_per_s" in row][-1] == 3
    for name in ("best", "last"):
        again = weft.load(tmp_path / "run" / name, "cpu", trust=True)
        assert torch.equal(again.head.body.counts, pipeline.head.body.counts)
    assert again.evaluate() == pipeline.evaluate()


def test_a_fit_that_is_gone_on_with_makes_the_passes_that_are_left(tmp_path):
    whole = weft.train(recipe(tmp_path), out=tmp_path / "whole")
    first = {**recipe(tmp_path), "train": {"steps": 1}}
    weft.train(first, out=tmp_path / "run")
    on = weft.train(recipe(tmp_path), out=tmp_path / "run", resume=True)
    assert torch.equal(on.head.body.counts, whole.head.body.counts)
    again = weft.train(recipe(tmp_path), out=tmp_path / "run", resume=True)  # nothing is left to do
    assert torch.equal(again.head.body.counts, whole.head.body.counts)


def test_a_fit_goes_on_by_more_time_alone_where_its_time_is_spent(tmp_path):
    def timed_recipe(**train):
        return {**recipe(tmp_path, seconds=0.05), "train": train}

    first = weft.train(timed_recipe(steps=1000, time=0.1), out=tmp_path / "run").head.body.counts.clone()
    again = weft.train(timed_recipe(steps=1000, time=0.1), out=tmp_path / "run", resume=True).head.body.counts
    assert torch.equal(again, first)  # there are passes left, but no time
    more = weft.train(timed_recipe(steps=1000, time=10), ["train.time=0.4"], out=tmp_path / "run", resume=True)
    assert float(more.head.body.counts.sum()) > float(first.sum())


def test_documents_in_two_copies_are_not_fitted_to(tmp_path):
    with pytest.raises(ConfigError, match="task.sequences: .* is fitted to the stream"):
        weft.train({**recipe(tmp_path), "task": {"name": "lm", "sequences": "documents"}}, out=tmp_path / "run")


def test_a_fit_that_breaks_off_keeps_its_last_whole_pass(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        weft.train(recipe(tmp_path, stop_after=2), out=tmp_path / "run")
    left = weft.load(tmp_path / "run" / "last", "cpu", trust=True)
    assert float(left.head.body.counts.sum()) == len(left.tokenizer) + 2 * (9 + 3)


@pytest.mark.parametrize("key", ["average", "patience", "flops"])
def test_what_makes_no_sense_for_a_fit_is_refused(tmp_path, key):
    raw = recipe(tmp_path)
    raw["train"][key] = 2
    with pytest.raises(ConfigError, match=f"train.{key}: .* is fitted, not trained"):
        weft.train(raw, out=tmp_path / "run")


def test_a_plan_is_refused(tmp_path):
    from weft.config.run import Run
    from weft.training.estimate import estimate_run

    with pytest.raises(ConfigError, match="--plan: measures updates"):
        estimate_run(Run.parse(recipe(tmp_path)), print)


def test_epochs_are_whole_passes(tmp_path):
    recipe = {"task": {"name": "lm"}, "data": {"sample": "pydoc"}, "tokenizer": {"name": "words"}}
    recipe |= {"model": {"name": "ngram"}, "train": {"epochs": 1.5}}
    message = "train.epochs: 'ngram' is fitted in whole passes over the data, but is 1.5 instead; try 2"
    with pytest.raises(weft.ConfigError, match=message):
        weft.train(recipe, [], tmp_path / "refused")
    weft.train(recipe, ["train.epochs=1"], tmp_path / "run")
    assert (tmp_path / "run/last").readlink().name.startswith("step-00000001")
