"""context2vec against its equations, word by word; what it does not read; blanks that are filled."""

import numpy as np
import pytest
import torch
from tests.equations import agree, below, lstm, scatter, weights_of
from torch import Tensor

import weft
from weft.data.truncation import TruncationPolicy
from weft.errors import ConfigError, RoleError
from weft.models.base import Role
from weft.models.context2vec import Context2Vec, Context2VecConfig
from weft.nn.rnn.stack import RecurrentStack
from weft.testing import PROPERTIES, check_model
from weft.tokens import Tokens

VOCAB = 9
SMALL = {"width": 5, "embedding": 3, "cells": 4}


def make(**config: object) -> Context2Vec:
    model = Context2Vec(Context2VecConfig(name="context2vec", **{**SMALL, **config}), VOCAB).double().eval()
    scatter(model, 0)
    return model


def draw(lengths: list[int]) -> Tokens:
    return Tokens.flat(torch.randint(VOCAB, (sum(lengths),)), torch.tensor(lengths))


def last_states(model: Context2Vec, words: Tensor, way: int) -> Tensor:
    """Return the last layer's state after words that are read in this order; zeros after none."""
    w, layers, cells = weights_of(model), model.config.layers, model.config.cells
    h, c = ([torch.zeros(cells).double() for _ in range(layers)] for _ in range(2))
    for word in words:
        x = w["embed.weight"][word]
        for layer in range(layers):
            h[layer], c[layer] = lstm(below(w, f"recurrent.layers.{layer}.{way}"), x, h[layer], c[layer])
            x = h[layer]
    return h[-1]


def reference(model: Context2Vec, tokens: Tokens) -> Tensor:
    """Section 2.2: each position from the words before it, and from those after it, the last first."""
    w, rows = weights_of(model), []
    for ids in tokens.split():
        for place in range(len(ids)):
            before, after = ids[:place], ids[place + 1 :].flip(0)
            sides = torch.cat([last_states(model, before, 0), last_states(model, after, 1)])
            hidden = (w["fc1.weight"] @ sides + w["fc1.bias"]).clamp(min=0)
            rows.append(w["output.weight"] @ (w["fc2.weight"] @ hidden + w["fc2.bias"]))
    return torch.stack(rows)


@pytest.mark.parametrize("layers", [1, 2])
def test_it_is_its_equations(layers):
    model, tokens = make(layers=layers), draw([4, 1, 5])
    agree([model.logits(tokens)], [reference(model, tokens)], dict(model.named_parameters()))


def test_a_context_of_the_other_order_is_caught():
    """Negative control: the words after a place are read from the end."""
    model, tokens = make(), draw([5])
    mirrored = Tokens.flat(tokens.ids.flip(0), tokens.lengths)
    with pytest.raises(AssertionError, match="not close"):
        agree([model.logits(tokens)], [reference(model, mirrored).flip(0)], {})


@pytest.mark.parametrize("layers", [1, 2])
def test_it_keeps_what_every_model_keeps(layers):
    passed = check_model(Context2Vec, {**SMALL, "layers": layers}, VOCAB)
    roles = {Role.ENCODER, Role.MASKED_LM}
    assert Context2Vec.roles(make().config) == roles
    assert len(passed) == sum(needs <= {*roles, "both"} for needs in PROPERTIES.values())


class ReadsItself(Context2Vec):
    """Broken: the second layer reads both directions of the first, one of which has read the word itself."""

    def __init__(self, config, vocab, target_vocab=None):
        super().__init__(config, vocab, target_vocab)
        self.recurrent = RecurrentStack("lstm", config.embedding, 2 * config.cells, config.layers, "both")


@pytest.mark.usefixtures("wide_bound")
def test_one_that_reads_its_own_word_is_caught():
    with pytest.raises(AssertionError, match="not so: .*"):
        check_model(ReadsItself, {**SMALL, "layers": 2}, VOCAB)


def test_errors():
    model, tokens = make(), draw([3])
    with pytest.raises(ConfigError, match="has its contexts alone, -1"):
        model.encode(tokens, [0])
    with pytest.raises(RoleError, match="both sides of a word, but 'forward'"):
        model.logits(tokens, direction="forward")
    model.prune_unused({Role.ENCODER})
    assert model.output is None
    assert model.pooled_output(tokens).shape == (1, 5)


def test_it_fills_a_blank_with_the_word_that_fits(tmp_path):
    """Every word is learnt from its context as it stands: nothing is masked in training."""
    pairs = [("dog", "barks"), ("cat", "purrs"), ("cow", "moos"), ("hen", "clucks")]
    (tmp_path / "a.txt").write_text("\n".join(f"the {animal} {verb} at {verb}" for animal, verb in pairs * 4))
    recipe = {
        "task": {"name": "mlm", "mask_probability": 1.0, "sequences": "documents"},
        "data": {"train": str(tmp_path / "a.txt")},
        "tokenizer": {"name": "words", "specials": {"mask": "[MASK]"}},
        "model": {"name": "context2vec", "width": 16, "embedding": 16, "cells": 16},
        "train": {"steps": 60, "lr": 0.02, "batch_tokens": 128},
    }
    pipeline = weft.train(recipe, out=tmp_path / "run")
    answers = pipeline([f"the {animal} [MASK] at {verb}" for animal, verb in pairs], {"top": 3})
    assert [answer["fills"][0][0]["token"] for answer in answers] == [verb for _, verb in pairs]
    assert all(len(answer["fills"][0]) == 3 for answer in answers)
    text = pipeline.task.Example(text="the dog barks")
    items = pipeline.task.encode(text, pipeline.tokenizer, TruncationPolicy(20, "error"))
    batch = pipeline.task.collate(items, np.random.default_rng(0))
    assert batch.targets.tolist() == batch.tokens.ids[batch.positions.ids].tolist()
    assert len(batch.targets) == 3
