"""Task and head from a recipe; mismatches raise before any data is read."""

import sys

import pytest

from weft.config.recipes import read_recipe
from weft.config.run import Run
from weft.errors import ConfigError, RoleError
from weft.models.seq2seq.model import Seq2Seq
from weft.tasks.factory import build, make_task
from weft.tasks.prepare import fit_tokenizer
from weft.tasks.translate import Translate, TranslateHead


def built(recipe, *overrides):
    run = Run.parse(read_recipe(recipe, overrides))
    return build(run, fit_tokenizer(run.tokenizer, run.data, make_task(run)))


def test_the_parts_are_those_that_the_recipe_names(recipe):
    task, head = built(recipe, "model.width=24", "task.label_smoothing=0.1")
    assert isinstance(task, Translate)
    assert isinstance(head, TranslateHead)
    assert isinstance(head.body, Seq2Seq)
    assert head.body.config.width == 24
    assert head.label_smoothing == 0.1
    assert head.eos == task.tokenizer.specials.eos


def test_one_vocabulary_has_one_matrix(recipe):
    task, head = built(recipe)
    assert task.tokenizer.target is task.tokenizer
    assert head.body.encoder.embed.weight is head.body.decoder.embed.weight
    assert len(head.body.decoder.output.weight) == len(task.tokenizer)


def test_two_vocabularies_have_two(recipe, pairs_file):
    lines = pairs_file.read_text().splitlines()
    pairs_file.write_text("".join(f"{line.upper()} zz\t{line.lower()}\n" for line, _ in (x.split("\t") for x in lines)))
    task, head = built(recipe, "tokenizer.target={name: characters}")
    sizes = len(task.tokenizer), len(task.tokenizer.target)
    assert sizes == (6 + 2 + 3, 6 + 3)  # letters, " z", specials
    assert (len(head.body.encoder.embed.weight), len(head.body.decoder.embed.weight)) == sizes
    assert len(head.body.decoder.output.weight) == sizes[1]


def test_what_does_not_go_together_is_refused_before_data_is_read(recipe):
    recipe["data"] = {"train": "nowhere.tsv"}
    make_task(Run.parse(recipe))  # no file is opened
    with pytest.raises(ConfigError, match=r"data.truncation: task 'translate' cannot use 'window'; try cut, drop or"):
        make_task(Run.parse(read_recipe(recipe, ["data.truncation=window"])))


class Deaf(Seq2Seq):
    @classmethod
    def roles(cls, config):
        return super().roles(config) - {next(iter(Translate.required_roles))}


def test_a_model_without_the_roles_is_refused(recipe, monkeypatch):
    monkeypatch.setitem(sys.modules, "deaf_models", sys.modules[__name__])
    recipe["data"] = {"train": "nowhere.tsv"}
    with pytest.raises(RoleError, match="'translate' needs a model that takes a source and generates;.*it lacks"):
        make_task(Run.parse(read_recipe(recipe, ["model.name=deaf_models:Deaf"])))


def test_a_metric_that_the_task_has_not_is_refused_before_training(recipe):
    with pytest.raises(ConfigError, match=r"train.metric: the task has no metric 'exact'; did you mean 'exact_match'"):
        make_task(Run.parse(read_recipe(recipe, ["train.metric=exact"])))


@pytest.mark.parametrize("change", ["train.metric=bleu", "train.patience=3"])
def test_what_goes_by_validation_data_needs_some(recipe, change):
    del recipe["data"]["valid"]
    with pytest.raises(ConfigError, match="needs validation data; add data.valid, or data.validation_fraction"):
        make_task(Run.parse(read_recipe(recipe, [change])))


def test_a_class_that_is_no_model_is_refused(recipe, monkeypatch):
    monkeypatch.setitem(sys.modules, "own_parts", sys.modules[__name__])
    with pytest.raises(ConfigError, match="model.name: must be a weft Model"):
        make_task(Run.parse(read_recipe(recipe, ["model={name: own_parts:NoModel}"])))


class NoModel:
    Config = Translate.Config
