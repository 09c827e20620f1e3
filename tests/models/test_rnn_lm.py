"""Recurrent language models: AWD-LSTM's dropouts against its equations with given masks, and the three directions."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.equations import affine, agree, below, lstm, scatter, weights_of, zeros
from torch import Tensor

from weft.errors import RoleError
from weft.models.rnn import RNN, RNNConfig
from weft.nn.layers import dropout
from weft.nn.rnn import cells
from weft.tokens import Tokens

quick = settings(deadline=None, derandomize=True, max_examples=15)

VOCAB = 9
RAGGED, EVEN = [4, 1, 6, 3], [5, 5, 5]
AWD = {
    "width": 5,
    "layers": 3,
    "embedding": 3,
    "tie": True,
    "variational": True,
    "dropout_embed": 0.2,
    "dropout_input": 0.3,
    "dropout_hidden": 0.4,
    "dropout_output": 0.5,
    "dropout_recurrent": 0.6,
}


def make(seed: int = 0, **config: object) -> RNN:
    model = RNN(RNNConfig(name="rnn", **{"width": 4, **config}), VOCAB).double().eval()
    scatter(model, seed)
    return model


def draw(lengths: list[int]) -> Tokens:
    return Tokens.flat(torch.randint(VOCAB, (sum(lengths),)), torch.tensor(lengths))


# AWD-LSTM.


@pytest.fixture
def drawn(monkeypatch):
    """Return the list that masks are written to, with their shares, in the order in which they are drawn."""
    masks, draw_mask = [], dropout.draw_mask

    def watched(p: float, shape: tuple[int, ...], like: Tensor) -> Tensor:
        mask = draw_mask(p, shape, like)
        masks.append((p, mask))
        return mask

    monkeypatch.setattr(dropout, "draw_mask", watched)
    monkeypatch.setattr(cells, "draw_mask", watched)
    return masks


def awd_lstm(model: RNN, row: int, ids: list[int], masks: list[Tensor]) -> Tensor:
    """Read one sentence as Merity et al. 2018 do: sections 2, 4.2, 4.3 and 4.5; return its logits (T, V)."""
    w, (words, inputs, *deep, outputs) = weights_of(model), masks
    x = [w["embed.weight"][token] * words[token] * inputs[row] for token in ids]
    for depth in range(3):
        layer = dict(below(w, f"recurrent.layers.{depth}.0"))
        layer["kernel.weight_hh_l0"] = layer["kernel.weight_hh_l0"] * deep[2 * depth]
        h, c, walked = *zeros("lstm", layer["kernel.weight_hh_l0"].shape[1]), []
        for embedded in x:
            h, c = lstm(layer, embedded, h, c)
            walked.append(h)
        mask = deep[2 * depth + 1] if depth < 2 else outputs
        x = [h * mask[row] for h in walked]
    return torch.stack([affine(w, "output", hidden) for hidden in x])


def check_awd(model: RNN, lengths: list[int], ask: str, drawn: list[tuple[float, Tensor]]) -> None:
    tokens = draw(lengths)
    drawn.clear()
    actual = model.logits(tokens) if ask == "logits" else model.read(tokens)[0]
    assert [p for p, _ in drawn] == [0.2, 0.3, 0.6, 0.4, 0.6, 0.4, 0.6, 0.5]
    masks = [mask for _, mask in drawn]
    expected = [awd_lstm(model, row, ids.tolist(), masks) for row, ids in enumerate(tokens.split())]
    agree([actual], [torch.cat(expected)], dict(model.named_parameters()))


@pytest.mark.parametrize("ask", ["logits", "read"])
@pytest.mark.parametrize("lengths", [RAGGED, EVEN], ids=["ragged", "even"])
def test_it_is_the_awd_lstm_of_its_masks_and_so_are_its_gradients(lengths, ask, drawn):
    check_awd(make(1, **AWD).train(), lengths, ask, drawn)


def test_masks_that_do_not_last_are_caught(drawn):
    """The negative control: the same network with a mask a step."""
    model = make(1, **AWD).train()
    model.recurrent.dropout.kept = False
    with pytest.raises(AssertionError):
        check_awd(model, EVEN, "logits", drawn)


def test_its_layers_are_as_wide_as_the_papers():
    model = RNN(RNNConfig(name="rnn", **{**AWD, "width": 23, "embedding": 8}), VOCAB)
    assert [(cell.inputs, cell.width) for (cell,) in model.recurrent.layers] == [(8, 23), (23, 23), (23, 8)]
    assert model.output.weight is model.embed.weight
    assert model.width == 8
    assert model.pooled_output(draw(RAGGED)).shape == (4, 8)
    with pytest.raises(RoleError, match="layers: layer 2 is 23 wide and the last is 8"):
        model.eval().encode(draw(RAGGED), layers=(2, 3))


def test_out_of_training_nothing_is_dropped():
    plain = {key: AWD[key] for key in ("width", "layers", "embedding", "tie")}
    model, still, tokens = make(2, **AWD), make(2, **plain), draw(RAGGED)
    assert torch.equal(model.logits(tokens), still.logits(tokens))
    assert not torch.equal(model.train().logits(tokens), still.train().logits(tokens))
    assert torch.equal(model.eval().read(tokens)[0], still.eval().read(tokens)[0])


@pytest.mark.parametrize("own", ["dropout_input", "dropout_output", "dropout_embed"])
def test_on_average_nothing_changes(own):
    """What is dropped before a linear map leaves its mean: here all of the network is one."""
    torch.manual_seed(3)
    model = make(3, cell="elman", variational=True, **{own: 0.3})
    with torch.no_grad():
        for part in model.recurrent.parameters():
            part.mul_(1e-4)  # tanh x = x
        model.output.weight.mul_(1e4)
        tokens = draw([3])
        expected, model = model.logits(tokens), model.train()
        samples = torch.stack([model.logits(tokens) for _ in range(1000)])
    error = samples.std(0) / 1000**0.5
    assert ((samples.mean(0) - expected).abs() < 5 * error + 1e-6).all()
    assert (error > 0).any()


def test_one_dropout_is_that_of_all_three_places_unless_they_have_their_own():
    shares = [
        (model.drop_input.p, model.recurrent.dropout.p, model.drop_output.p)
        for model in (make(dropout=0.3), make(dropout=0.3, dropout_hidden=0.0, dropout_output=0.1))
    ]
    assert shares == [(0.3, 0.3, 0.3), (0.3, 0.0, 0.1)]


def test_a_gradient_through_all_dropouts_is_that_of_differences():
    """Finite differences, with the masks held by a seed."""
    model, tokens = make(4, **{**AWD, "layers": 2}).train(), draw([3, 2])
    names = [name for name, _ in model.named_parameters()]

    def loss(*values: Tensor) -> Tensor:
        torch.manual_seed(5)
        return torch.func.functional_call(model, dict(zip(names, values, strict=True)), (tokens,)).square().sum()

    model.forward = model.logits
    values = tuple(value.detach().requires_grad_() for value in model.parameters())
    assert torch.autograd.gradcheck(loss, values, fast_mode=True)


def test_a_text_in_pieces_reads_as_the_whole_with_every_dropout_configured():
    model, tokens = make(6, **AWD), draw([8, 8])
    first, second = (Tokens.pack([ids[part].tolist() for ids in tokens.split()]) for part in (slice(5), slice(5, 8)))
    first_logits, state = model.read(first)
    two, _ = model.read(second, model.carried(state))
    actual = torch.cat([part for pair in zip(first_logits.split(5), two.split(3), strict=True) for part in pair])
    torch.testing.assert_close(actual, model.logits(tokens), rtol=1e-12, atol=1e-12)


# The three directions.


def mirrored(tokens: Tokens) -> Tokens:
    return Tokens.pack([ids.flip(0).tolist() for ids in tokens.split()])


@pytest.mark.parametrize("cell", ["elman", "jordan", "lstm", "peephole", "gru"])
def test_backward_is_forward_over_the_text_reversed(cell):
    ahead, back = (
        make(7, cell=cell, layers=2, residual=True, direction=direction) for direction in ("forward", "backward")
    )
    tokens = draw(RAGGED)
    actual = back.logits(tokens, direction="backward").split(RAGGED)
    expected = ahead.logits(mirrored(tokens)).split(RAGGED)
    torch.testing.assert_close(
        torch.cat(actual), torch.cat([part.flip(0) for part in expected]), rtol=1e-12, atol=1e-12
    )
    assert not torch.allclose(torch.cat(actual), torch.cat(expected))


@quick
@given(
    st.fixed_dictionaries(
        {
            "cell": st.sampled_from(["elman", "jordan", "lstm", "peephole", "gru"]),
            "layers": st.integers(1, 3),
            "residual": st.booleans(),
            "attention": st.sampled_from(["none", "dot"]),
        }
    ),
    st.integers(1, 7),
    st.integers(0, 99),
)
def test_a_word_is_given_from_all_others_and_never_from_itself(config, length, seed):
    model, tokens = make(seed, direction="both", apart=True, **config), draw([2, length, 3])
    before = model.logits(tokens, direction="both")
    for place in range(length):
        changed = tokens.ids.clone()
        changed[2 + place] = (changed[2 + place] + 1) % VOCAB
        after = model.logits(Tokens.flat(changed, tokens.lengths), direction="both")
        same = (after == before).all(1)
        assert same[2 + place]
        assert same[:2].all()
        assert same[2 + length :].all()
        assert not same[2 : 2 + length][torch.arange(length) != place].any()


def test_layers_that_meet_would_tell_a_word_to_itself():
    """The negative control, and why such a network has no output."""
    model = make(8, direction="both", layers=2)
    assert model.output is None
    grid_free, tokens = make(8, direction="both", layers=2, apart=True), draw([5])
    grid_free.recurrent = model.recurrent  # as if it were allowed
    changed = tokens.ids.clone()
    changed[2] = (changed[2] + 1) % VOCAB
    logits, changed_logits = (
        grid_free.logits(Tokens.flat(ids, tokens.lengths), direction="both") for ids in (tokens.ids, changed)
    )
    assert not torch.equal(logits[2], changed_logits[2])


def test_a_lone_word_is_given_from_nothing():
    model = make(9, direction="both")
    torch.testing.assert_close(model.logits(draw([1]), direction="both")[0], model.output.bias)


@pytest.mark.parametrize(
    ("direction", "requested"), [("forward", "both"), ("backward", "forward"), ("both", "forward")]
)
def test_another_direction_than_its_own_is_refused(direction, requested):
    with pytest.raises(
        RoleError, match=f"direction: this rnn reads {direction}, but is asked for {requested}; see model"
    ):
        make(direction=direction).logits(draw(RAGGED), direction=requested)


@pytest.mark.parametrize("direction", ["forward", "backward", "both"])
def test_log_prob_is_that_of_the_targets(direction):
    model, tokens, targets = make(10, direction=direction), draw(RAGGED), torch.randint(VOCAB, (sum(RAGGED),))
    expected = model.logits(tokens, direction=direction).log_softmax(-1)[torch.arange(len(targets)), targets]
    torch.testing.assert_close(model.log_prob(tokens, targets, direction), expected)
