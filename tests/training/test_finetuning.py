"""What is frozen does not change by one bit, and all else does; rates, fresh layers, and a resume across it all."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tests.conftest import recipe_for, write_pairs
from tests.evaluation import encoded
from tests.training.test_trainer import Listener

import weft
from weft.config.schema import Named
from weft.config.sections import Train
from weft.data.truncation import TruncationPolicy
from weft.formats.pretrained import read_run
from weft.models.base import Model
from weft.models.rnn import RNN
from weft.nn.rnn.time_major import TimeMajor
from weft.registry import resolve
from weft.tasks.evaluation import evaluate
from weft.tasks.factory import build, make_task, resolve_run
from weft.tasks.prepare import fit_tokenizer
from weft.training.finetuning import frozen, layer_lr_factors, reinitialized
from weft.training.flops import TrainingCost
from weft.training.optim import make_optimizer, set_lr
from weft.training.reporting import Notice, Step, read_metrics

SMALL = {
    "bert": {"width": 8, "heads": 2, "layers": 3, "max_positions": 16, "dropout": 0.2},
    "albert": {
        "name": "bert",
        "width": 8,
        "heads": 2,
        "layers": 3,
        "max_positions": 16,
        "shared": True,
        "embedding": 4,
    },
    "gpt": {"width": 8, "heads": 2, "layers": 3, "max_positions": 16, "dropout": 0.2},
    "rnn": {"width": 8, "layers": 3, "direction": "both", "dropout": 0.2, "chars": 4, "dropout_embed": 0.1},
    "elmo": {"width": 8, "cells": 6, "layers": 2, "filters": {1: 4, 2: 4}, "embedding": 3, "dropout": 0.2},
    "cnn": {"width": 6, "dropout": 0.2},
}
NUM_GROUPS = {"bert": 4, "albert": 2, "gpt": 4, "rnn": 4, "elmo": 3, "cnn": 2}
WORDS = {"good": ["fine", "lovely", "bright", "warm"], "bad": ["dull", "cold", "grey", "bitter"]}


def write_reviews(path, count=48, seed=0):
    rng, lines = random.Random(seed), []
    for label in list(WORDS) * count:
        words = rng.choices([*WORDS[label], "a", "day", "it", "was"], k=rng.randint(3, 7))
        lines.append(f"{' '.join([*words, rng.choice(WORDS[label])])}\t{label}\n")
    path.write_text("".join(lines), encoding="utf-8")
    return path


def reviews(folder, model="bert", **train):
    """Return the recipe of a small classifier."""
    data = str(write_reviews(folder / "reviews.tsv"))
    return {
        "task": {"name": "classify"},
        "data": {"train": data, "valid": data},
        "tokenizer": {"name": "words"},
        "model": {"name": model, **SMALL[model]},
        "train": {"steps": 4, "batch_tokens": 120, "lr": 0.03, "report_every": 1, "keep": 9, **train},
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tuning")


@pytest.fixture(scope="module")
def pretrained(folder):
    """Return the directory of a trained bert; not to be changed."""
    weft.train(reviews(folder), ["train.steps=12"], folder / "pretrained")
    return folder / "pretrained"


def head_of(recipe, *overrides):
    run = read_run(recipe, overrides)
    run = resolve_run(run, make_task(run))
    tokenizer = fit_tokenizer(run.tokenizer, run.data, make_task(run))
    torch.manual_seed(0)
    return run, *build(run, tokenizer)


def names_of(head, parts):
    inside = {id(parameter) for part in parts for parameter in part.parameters()}
    return {name for name, parameter in head.named_parameters() if id(parameter) in inside}


def weights_at(run, step):
    return load_file(run / "checkpoints" / f"step-{step:08d}" / "model.safetensors")


def changed(run, last):
    before, after = weights_at(run, 0), weights_at(run, last)
    return {name for name in before if not torch.equal(before[name], after[name])}


def losses(run):
    return [(row["step"], row["loss"]) for row in read_metrics(run / "metrics.jsonl")]


# Floors.


@pytest.mark.parametrize("model", SMALL)
def test_floors_are_apart_and_leave_only_what_stands_on_top(folder, model):
    _, _, head = head_of(reviews(folder, model))
    groups = [names_of(head, group) for group in head.body.layer_groups()]
    assert len(groups) == NUM_GROUPS[model]
    assert all(groups)
    assert sum(map(len, groups)) == len(set().union(*groups)), "no parameter is in two groups"
    on_top = set(dict(head.named_parameters())) - set().union(*groups)
    pool = {"body.pooler.weight", "body.pooler.bias"} if "bert" in model else set()
    assert on_top == {"output.weight", "output.bias"} | pool


def test_those_of_a_transformer_are_the_encoders_before_the_decoders(tmp_path):
    recipe = recipe_for(write_pairs(tmp_path / "pairs.tsv"))
    recipe["model"] = {"name": "transformer", "width": 8, "heads": 2, "layers": 2, "decoder_layers": 1, "norm": "pre"}
    _, _, head = head_of(recipe)
    groups = [names_of(head, group) for group in head.body.layer_groups()]
    assert len(groups) == 4
    assert "body.encoder.norm.weight" in groups[2]
    assert "body.decoder.norm.weight" in groups[3]
    assert set().union(*groups) == set(dict(head.named_parameters())), "the output is tied to the embeddings"


def test_those_of_an_lstm_encoder_decoder_are_the_encoders_before_the_decoder(tmp_path):
    _, _, head = head_of(recipe_for(write_pairs(tmp_path / "pairs.tsv")))
    groups = [names_of(head, group) for group in head.body.layer_groups()]
    in_stack = [all(name.startswith("body.encoder.recurrent") for name in group) for group in groups]
    assert in_stack == [False, True, False]
    on_top = set(dict(head.named_parameters())) - set().union(*groups)
    assert on_top == {"body.decoder.output.weight", "body.decoder.output.bias"}


def test_a_model_that_says_nothing_is_one_group():
    body = Model(Named(name="silent"), 3)
    assert body.layer_groups() == [[body]]


# Freezing.


@pytest.mark.parametrize(
    ("model", "freeze", "groups"),
    [
        ("bert", "body", 4),
        ("bert", -2, 2),
        ("bert", 1, 1),
        ("albert", "body", 2),
        ("gpt", "body", 4),
        ("gpt", 3, 3),
        ("gpt", 0, 0),
        ("rnn", 2, 2),
        ("rnn", "body", 4),
        ("elmo", -1, 2),
        ("cnn", 1, 1),
    ],
)
def test_frozen_groups_stay_as_they_are_and_all_else_learns(folder, tmp_path, model, freeze, groups):
    recipe = reviews(folder, model, freeze=freeze)
    weft.train(recipe, out=tmp_path / "run")
    _, _, head = head_of(recipe)
    fixed = names_of(head, [part for group in head.body.layer_groups()[:groups] for part in group])
    assert changed(tmp_path / "run", 4) == set(dict(head.named_parameters())) - fixed


def test_where_nothing_is_frozen_all_of_it_learns(folder, tmp_path):
    """The negative control of the above."""
    weft.train(reviews(folder), out=tmp_path / "run")
    assert changed(tmp_path / "run", 4) == set(weights_at(tmp_path / "run", 0))


@settings(max_examples=12, deadline=None)
@given(model=st.sampled_from(["bert", "albert", "gpt", "rnn", "elmo"]), share=st.floats(0, 1))
def test_what_is_frozen_reads_a_text_always_the_same_and_keeps_no_graph(folder, model, share):
    groups = round(share * NUM_GROUPS[model])
    run, task, head = head_of(reviews(folder, model, freeze=groups))
    items = [
        task.encode(task.Example(text="a lovely day it was"), task.tokenizer, TruncationPolicy(16, "error"))[0]
    ] * 9
    tokens = task.collate(items, None).tokens
    deep = 4 if (model, groups) == ("albert", 2) else groups  # its layers are one group
    with frozen(head, run.train):
        head.train()
        for layer in range(1 + head.body.config.layers):
            first, second = (_output(head.body, tokens, layer) for _ in range(2))
            assert first.requires_grad == (layer >= deep)
            if layer != deep:  # the first group that learns need not drop anything of what it reads
                assert torch.equal(first, second) == (layer < deep), layer


def _output(body, tokens, layer):
    """Return what one group makes of a text."""
    if layer or not isinstance(body, RNN):
        return body.encode(tokens, (layer,))[0]
    return body._embed(tokens, TimeMajor(tokens))  # of one that spells, these are of another width


def test_an_evaluation_in_between_leaves_what_is_frozen_as_it_was(folder):
    run, task, head = head_of(reviews(folder), "train.freeze=2")
    with frozen(head, run.train):
        head.train()
        evaluate(
            task, head, encoded(task, [task.Example(text="a warm day", label="good")], TruncationPolicy(16, "error"))
        )
        assert not any(part.training for floor in head.body.layer_groups()[:2] for part in floor)
        assert head.training
        assert all(part.training for group in head.body.layer_groups()[2:] for part in group)


def test_the_optimiser_has_no_state_of_what_is_frozen(folder, tmp_path):
    weft.train(reviews(folder, freeze=-1), out=tmp_path / "run")
    state = load_file(tmp_path / "run" / "last" / "state" / "optimizer.safetensors")
    learnt = {name.partition(".")[2] for name in state}
    assert learnt == changed(tmp_path / "run", 4)
    assert not any("embed" in name or "blocks.0" in name for name in learnt)


def test_after_a_training_nothing_is_frozen_any_more(folder, tmp_path):
    pipeline = weft.train(reviews(folder, freeze="body"), out=tmp_path / "run")
    assert all(parameter.requires_grad for parameter in pipeline.head.parameters())
    assert pipeline.head.train().body.dropout.training
    assert pipeline.gradients("a bright day")[0].norms


def test_how_much_learns_is_told(folder, tmp_path):
    listener = Listener()
    weft.train(reviews(folder, freeze="body"), out=tmp_path / "run", report=listener)
    (notice,) = [record.text for record in listener.of(Notice) if "freeze" in record.text]
    _, _, head = head_of(reviews(folder))
    whole = sum(parameter.numel() for parameter in head.parameters())
    assert notice == f"train.freeze: {8 * 8 + 8 + 2 * 8 + 2} of {whole:,} parameters learn"


def test_less_work_is_counted(folder):
    run, task, head = head_of(reviews(folder, "gpt"), "train.freeze=body")
    items = [
        task.encode(task.Example(text="a lovely day", label="good"), task.tokenizer, TruncationPolicy(16, "error"))[0]
    ]
    batch, whole, part = task.collate(items, None), TrainingCost(), TrainingCost()
    whole.add(head, [batch])
    assert whole.flops == 3 * head.flops(batch)
    with frozen(head, run.train):
        part.add(head, [batch])
    assert head.flops(batch) < part.flops < 1.1 * head.flops(batch)


@pytest.mark.parametrize("freeze", [5, -5, 99])
def test_more_floors_than_there_are_is_refused_with_their_number(folder, tmp_path, freeze):
    with pytest.raises(
        weft.ConfigError, match=f"train.freeze: .* -4 to 4, .* 4 layer groups.* but is {freeze} instead"
    ):
        weft.train(reviews(folder, freeze=freeze), out=tmp_path / "run")


@pytest.mark.parametrize("freeze", ["head", 1.5, True])
def test_what_is_no_group_is_refused(folder, freeze):
    with pytest.raises(weft.ConfigError, match=r"train\.freeze"):
        read_run(reviews(folder, freeze=freeze))


def tied(tmp_path):
    """Return the recipe of a transformer, whose output is tied to the embeddings: all of it is the body."""
    recipe = recipe_for(write_pairs(tmp_path / "pairs.tsv"))
    recipe["model"] = {"name": "transformer", "width": 8, "heads": 2, "layers": 1}
    return recipe


def test_nothing_left_to_learn_is_refused(tmp_path):
    recipe = tied(tmp_path)
    with pytest.raises(weft.ConfigError, match="train.freeze: body leaves no parameter to train"):
        weft.train(recipe, ["train.freeze=body"], tmp_path / "run")


def test_a_model_that_is_fitted_has_nothing_to_tune(folder, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("a b c\nb c a\n" * 9)
    recipe = {
        "task": {"name": "lm"},
        "data": {"train": str(text)},
        "tokenizer": {"name": "words"},
        "model": {"name": "ngram"},
        "train": {"steps": 1, "layer_decay": 0.5},
    }
    with pytest.raises(weft.ConfigError, match="train.layer_decay: 'ngram' is fitted, not trained; leave it out"):
        weft.train(recipe, out=tmp_path / "run")


def test_patience_ends_a_training_that_is_frozen(folder, tmp_path):
    recipe = reviews(folder, freeze="body", lr=1e-30, eval_every=1, patience=2, steps=50)
    weft.train(recipe, out=tmp_path / "run")
    assert losses(tmp_path / "run")[-1][0] == 3


# Gradual unfreezing.


def learnt_between(run, first, last):
    before, after = weights_at(run, first), weights_at(run, last)
    return {name for name in before if not torch.equal(before[name], after[name])}


@pytest.mark.parametrize("model", ["bert", "gpt", "rnn"])
def test_one_more_group_learns_at_a_time_from_the_top(folder, tmp_path, model):
    recipe = reviews(folder, model, unfreeze=1, freeze=1, save_every=1, steps=5)
    pipeline = weft.train(recipe, out=tmp_path / "run")
    groups = [names_of(pipeline.head, group) for group in pipeline.head.body.layer_groups()]
    whole = set(dict(pipeline.head.named_parameters()))
    for step in range(5):
        fixed = set().union(*groups[: max(1, 4 - step)])
        assert learnt_between(tmp_path / "run", step, step + 1) == whole - fixed, step
    assert all(parameter.requires_grad for parameter in pipeline.head.parameters()), "once it is trained"


def test_an_epoch_unfreezes_a_group(folder, tmp_path):
    listener = Listener()
    recipe = reviews(folder, unfreeze="epoch", steps=None, epochs=3, batch_tokens=400, save_every="epoch")
    pipeline = weft.train(recipe, out=tmp_path / "run", report=listener)
    notices = [record.text for record in listener.of(Notice) if "unfreeze" in record.text]
    steps = sorted(int(path.name[-8:]) for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert [notice.rpartition("step ")[2] for notice in notices] == [f"{step + 1} on" for step in steps[:3]]
    head = {"output.weight", "output.bias", "body.pooler.weight", "body.pooler.bias"}
    top = names_of(pipeline.head, pipeline.head.body.layer_groups()[-1])
    assert learnt_between(tmp_path / "run", 0, steps[1]) == head
    assert learnt_between(tmp_path / "run", steps[1], steps[2]) == head | top


def test_what_contradicts_unfreezing_is_refused(folder, tmp_path):
    with pytest.raises(weft.ConfigError, match="train.unfreeze: .* train.freeze=body never does"):
        weft.train(reviews(folder, unfreeze=2, freeze="body"), out=tmp_path / "run")
    with pytest.raises(weft.ConfigError, match="train.unfreeze: .* here nothing does"):
        weft.train(tied(tmp_path), ["train.unfreeze=2"], tmp_path / "run")


# Rates.

BLOCK = (
    "attention.in_proj",
    "attention.out_proj",
    "attention_residual.norm",
    "feed_forward.fc1",
    "feed_forward.fc2",
    "feed_forward_residual.norm",
)


def group_of(optimizer, parameter):
    (group,) = [group for group in optimizer.param_groups if any(other is parameter for other in group["params"])]
    return group


def listed(folder, model):
    """List the learning rate and the weight decay of each parameter, with decay 0.5 of a rate of 0.08."""
    run, _, head = head_of(reviews(folder, model), "train.layer_decay=0.5", "train.weight_decay=0.01")
    optimizer = make_optimizer(head, run.train, layer_lr_factors(head, run.train.layer_decay))
    set_lr(optimizer, 0.08)
    groups = {name: group_of(optimizer, parameter) for name, parameter in head.named_parameters()}
    return {name: (group["lr"], group["weight_decay"]) for name, group in groups.items()}


def expected(names, rate):
    vectors = {f"{name}.{part}" for name in names for part in ("weight", "bias") if part == "bias" or "norm" in name}
    matrices = {f"{name}.weight" for name in names if "norm" not in name}
    return dict.fromkeys(vectors, (rate, 0.0)) | dict.fromkeys(matrices, (rate, 0.01))


def test_the_rate_and_decay_of_each_parameter_of_a_bert(folder):
    below = dict.fromkeys(("body.embed.weight", "body.positions.table.weight", "body.segments.weight"), (0.005, 0.01))
    layers = [expected([f"body.encoder.blocks.{at}.{part}" for part in BLOCK], 0.01 * 2**at) for at in range(3)]
    top = expected(["body.pooler", "output"], 0.08)
    whole = below | expected(["body.norm"], 0.005) | layers[0] | layers[1] | layers[2] | top
    assert listed(folder, "bert") == whole


def test_the_rate_and_decay_of_each_parameter_of_a_gpt(folder):
    below = dict.fromkeys(("body.embed.weight", "body.positions.table.weight"), (0.005, 0.01))
    layers = [expected([f"body.decoder.blocks.{at}.{part}" for part in BLOCK], 0.01 * 2**at) for at in range(3)]
    top = expected(["body.decoder.norm"], 0.04) | expected(["output"], 0.08)
    assert listed(folder, "gpt") == below | layers[0] | layers[1] | layers[2] | top


def plain_groups(head, train):
    """Group as there was no layer_decay."""
    named = list(head.parameters())
    matrices = {
        "params": [parameter for parameter in named if parameter.ndim > 1],
        "weight_decay": train.weight_decay,
        "factor": 1.0,
    }
    vectors = {"params": [parameter for parameter in named if parameter.ndim <= 1], "weight_decay": 0.0, "factor": 1.0}
    return torch.optim.AdamW([matrices, vectors], lr=train.lr, betas=train.betas, fused=True)


def learn(folder, make, decay=1.0):
    run, task, head = head_of(reviews(folder), f"train.layer_decay={decay}", "train.weight_decay=0.1")
    optimizer, limit = make(head, run.train), TruncationPolicy(16, "error")
    items = [task.encode(task.Example(text="a dull day", label="bad"), task.tokenizer, limit)[0]] * 5
    torch.manual_seed(1)
    for step in range(1, 6):
        set_lr(optimizer, run.train.lr / step)
        head.train()(task.collate(items, None))[0]["texts"].backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([parameter.detach().flatten() for parameter in head.parameters()])


def ours(head, train):
    return make_optimizer(head, train, layer_lr_factors(head, train.layer_decay))


def test_a_decay_of_one_changes_not_one_bit(folder):
    plain = learn(folder, plain_groups)
    assert torch.equal(learn(folder, ours), plain)
    assert not torch.equal(learn(folder, ours, 0.99), plain), "the negative control"


@pytest.mark.parametrize("optimizer", ["adam", "adagrad", "sgd", "asgd"])
def test_every_optimiser_steps_by_the_factor(folder, optimizer):
    """One step of two that differ in the decay alone: the lowest group's is shorter by just that."""
    steps = []
    for decay in (1.0, 0.5):
        changes = [
            f"train.optimizer={optimizer}",
            f"train.layer_decay={decay}",
            "train.eval_every=1",
            "model.dropout=0",
        ]
        run, task, head = head_of(reviews(folder, "gpt"), *changes, "task.dropout=0")
        before = head.body.embed.weight.detach().double().clone()
        our_optimizer = ours(head, run.train)
        set_lr(our_optimizer, 0.25)
        items = [task.encode(task.Example(text="grey", label="bad"), task.tokenizer, TruncationPolicy(16, "error"))[0]]
        head(task.collate(items, None))[0]["texts"].backward()
        our_optimizer.step()
        steps.append(head.body.embed.weight.detach().double() - before)
    assert steps[0].abs().max() > 0
    torch.testing.assert_close(steps[1], steps[0] * 0.5**4, atol=1e-7, rtol=1e-4)


