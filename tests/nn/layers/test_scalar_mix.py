"""The mixture of layers: eq. 1 of Peters et al. 2018, and what classify and tag do with it."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.labelling import made

import weft
from weft.config.run import Run
from weft.data.truncation import TruncationPolicy
from weft.errors import ConfigError
from weft.nn.layers.scalar_mix import ScalarMix
from weft.tokens import Tokens

SMALL = {"embedding": 3, "filters": {2: 6, 3: 6}, "width": 12, "cells": 12, "highways": 1}


def drawn(layers, seed=0):
    torch.manual_seed(seed)
    mix = ScalarMix(layers).double()
    with torch.no_grad():
        mix.weights.normal_()
        mix.scale.fill_(1.7)
    return mix, torch.randn(layers, 5, 3).double()


def equation(mix, layers):
    shares = [torch.exp(w) / sum(torch.exp(one) for one in mix.weights) for w in mix.weights]
    return mix.scale * sum(share * layer for share, layer in zip(shares, layers, strict=True))


@settings(deadline=None, derandomize=True, max_examples=12)
@given(st.integers(1, 5), st.integers(0, 9))
def test_it_is_the_equation(count, seed):
    mix, layers = drawn(count, seed)
    torch.testing.assert_close(mix(layers), equation(mix, layers))
    assert float(mix.shares.detach().sum()) == pytest.approx(1)


def test_its_gradient_is_right():
    mix, layers = drawn(3)
    names = [name for name, _ in mix.named_parameters()]

    def mixed(weights, scale, layers):
        return torch.func.functional_call(mix, dict(zip(names, (weights, scale), strict=True)), layers)

    assert torch.autograd.gradcheck(mixed, (mix.weights, mix.scale, layers.requires_grad_()))


def test_at_first_it_is_the_mean():
    layers = torch.randn(4, 5, 3)
    torch.testing.assert_close(ScalarMix(4)(layers), layers.mean(0))


def test_shares_that_do_not_add_up_are_noticed():
    mix, layers = drawn(3)
    assert (
        mix.scale * torch.einsum("l,lnd->nd", mix.weights.sigmoid(), layers) - equation(mix, layers)
    ).abs().max() > 0.1


# In tasks.


@pytest.fixture
def tags(tmp_path):
    """Words are told apart by their endings, which no vocabulary has."""
    stems = ["Ban", "tur", "Mel", "dak", "Pis", "gor", "Lam", "ker"]
    rows = [f"the O\n{stem}{end} {tag}\n. O" for stem in stems for end, tag in (("ov", "NAME"), ("ing", "VERB"))]
    path = tmp_path / "rows.conll"
    path.write_text("\n\n".join(rows) + "\n", encoding="utf-8")
    return {
        "task": {"name": "tag", "layers": "mix"},
        "data": {"train": str(path), "valid": str(path)},
        "tokenizer": {"name": "words", "min_count": 2},
        "model": {"name": "elmo", **SMALL},
        "train": {"steps": 40, "batch_tokens": 100, "lr": 0.02},
    }


@pytest.fixture
def texts(tags, tmp_path):
    path = tmp_path / "rows.tsv"
    path.write_text(
        "".join(f"{word} sat\t{label}\n" for word, label in (("Banov", "a"), ("Melov", "a"), ("turing", "b")))
    )
    return {**tags, "task": {"name": "classify", "layers": "mix"}, "data": {"train": str(path), "valid": str(path)}}


def test_a_tagger_learns_on_a_mixture(tags, tmp_path):
    pipeline = weft.train(tags, out=tmp_path / "run")
    assert pipeline.evaluate()["accuracy"] > 0.9
    assert pipeline.head.mix.weights.abs().max() > 1e-3, "the shares are learnt with the task"
    again = weft.load(tmp_path / "run", device="cpu")
    assert torch.equal(again.head.mix.weights, pipeline.head.mix.weights.cpu())
    assert again(["the Dopov ."]) == pipeline(["the Dopov ."])
    dumped = json.loads(json.dumps(again.run.dump()))
    assert dumped["task"]["layers"] == "mix"


def test_a_classifier_reads_the_mean_of_the_mixture(texts):
    task, head = made(texts)
    head.double().eval()
    batch = task.collate(
        task.encode(task.Example(text="Banov sat"), task.tokenizer, TruncationPolicy(100, "error")), None
    )
    layers = head.body.encode(batch.tokens, (0, 1, 2))
    torch.testing.assert_close(head.pooled_output(batch.tokens), layers.mean(0).mean(0, keepdim=True))
    assert head.mix.weights.shape == (3,)


def test_a_text_alone_has_the_summary_that_it_has_in_a_batch(texts):
    _, head = made(texts)
    head.double().eval()
    rows = [[1, 3, 0, 2], [1, 2], [1, 3, 2]]
    together = head.pooled_output(Tokens.pack(rows))
    for row, own in zip(rows, together, strict=True):
        torch.testing.assert_close(head.pooled_output(Tokens.pack([row]))[0], own)
    assert not head.pooled_output(Tokens.pack([[], [1, 2]]))[0].any()


@pytest.mark.parametrize(("layers", "count"), [("last", None), ("mix", 3), ([0, 2], 2), ([-1], 1)])
def test_layers_are_those_asked_for(tags, layers, count):
    _, head = made({**tags, "task": {"name": "tag", "layers": layers}})
    assert (None if head.mix is None else len(head.mix.weights)) == count
    tokens = Tokens.pack([[1, 3, 2]])
    head.eval()
    if layers in ("last", [-1]):
        assert torch.equal(head.states(tokens), head.body.encode(tokens)[0])
    else:
        chosen = (0, 1, 2) if layers == "mix" else layers
        torch.testing.assert_close(head.states(tokens), head.body.encode(tokens, chosen).mean(0))


def test_any_model_with_layers_can_be_mixed(tags):
    _, head = made({**tags, "model": {"name": "rnn", "direction": "both", "width": 8, "layers": 3, "embedding": 5}})
    head.eval()
    assert len(head.mix.weights) == 3
    tokens = Tokens.pack([[1, 3, 2]])
    torch.testing.assert_close(head.states(tokens), head.body.encode(tokens, (1, 2, 3)).mean(0))
    _, head = made({**tags, "model": {"name": "gpt", "width": 8, "heads": 2, "layers": 2, "max_positions": 16}})
    assert len(head.mix.weights) == 3


@pytest.mark.parametrize("layers", ["all", [], [1.5], 2, True, ["mix"]])
def test_other_layers_are_refused(tags, layers):
    with pytest.raises(
        ConfigError, match=r"task.layers: must be last, mix, or a list of layers to mix, such as \[1, 2\]"
    ):
        Run.parse({**tags, "task": {"name": "tag", "layers": layers}})
