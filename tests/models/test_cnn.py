"""Kim's network against a convolution of one sentence at a time, and its properties."""

import pytest
import torch
from torch.nn import functional as F

from weft.config.schema import read_section
from weft.errors import ConfigError, RoleError
from weft.models import cnn
from weft.models.base import Role
from weft.models.cnn import CNN, CNNConfig
from weft.testing import check_model
from weft.tokens import Tokens

VOCAB = 11
RAGGED = (4, 1, 7, 2)


def make(seed=0, **config):
    torch.manual_seed(seed)
    config = {"name": "cnn", "width": 6, "kernels": [3, 4, 5], **config}
    return CNN(CNNConfig.model_validate(config), VOCAB).double().eval()


def draw(lengths=RAGGED):
    torch.manual_seed(1)
    return Tokens.flat(torch.randint(VOCAB, (sum(lengths),)), torch.tensor(lengths))


def reference(model, ids):
    """Convolve one sentence with the library's own kernel, "same" padded: features (T, D) and their maximum (D,)."""
    embedded = model.embed.weight[ids]
    maps = []
    for size, layer in zip(model.config.kernels, model.filters, strict=True):
        weight = layer.weight.view(len(layer.bias), size, -1).transpose(1, 2)
        padded = F.pad(embedded.T, ((size - 1) // 2, size // 2))
        maps.append(F.conv1d(padded[None], weight, layer.bias)[0].T)
    features = torch.cat(maps, 1).clamp(min=0)
    return features, features.amax(0)


@pytest.mark.usefixtures("narrow_bound")
@pytest.mark.parametrize(
    "config",
    [{}, {"kernels": [1], "width": 4}, {"kernels": [2, 6], "embedding": 3}, {"embedding": 5, "dropout": 0.5}],
    ids=str,
)
def test_every_property_of_an_encoder_holds(config):
    assert "a sequence alone answers as in any batch" in check_model(CNN, {"width": 6, **config})
    assert CNN.roles(CNNConfig(name="cnn")) == {Role.ENCODER}


@pytest.mark.parametrize("kernels", [[3, 4, 5], [1, 2, 9], [2]])
def test_it_is_a_convolution_and_a_maximum_over_time_of_each_sentence(kernels):
    model, tokens = make(kernels=kernels, embedding=5), draw()
    maps, pooled = model.encode(tokens)[0], model.pooled_output(tokens)
    alone = [reference(model, ids) for ids in tokens.split()]
    torch.testing.assert_close(maps, torch.cat([feature_map for feature_map, _ in alone]))
    torch.testing.assert_close(pooled, torch.stack([maximum for _, maximum in alone]))
    assert len(set(tokens.split()[2].tolist())) < 7  # a word occurs twice: so does a maximum of a window of one word
    parameters = list(model.parameters())
    weights = torch.randn(len(RAGGED), model.width, dtype=torch.float64)
    ours = torch.autograd.grad((pooled * weights).sum() + maps.square().sum(), parameters)
    expected = sum(
        (maximum * weight).sum() + every.square().sum() for (every, maximum), weight in zip(alone, weights, strict=True)
    )
    for mine, yours in zip(ours, torch.autograd.grad(expected, parameters), strict=True):
        torch.testing.assert_close(mine, yours)


@pytest.mark.usefixtures("wide_bound")
def test_a_window_that_reaches_into_the_next_sentence_is_caught(monkeypatch):
    def leaking(tokens, before, after):
        total = int(tokens.lengths.sum())
        return (torch.arange(total)[:, None] + torch.arange(-before, after + 1)).clamp(0, total)

    monkeypatch.setattr(cnn, "_window_positions", leaking)
    with pytest.raises(AssertionError, match="not so: a sequence alone answers as in any batch"):
        check_model(CNN, {"width": 6})


def test_embeddings_start_small():
    assert 0.2 < make().embed.weight.detach().abs().max() <= 0.25
    multichannel = make(channels="multichannel", vectors="vectors.txt")
    assert torch.equal(multichannel.embed.weight, multichannel.static.weight)


def test_width_is_that_of_what_it_gives():
    model, tokens = make(width=9, embedding=4), draw()
    assert model.width == model.encode(tokens).shape[-1] == model.pooled_output(tokens).shape[-1] == 9


def test_layer_0_is_the_embeddings_and_1_the_features():
    model, tokens = make(), draw()
    both = model.encode(tokens, layers=(0, 1))
    assert both.shape == (2, sum(RAGGED), 6)
    assert torch.equal(both[0], model.embed.weight[tokens.ids])
    assert torch.equal(both[1], model.encode(tokens)[0])
    assert torch.equal(model.encode(tokens, layers=(-2,))[0], both[0])


def test_layers_that_it_lacks_or_cannot_stack_are_refused():
    with pytest.raises(ConfigError, match=r"layers: a cnn has 0, the embeddings, and 1, the features, but \[2\] is"):
        make().encode(draw(), layers=(2,))
    narrow = make(embedding=4)
    assert narrow.encode(draw(), layers=(0,)).shape[-1] == 4
    with pytest.raises(RoleError, match="embeddings are 4 wide and features 6: they cannot be stacked; ask for one"):
        narrow.encode(draw(), layers=(0, -1))


def test_empty_sequences_among_others_change_nothing_and_spoil_no_gradient():
    model, tokens = make(), draw()
    gaps = Tokens.flat(tokens.ids, torch.tensor([0, 4, 1, 0, 7, 2, 0]))
    actual, expected = model.pooled_output(gaps), model.pooled_output(tokens)
    torch.testing.assert_close(actual[[1, 2, 4, 5]], expected)
    assert not actual[[0, 3, 6]].any()
    parameters = list(model.parameters())
    ours, theirs = (torch.autograd.grad(side.square().sum(), parameters) for side in (actual, expected))
    for mine, yours in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, yours)
    nothing = Tokens.pack([[], []])
    assert model.encode(nothing).shape == (1, 0, 6)
    assert model.pooled_output(nothing).tolist() == [[0.0] * 6] * 2


def test_dropout_is_on_embeddings_and_in_training_only():
    model, tokens = make(dropout=0.5), draw()
    still = make(dropout=0.0)
    assert torch.equal(model.encode(tokens), still.encode(tokens))  # the same weights: the same seed
    model.train()
    dropped = model.encode(tokens, layers=(0,))[0]
    assert set((dropped / model.embed.weight[tokens.ids]).round(decimals=9).unique().tolist()) == {0.0, 2.0}
    assert not torch.equal(model.encode(tokens), model.encode(tokens))


def test_it_runs_in_half_precision_too():
    model, tokens = make().float(), draw()
    with torch.autocast("cpu", torch.bfloat16):
        half = model.pooled_output(tokens)
    torch.testing.assert_close(half.float(), model.pooled_output(tokens), rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"width": 7}, "model: model.width must be a multiple of 3, the kernels: got 7; try 9"),
        ({"kernels": []}, r"model.kernels must be widths of 1 or more, but is \[\]; try \[3, 4, 5\]"),
        ({"kernels": [3, 0]}, r"model.kernels must be widths of 1 or more, but is \[3, 0\]"),
        ({"filters": 3}, "model.filters: unknown key"),
    ],
)
def test_a_wrong_config_is_refused_with_the_remedy(raw, message):
    with pytest.raises(ConfigError, match=message):
        read_section(CNNConfig, {"name": "cnn", **raw}, "model")