# Fresh layers.


def start(pretrained, folder, tmp_path, *changes, name="run"):
    recipe = {**reviews(folder), "model": {"name": "bert", "weights": str(pretrained)}}
    del recipe["tokenizer"]
    weft.train(recipe, changes, tmp_path / name)
    return weights_at(tmp_path / name, 0)


def test_the_top_layers_and_the_pooler_start_afresh_and_the_rest_does_not(pretrained, folder, tmp_path):
    theirs = load_file(pretrained / "best" / "model.safetensors")
    whole = start(pretrained, folder, tmp_path)
    assert all(torch.equal(whole[name], theirs[name]) for name in theirs), "the same task, so its output too"
    weights = start(pretrained, folder, tmp_path, "train.reinit=2", name="fresh")
    new = {name for name in theirs if not torch.equal(weights[name], theirs[name])}
    fresh = {name for name in theirs if "blocks.1." in name or "blocks.2." in name or "pool" in name}
    assert new == fresh
    for name in fresh:  # as a model of its own starts: by N(0, 0.02), norms and biases from 1 and 0
        weight = weights[name]
        flat = (weight == weight.flatten()[0]).all()
        assert bool(flat) == (weight.ndim == 1), name
        assert flat or weight.std() == pytest.approx(0.02, rel=0.5), name


