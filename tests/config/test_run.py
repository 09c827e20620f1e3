"""A whole recipe, checked: errors that name the place, the value and the remedy."""

import sys
from typing import ClassVar

import numpy as np
import pytest

from weft.config.recipes import read_recipe
from weft.config.run import Run
from weft.config.schema import Named
from weft.config.yaml import read_yaml, write_yaml
from weft.errors import ConfigError, WeftError
from weft.models.base import Model

RECIPE = {
    "task": {"name": "translate"},
    "data": {"sample": "dates"},
    "tokenizer": {"name": "characters"},
    "model": {"name": "seq2seq", "width": 16},
    "train": {"steps": 10},
}


def changed(*overrides):
    return read_recipe(RECIPE, overrides)


def test_a_recipe_is_parsed_and_dumped_to_an_equal_run():
    run = Run.parse(RECIPE)
    assert Run.parse(read_yaml(write_yaml(run.dump()), "place")) == run
    with pytest.raises(Exception, match="frozen"):
        run.train.lr = 1.0


@pytest.mark.parametrize("key", ["train.clip", "train.batch_tokens", "task.decode.top_p"])
def test_what_is_set_to_none_stays_so(key):
    """A run that is gone on with would else have the default again: a limit of the gradient's norm."""
    recipe = {**RECIPE, "task": {"name": "lm"}, "model": {"name": "rnn", "width": 16}}
    run = Run.parse(read_recipe(recipe, {key: None, "train.batch_size": 3 if key == "train.batch_tokens" else None}))
    section, *path = key.split(".")
    value = run.dump()[section]
    for part in path[:-1]:
        value = value[part]
    assert value[path[-1]] is None
    assert Run.parse(read_yaml(write_yaml(run.dump()), "place")) == run
    assert Run.parse(recipe) != run


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.stesp=3", "train.stesp: unknown key; did you mean 'steps'?"),
        ("modle.width=3", "modle: not a section of a recipe; did you mean 'model'?"),
        ("model.name=seq2sqe", "model.name: there is no model 'seq2sqe'; did you mean 'seq2seq'?"),
        ("task.name=translat", "did you mean 'translate'?"),
        ("tokenizer.name=bpee", "tokenizer.name: there is no tokenizer 'bpee'; did you mean 'bpe'?"),
        ("train.workers=2", "train.workers: unknown key; it is data.workers"),
        ("train.beam=2", "train.beam: unknown key; it is task.decode.beam"),
        ("task.beam=2", "task.beam: unknown key; it is task.decode.beam"),
        ("data.size=2", "data.size: unknown key; it is tokenizer.size"),
        ("data.zebra=2", "data.zebra: unknown key; known: "),
        ("tokenizer={name: bpe, seed: 2}", "tokenizer.seed: unknown key; it is train.seed or task.decode.seed"),
        ("train.lr=-1", "train.lr: should be greater than 0, but is -1 instead"),
        ("train.steps=many", "train.steps: should be a valid integer"),
        ("train.optimizer=adm", "should be 'adamw', 'adam', 'adagrad', 'sgd' or 'asgd', but is 'adm' instead"),
        ("train.time=soon", "train.time: must be a time such as 90s, 15m or 2h, but is 'soon' instead"),
        ("model.width=7", "model.width must be even, half for each direction: got 7; try 8"),
        ("task.decode.beam=0", "task.decode.beam: should be greater than or equal to 1, but is 0 instead"),
        ("task.decode.beem=2", "task.decode.beem: unknown key; did you mean 'beam'?"),
        ("train.steps=null", "train: needs a budget: give train.steps, train.epochs, or train.time such as 15m"),
        (
            "train={steps: 1, batch_size: 8, batch_tokens: 64}",
            "train: batches have batch_size=8 items or batch_tokens=64",
        ),
        ("train.batch_tokens=null", "train: needs the size of a batch: give train.batch_tokens or train.batch_size"),
        ("train.eval_every=epochs", "train.eval_every: should be 'epoch' or a valid integer"),
        ("train.epochs=0", "train.epochs: should be greater than 0"),
        ("data.train=file.tsv", "data: takes data.sample or data.train, not both"),
        ("train", "'train': an override is key=value, such as train.lr=3e-5"),
        ("train..lr=1", "an override is key=value"),
        ("train.lr.x=1", "train.lr is"),
        ("model=seq2seq", "model.name: must say which model, but is 'seq2seq' instead"),
        ("model.name=nowhere.at:All", "there is no module 'nowhere'"),
        ("model.name=weft.models.seq2seq.model:Seq2Sek", "did you mean 'Seq2Seq'?"),
        ("train.lr=[1", "not valid YAML"),
        ("train.lr=" + "[" * 3000, "nested too deep"),
        ("train.steps=" + "9" * 5000, "not valid YAML"),
        ("train.lr=!!timestamp foo", "not valid YAML"),
        ("train.lr=.inf", "train.lr: should be a finite number"),
        ("train.warmup=.inf", "train.warmup: should be a finite number"),
        ("train.betas=[2, 3]", "train.betas.0: should be less than 1, but is 2 instead"),
        ("data.workers=100000", "data.workers: should be less than or equal to 128"),
        ("train.accumulate=1000000000", "train.accumulate: should be less than or equal to 10000"),
        ("train.seeds=100000", "train.seeds: should be less than or equal to 1000"),
        ("train.epochs=1e12", "train.epochs: should be less than or equal to 10000"),
        ("task.decode.beam=1000000000", "task.decode.beam: should be less than or equal to 1000"),
        ("task.decode.num_return_sequences=100000", "num_return_sequences: should be less than or equal to 20000"),
        ("train.seed=4611686018427387904", "train.seed: should be less than 4294967296"),
        ("data.max_line_bytes=99999999999999999999", "data.max_line_bytes: should be less than"),
        ("data.columns={text: true}", "data.columns.text"),
        ("tokenizer={name: bpe, size: 99999999999999}", "tokenizer.size: should be less than or equal to 10000000"),
        ("task.decode.max_length=99999999999", "task.decode.max_length: should be less than or equal to 100000"),
        ("model.width='16'", "model.width: should be a valid integer, but is '16' instead"),
        ("model.tie=1", "model.tie: should be a valid boolean, but is 1 instead"),
        ("model.tie='yes'", "model.tie: should be a valid boolean, but is 'yes' instead"),
        ("model.dropout=true", "model.dropout: should be a valid number, but is True instead"),
        ("task.decode.beam=true", "task.decode.beam: should be a valid integer, but is True instead"),
        ("task.decode.repetition_penalty=1e-300", "task.decode.repetition_penalty: should be greater than or equal to"),
        ("train.steps=1e300", "train.steps: should be a valid integer, but is 1e+300 instead"),
        ("train.betas=['0.9', 0.99]", "train.betas.0: should be a valid number, but is '0.9' instead"),
        ("train.eval_every=true", "train.eval_every: should be 'epoch' or a valid integer, but is True instead"),
        ("model={name: cnn, kernels: [true, 4]}", "model.kernels.0: should be a valid integer, but is True instead"),
        ("model={name: bert, pruned_heads: {0: ['1']}}", "model.pruned_heads.0.0: should be a valid integer"),
        ("model.layers=1000000000", "model.layers: should be less than or equal to 1000, but is 1000000000 instead"),
        ("model.width=1000000000000000000000", "model.width: should be less than or equal to"),
    ],
)
def test_mistakes_name_the_place_and_the_remedy(override, message):
    with pytest.raises(WeftError, match=".") as error:
        Run.parse(changed("train.lr=1e-3", override) if override.startswith("train.lr.x") else changed(override))
    assert message in str(error.value)


