"""fastText against a mean over the n-grams of one sentence at a time, and its properties."""

import pytest
import torch

from weft.config.schema import read_section
from weft.errors import ConfigError
from weft.models import fasttext
from weft.models.base import Role
from weft.models.fasttext import FastText, FastTextConfig
from weft.testing import check_model
from weft.tokens import Tokens

VOCAB = 11
RAGGED = (4, 1, 7, 2)


def make(seed=0, **config):
    torch.manual_seed(seed)
    config = {"name": "fasttext", "width": 6, "buckets": 50, **config}
    return FastText(FastTextConfig.model_validate(config), VOCAB).double().eval()


def draw(lengths=RAGGED):
    torch.manual_seed(1)
    return Tokens.flat(torch.randint(VOCAB, (sum(lengths),)), torch.tensor(lengths))


def bucket(model, ids):
    value = 0
    for number in ids:
        value = (value * 116_049_371 + number + 2**63) % 2**64 - 2**63  # as int64 wraps around
    return value % model.config.buckets


def reference(model, ids):
    """Return the sum of what ends at each position, (T, D), and the mean over the words and n-grams, (D,)."""
    ends = [[model.embed.weight[number]] for number in ids]
    for size in range(2, model.config.ngrams + 1):
        for end in range(size - 1, len(ids)):
            ends[end].append(model.ngrams.weight[bucket(model, ids[end - size + 1 : end + 1])])
    features = [feature for position in ends for feature in position]
    return torch.stack([torch.stack(position).sum(0) for position in ends]), torch.stack(features).mean(0)


@pytest.mark.usefixtures("narrow_bound")
@pytest.mark.parametrize("config", [{}, {"ngrams": 1}, {"ngrams": 4, "buckets": 7}, {"dropout": 0.5}], ids=str)
def test_every_property_of_an_encoder_holds(config):
    assert "a sequence alone answers as in any batch" in check_model(FastText, {"width": 6, "buckets": 50, **config})
    assert FastText.roles(FastTextConfig(name="fasttext")) == {Role.ENCODER}


@pytest.mark.parametrize("ngrams", [1, 2, 5])
def test_it_is_the_mean_over_the_words_and_ngrams_of_each_sentence(ngrams):
    model, tokens = make(ngrams=ngrams), draw()
    states, pooled = model.encode(tokens)[0], model.pooled_output(tokens)
    alone = [reference(model, ids.tolist()) for ids in tokens.split()]
    torch.testing.assert_close(states, torch.cat([state for state, _ in alone]))
    torch.testing.assert_close(pooled, torch.stack([mean for _, mean in alone]))
    parameters = list(model.parameters())
    weights = torch.randn(len(RAGGED), model.width, dtype=torch.float64)
    ours = torch.autograd.grad((pooled * weights).sum(), parameters)
    expected = sum((mean * weight).sum() for (_, mean), weight in zip(alone, weights, strict=True))
    for mine, yours in zip(ours, torch.autograd.grad(expected, parameters), strict=True):
        torch.testing.assert_close(mine, yours)


@pytest.mark.usefixtures("wide_bound")
def test_an_ngram_that_reaches_into_the_next_sentence_is_caught(monkeypatch):
    monkeypatch.setattr(fasttext, "positions_of", lambda tokens: torch.arange(len(tokens.ids)))
    with pytest.raises(AssertionError, match="not so: a sequence alone answers as in any batch"):
        check_model(FastText, {"width": 6, "buckets": 50})


def test_the_order_of_words_matters_with_ngrams_alone():
    there, back = Tokens.pack([[1, 2, 3]]), Tokens.pack([[3, 2, 1]])
    words, bigrams = make(ngrams=1), make(ngrams=2)
    torch.testing.assert_close(words.pooled_output(there), words.pooled_output(back))
    assert (bigrams.pooled_output(there) - bigrams.pooled_output(back)).abs().max() > 1e-3
    assert words.ngrams is None


def test_empty_sequences_among_others_change_nothing():
    model, tokens = make(ngrams=3), draw()
    gaps = Tokens.flat(tokens.ids, torch.tensor([0, 4, 1, 0, 7, 2, 0]))
    actual = model.pooled_output(gaps)
    torch.testing.assert_close(actual[[1, 2, 4, 5]], model.pooled_output(tokens))
    assert not actual[[0, 3, 6]].any()
    assert model.pooled_output(Tokens.pack([[], []])).tolist() == [[0.0] * 6] * 2


def test_dropout_leaves_out_whole_features_in_training_only():
    model, tokens = make(ngrams=1, dropout=0.5), draw((1,) * 200)
    expected = model.encode(tokens)[0]
    torch.testing.assert_close(model.encode(tokens)[0], expected)
    torch.manual_seed(2)
    dropped = model.train().encode(tokens)[0]
    kept = dropped.any(1)
    assert 60 < int(kept.sum()) < 140
    torch.testing.assert_close(dropped[kept], 2 * expected[kept])
    assert not dropped[~kept].any()


def test_static_vectors_are_not_trained():
    model = make(vectors="vectors.txt", channels="static")
    assert [name for name, parameter in model.named_parameters() if parameter.requires_grad] == ["ngrams.weight"]
    with pytest.raises(ConfigError, match="there is no model.vectors"):
        read_section(FastTextConfig, {"name": "fasttext", "channels": "static"}, "model")


def test_a_layer_that_it_lacks_is_refused():
    model, tokens = make(), draw()
    assert torch.equal(*model.encode(tokens, layers=(0, -1)))
    with pytest.raises(ConfigError, match=r"layers: fasttext has one, 0 or -1, but \[1\] is asked for"):
        model.encode(tokens, layers=(1,))