def test_fresh_layers_hang_on_the_seed_alone(pretrained, folder, tmp_path):
    first = start(pretrained, folder, tmp_path, "train.reinit=1", name="1")
    again = start(pretrained, folder, tmp_path, "train.reinit=1", name="2")
    other = start(pretrained, folder, tmp_path, "train.reinit=1", "train.seed=2", name="3")
    name = "body.encoder.blocks.2.feed_forward.fc1.weight"
    assert torch.equal(first[name], again[name])
    assert not torch.equal(first[name], other[name])


def test_what_is_tied_to_a_lower_group_stays(folder):
    recipe = reviews(folder, "gpt")
    body = resolve("model", "gpt")(read_run(recipe).model, 11)
    with reinitialized(body, 3):
        for parameter in body.parameters():
            parameter.data.fill_(0.5)
    assert (body.embed.weight == 0.5).all()
    assert (body.positions.table.weight == 0.5).all()
    assert not any((parameter == 0.5).all() for parameter in body.decoder.parameters())


def test_fresh_layers_without_weights_are_refused(folder, tmp_path):
    with pytest.raises(weft.ConfigError, match="train.reinit: 2 layers .* but there is no model.weights"):
        weft.train(reviews(folder, reinit=2), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_more_fresh_layers_than_there_are_is_refused(pretrained, folder, tmp_path):
    with pytest.raises(weft.ConfigError, match="train.reinit: the body has 3 layers above its embeddings, but 4 are"):
        start(pretrained, folder, tmp_path, "train.reinit=4")


@pytest.mark.parametrize("freeze", ["body", "3"])
def test_fresh_layers_that_would_never_learn_are_refused(pretrained, folder, tmp_path, freeze):
    with pytest.raises(weft.ConfigError, match="train.freeze: .*train.reinit=2 and would never be trained; freeze 2"):
        start(pretrained, folder, tmp_path, "train.reinit=2", f"train.freeze={freeze}")
    start(pretrained, folder, tmp_path, "train.reinit=2", "train.freeze=2", name="well")


# Together.

TUNED = ["train.freeze=1", "train.layer_decay=0.7", "train.reinit=1", "train.weight_decay=0.1", "train.save_every=3"]


def test_a_resume_is_exact(pretrained, folder, tmp_path):
    whole = start(pretrained, folder, tmp_path, *TUNED, "train.steps=7", name="whole")
    start(pretrained, folder, tmp_path, *TUNED, "train.steps=3", name="parts")
    recipe = {**reviews(folder), "model": {"name": "bert", "weights": str(pretrained)}}
    del recipe["tokenizer"]
    weft.train(recipe, [*TUNED, "train.steps=7"], tmp_path / "parts", resume=True)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    ours, theirs = (weights_at(tmp_path / name, 7) for name in ("parts", "whole"))
    assert all(torch.equal(ours[name], theirs[name]) for name in whole)
    for change in ("train.freeze=2", "train.layer_decay=0.6", "train.reinit=0"):
        with pytest.raises(weft.CheckpointError, match="the recipe has changed"):
            weft.train(recipe, [*TUNED, "train.steps=9", change], tmp_path / "parts", resume=True)


def test_a_resume_between_two_unfreezings_is_exact(folder, tmp_path):
    recipe = reviews(folder, "rnn", unfreeze=2, schedule="constant", save_every=1, steps=7)
    weft.train(recipe, out=tmp_path / "whole")
    weft.train(recipe, ["train.steps=3"], tmp_path / "parts")
    weft.train(recipe, [], tmp_path / "parts", resume=True)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    ours, theirs = (weights_at(tmp_path / name, 7) for name in ("parts", "whole"))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    with pytest.raises(weft.CheckpointError, match="the recipe has changed"):
        weft.train(recipe, ["train.steps=9", "train.unfreeze=1"], tmp_path / "parts", resume=True)


def test_a_classifier_starts_from_the_layers_of_a_language_model(folder, tmp_path):
    """The way of ULMFiT: an AWD-LSTM reads the texts, then its layers and its vocabulary are the classifier's."""
    texts = tmp_path / "texts.txt"
    rows = write_reviews(tmp_path / "reviews.tsv").read_text(encoding="utf-8").splitlines()
    texts.write_text("".join(row.partition("\t")[0] + "\n" for row in rows), encoding="utf-8")
    model = {"name": "rnn", "width": 8, "embedding": 6, "layers": 2, "tie": True, "dropout_recurrent": 0.2}
    lm = {
        "task": {"name": "lm"},
        "data": {"train": str(texts)},
        "tokenizer": {"name": "words"},
        "model": {**model, "variational": True, "dropout_embed": 0.1},
        "train": {"steps": 3, "batch_tokens": 100},
    }
    weft.train(lm, out=tmp_path / "lm")
    recipe = {**reviews(folder, unfreeze=1, layer_decay=0.4), "task": {"name": "classify", "pooling": "concat"}}
    del recipe["tokenizer"]
    recipe["model"] = {"weights": str(tmp_path / "lm"), "dropout_recurrent": 0.1}
    pipeline = weft.train(recipe, out=tmp_path / "run")
    theirs, ours = weights_at(tmp_path / "lm", 3), weights_at(tmp_path / "run", 0)
    shared = {name for name in theirs if name in ours}
    assert shared == {name for name in theirs if not name.startswith("body.output")}
    assert all(torch.equal(ours[name], theirs[name]) for name in shared)
    assert ours["output.weight"].shape == (2, 3 * 6)
    assert pipeline.tokenizer.identity == weft.load(tmp_path / "lm").tokenizer.identity


def test_the_reported_rate_is_that_of_the_top(folder, tmp_path):
    listener = Listener()
    weft.train(reviews(folder, layer_decay=0.5), out=tmp_path / "run", report=listener)
    assert {record.lr for record in listener.of(Step)} == {0.03}


def test_the_average_of_checkpoints_leaves_what_is_frozen_as_it_was(folder, tmp_path):
    recipe = reviews(folder, freeze=2, save_every=1, average=3)
    weft.train(recipe, out=tmp_path / "run")
    _, _, head = head_of(recipe)
    before, after = weights_at(tmp_path / "run", 0), load_file(tmp_path / "run" / "best" / "model.safetensors")
    for name in names_of(head, [part for group in head.body.layer_groups()[:2] for part in group]):
        assert torch.equal(before[name], after[name]), name


def test_settings_that_are_none_are_refused():
    for bad in ({"layer_decay": 0}, {"layer_decay": 1.1}, {"reinit": -1}, {"seeds": 0}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            Train(steps=1, **bad)