# Channels: Kim's static, non-static and multichannel (section 3.1).


def gradients(model):
    model.pooled_output(draw()).square().sum().backward()
    return {name for name, value in model.named_parameters() if value.grad is not None and value.grad.any()}


@pytest.mark.parametrize(
    ("channels", "trained"), [("nonstatic", {"embed.weight"}), ("static", set()), ("multichannel", {"embed.weight"})]
)
def test_gradients_reach_the_channels_that_are_not_static(channels, trained):
    model = make(vectors="x", channels=channels)
    assert {name for name in gradients(model) if not name.startswith("filters.")} == trained
    assert {"filters.0.weight", "filters.2.bias"} <= gradients(model)


def test_two_channels_start_equal_and_their_convolutions_are_added():
    model, tokens = make(vectors="x", channels="multichannel", embedding=5), draw()
    assert torch.equal(model.embed.weight, model.static.weight)
    assert model.embed.weight.data_ptr() != model.static.weight.data_ptr()
    with torch.no_grad():
        model.embed.weight += torch.randn_like(model.embed.weight)  # as after training
    maps = []
    for size, layer in zip(model.kernels, model.filters, strict=True):
        weights = layer.weight.view(len(layer.bias), size, 2, 5).permute(2, 0, 3, 1)  # one filter a channel
        sums = []
        for ids in tokens.split():
            padding = ((size - 1) // 2, size // 2)
            each = zip((model.embed, model.static), weights, strict=True)
            sums.append(sum(F.conv1d(F.pad(table.weight[ids].T, padding)[None], w)[0].T for table, w in each))
        maps.append(torch.cat(sums) + layer.bias)
    torch.testing.assert_close(model.encode(tokens)[0], torch.cat(maps, 1).clamp(min=0))
    before = model.encode(tokens)
    with torch.no_grad():
        model.static.weight += 1  # the negative control: it is read
    assert not torch.equal(model.encode(tokens), before)
    assert model.encode(tokens, layers=(0,)).shape[-1] == 10


@pytest.mark.parametrize("channels", ["static", "multichannel"])
def test_every_property_holds_with_static_channels(channels):
    check_model(CNN, {"width": 6, "embedding": 3, "vectors": "x", "channels": channels})


@pytest.mark.parametrize("channels", ["static", "multichannel"])
def test_static_channels_need_vectors(channels):
    with pytest.raises(ConfigError, match=f"model.channels: {channels} keeps .* there is no model.vectors; name a"):
        read_section(CNNConfig, {"name": "cnn", "channels": channels}, "model")