class OwnConfig(Named):
    size: int = 3
    sizes: tuple[int, ...] = ()


class Own(Model):
    Config: ClassVar[type[Named]] = OwnConfig


def test_a_users_own_class_is_checked_as_strictly(monkeypatch):
    monkeypatch.setitem(sys.modules, "own_package", sys.modules[__name__])
    run = Run.parse(changed("model={name: own_package:Own, size: 4}"))
    assert run.model == OwnConfig(name="own_package:Own", size=4)
    with pytest.raises(ConfigError, match=r"model.siez: unknown key; did you mean 'size'\?"):
        Run.parse(changed("model={name: own_package:Own, siez: 4}"))
    with pytest.raises(ConfigError, match=r"model.sizes.1: should be a valid integer, but is '2' instead"):
        Run.parse(changed("model={name: own_package:Own, sizes: [1, '2']}"))


def test_whole_numbers_may_be_written_with_an_exponent_and_lists_stand_for_tuples():
    own = OwnConfig(name="own", size=1e3, sizes=[np.int64(2), 3.0])
    assert own == OwnConfig(name="own", size=1000, sizes=(2, 3))
    assert [type(size) for size in (own.size, *own.sizes)] == [int, int, int]
    assert Run.parse(changed("train.lr=1", "train.steps=1e3")).train.steps == 1000


def test_a_checkpoint_may_not_name_code_from_outside():
    with pytest.raises(ConfigError, match="trust"):
        Run.parse(changed("model={name: own_package:Own}"), trust=False)


@pytest.mark.parametrize("trust", [False, True])
def test_a_checkpoint_with_a_wrong_key_imports_no_code_to_say_where_it_belongs(tmp_path, monkeypatch, trust):
    (tmp_path / "from_outside.py").write_text("from weft.models.seq2seq.model import Seq2Seq as MyModel\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "from_outside", raising=False)
    place = "it is model.attention" if trust else "did you mean"
    with pytest.raises(ConfigError, match=f"data.attention: unknown key; {place}"):
        Run.parse(changed("model={name: from_outside:MyModel}", "data.attention=none"), trust=trust)
    assert ("from_outside" in sys.modules) == trust


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("data.longest=5", "data.longest: was renamed to 'max_length'"),
        ("model.heads_off={}", "model.heads_off: was renamed to 'pruned_heads'"),
        ("model.hidden=8", "model.hidden: was renamed to 'ffn_width'"),
        ("data.too_long=cut", "data.too_long: was renamed to 'truncation'"),
        ("task.smoothing=0.1", "task.smoothing: was renamed to 'label_smoothing'"),
        ("tokenizer.gap=2", "tokenizer.gap: was renamed to 'num_separators'"),
        ("task.decode.candidates=2", "task.decode.candidates: was renamed to 'num_return_sequences'"),
        ("model.longst=5", "model.longst: unknown key; known|did you mean"),
    ],
)
def test_a_key_that_was_renamed_is_named(change, message):
    recipe = {"task": {"name": "translate"}, "data": {"sample": "dates"}, "tokenizer": {"name": "characters"}}
    recipe |= {"model": {"name": "transformer"}, "train": {"steps": 1}}
    with pytest.raises(ConfigError, match=message):
        Run.parse(read_recipe(recipe, [change]))
