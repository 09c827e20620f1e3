"""RNN against plain references of its equations, read whole and in pieces, and what its configurations promise."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import equations
from tests.equations import CELLS, affine, agree, below, scatter, weights_of
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence

from weft.config.schema import read_section
from weft.errors import ConfigError, WeftError
from weft.models.base import Role
from weft.models.rnn import RNN, RNNConfig, RNNState
from weft.nn.attention.capture import capture
from weft.nn.kernels import dispatch
from weft.nn.rnn.time_major import TimeMajor
from weft.testing import check_model
from weft.tokens import Tokens

quick = settings(deadline=None, derandomize=True, max_examples=12)

VOCAB = 7
RAGGED = [4, 1, 6, 3]
DIRECTIONS = ("forward", "backward", "both")
SCORES = [name for name in equations.SCORES if name != "location"]


def make(seed: int = 0, **config: object) -> RNN:
    model = RNN(RNNConfig(name="rnn", **{"width": 4, **config}), VOCAB).double().eval()
    scatter(model, seed)
    return model


def draw(lengths: list[int], vocab: int = VOCAB) -> Tokens:
    return Tokens.flat(torch.randint(vocab, (sum(lengths),)), torch.tensor(lengths))


# Against the equations.


def reference(model: RNN, ids: list[int]) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return one sentence's embeddings and layers, (T, D) each, its pooled output (D,), and its logits (T, V)."""
    w, config = weights_of(model), model.config
    embedded = [w["embed.weight"][token] for token in ids]
    outputs, ends = equations.stack(
        config.cell,
        below(w, "recurrent"),
        embedded,
        config.width,
        config.direction,
        config.residual,
        config.attention,
        config.last,
        config.apart,
    )
    hidden = outputs[-1]
    if config.direction == "both":
        half, nothing = config.last // 2, torch.zeros(config.last // 2, dtype=torch.float64)
        before = [nothing, *(h[:half] for h in hidden[:-1])]
        after = [*(h[half:] for h in hidden[1:]), nothing]
        hidden = [torch.cat(sides) for sides in zip(before, after, strict=True)]
    logits = [affine(w, "output", h) for h in hidden] if "output.weight" in w else embedded
    return [torch.stack(layer) for layer in (embedded, *outputs)], ends[-1], torch.stack(logits)


def check(model: RNN, lengths: list[int]) -> None:
    """Compare all that reads whole sequences: encode, pooled_output, logits, and their gradients."""
    tokens, deep = draw(lengths), model.config.layers
    alone = [reference(model, ids.tolist()) for ids in tokens.split() if len(ids)]
    full = torch.tensor(lengths) > 0
    actual, expected = [model.pooled_output(tokens)[full]], [torch.stack([pooled for _, pooled, _ in alone])]
    for layer in [layer for layer in range(1, deep + 1) if layer == deep or model.width == model.config.width]:
        actual.append(model.encode(tokens, layers=(layer,))[0])
        expected.append(torch.cat([layers[layer] for layers, _, _ in alone]))
    if model.output is not None:
        actual.append(model.logits(tokens, direction=model.config.direction))
        expected.append(torch.cat([logits for _, _, logits in alone]))
    agree(actual, expected, dict(model.named_parameters()))
    assert not model.pooled_output(tokens)[~full].any()


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("cell", CELLS)
def test_it_is_its_equations_forward_and_backward(cell, direction):
    check(make(1, cell=cell, direction=direction, layers=2), RAGGED)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("attention", SCORES)
def test_it_is_so_with_attention_over_its_own_states(attention, direction):
    check(make(2, attention=attention, direction=direction), RAGGED)


@pytest.mark.parametrize(
    "config",
    [
        {"layers": 1, "residual": True},
        {"layers": 3, "residual": True, "direction": "both"},
        {"layers": 3, "residual": True, "embedding": 5},
        {"layers": 3, "direction": "backward", "embedding": 3},
        {"layers": 2, "tie": True, "cell": "gru"},
        {"layers": 3, "tie": True, "embedding": 2},
        {"layers": 2, "tie": True, "embedding": 6, "direction": "both", "apart": True},
        {"layers": 3, "direction": "both", "apart": True, "residual": True, "attention": "dot"},
        {"layers": 2, "tie": True, "cell": "jordan", "direction": "both", "residual": True},
        {"layers": 3, "cell": "peephole", "attention": "additive", "residual": True, "embedding": 2},
    ],
    ids=str,
)
def test_it_is_so_deep_tied_and_with_ways_around(config):
    check(make(3, **config), RAGGED)


@pytest.mark.parametrize("attention", ["none", "dot", "scaled-dot", "cosine"])
@pytest.mark.parametrize("cell", ["peephole", "jordan"])
def test_it_is_so_in_kernels_too(cell, attention, monkeypatch):
    """By default they run in single precision only; tests/nn/test_scan.py has them for every cell."""
    monkeypatch.setattr(dispatch, "SCAN_DTYPE", torch.float64)
    for direction in DIRECTIONS:
        check(make(4, cell=cell, attention=attention, direction=direction, layers=2), RAGGED)


@pytest.mark.parametrize("attention", ["none", "scaled-dot"])
def test_single_precision_is_close_to_the_reference(attention):
    model, tokens = make(5, cell="peephole", attention=attention), draw([9, 4, 7])
    single = make(5, cell="peephole", attention=attention).float()
    single.load_state_dict(model.state_dict())
    actual, expected = single.logits(tokens), torch.cat([reference(model, ids.tolist())[2] for ids in tokens.split()])
    torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-4)
    mine = torch.autograd.grad(actual.square().sum(), list(single.parameters()))
    yours = torch.autograd.grad(expected.square().sum(), list(model.parameters()))
    for gradient, expected_gradient in zip(mine, yours, strict=True):
        assert (gradient.double() - expected_gradient).norm() < 1e-4 * expected_gradient.norm()


@quick
@given(
    st.fixed_dictionaries(
        {
            "cell": st.sampled_from(CELLS),
            "direction": st.sampled_from(DIRECTIONS),
            "layers": st.integers(1, 3),
            "residual": st.booleans(),
            "attention": st.sampled_from(["none", "none", *SCORES]),
            "embedding": st.sampled_from([None, 6]),
            "tie": st.booleans(),
            "apart": st.booleans(),
        }
    ).map(lambda config: {**config, "apart": config["apart"] and config["direction"] == "both"}),
    st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(any),
    st.integers(0, 99),
)
def test_it_is_so_for_any_configuration_and_lengths(config, lengths, seed):
    check(make(seed, **config), lengths)


def test_another_direction_residual_or_cell_is_caught():
    """Negative control: the reference gets another configuration."""
    for had, change in (
        ({"direction": "both", "layers": 2, "apart": True}, {"residual": True}),
        ({"residual": True}, {"residual": False}),
        ({"attention": "dot"}, {"attention": "scaled-dot"}),
    ):
        model = make(4, **had)
        model.config = model.config.model_copy(update=change)
        with pytest.raises(AssertionError, match="not close"):
            check(model, RAGGED)


@pytest.mark.parametrize(("cell", "kind"), [("elman", nn.RNN), ("lstm", nn.LSTM), ("gru", nn.GRU)])
@pytest.mark.parametrize("direction", ["forward", "both"])
def test_it_is_embeddings_and_torchs_own_network(cell, kind, direction):
    """A second reference: torch.nn.RNN, LSTM and GRU over packed sequences."""
    model, tokens, num_directions = (
        make(5, cell=cell, direction=direction, layers=2),
        draw(RAGGED),
        1 + (direction == "both"),
    )
    theirs = kind(4, 4 // num_directions, 2, bidirectional=num_directions == 2, dtype=torch.float64)
    with torch.no_grad():
        for name, weight in below(weights_of(model), "recurrent").items():
            _, depth, direction_index, _, own = name.split(".")
            theirs.get_parameter(f"{own[:-1]}{depth}{'_reverse' if direction_index == '1' else ''}").copy_(weight)
        walked, _ = theirs(pack_sequence(tokens.split(model.embed(tokens.ids)), enforce_sorted=False))
        rows = pad_packed_sequence(walked)[0].unbind(1)
        expected = torch.cat([row[:length] for row, length in zip(rows, RAGGED, strict=True)])
        torch.testing.assert_close(model.encode(tokens)[0], expected, rtol=1e-12, atol=1e-12)


COVERING = [  # every value of every key, and every cell
    {"cell": "elman", "attention": "scaled-dot", "tie": True},
    {"cell": "jordan", "attention": "cosine"},
    {"cell": "lstm", "attention": "dot", "embedding": 3},
    {"cell": "peephole", "layers": 3, "embedding": 5, "dropout": 0.3},
    {"cell": "gru", "attention": "additive", "layers": 2, "residual": True},
    {"cell": "gru", "tie": True, "dropout": 0.3},
    {"cell": "jordan", "direction": "both", "layers": 2, "residual": True},
    {"cell": "lstm", "direction": "both", "tie": True, "dropout": 0.3},
    {"cell": "peephole", "direction": "both", "attention": "general"},
    {"cell": "elman", "direction": "backward", "layers": 2, "residual": True},
    {"cell": "gru", "direction": "backward", "attention": "scaled-dot", "embedding": 5},
    {"cell": "lstm", "direction": "both", "layers": 2, "apart": True, "tie": True, "embedding": 6, "variational": True},
    {"cell": "lstm", "layers": 3, "tie": True, "embedding": 2, "dropout_embed": 0.1, "dropout_recurrent": 0.5},
]


@pytest.mark.parametrize("config", COVERING, ids=str)
def test_every_property_of_its_roles_holds(config):
    held, forward = check_model(RNN, {"width": 4, **config}), "direction" not in config
    assert "a sequence alone answers as in any batch" in held
    fills = config.get("direction") == "both" and (config.get("layers", 1) == 1 or "apart" in config)
    assert ("a position depends on both sides but not on itself" in held) is fills
    assert ("past tokens change nothing" in held) is (config.get("direction") == "backward")
    assert ("future tokens change nothing" in held) is forward
    assert ("start and step agree with reading all at once" in held) is forward


# Reading in pieces.


def pieces(tokens: Tokens, cuts: list[list[int]]) -> list[Tokens]:
    """Return batches of segments: each sequence is cut into these lengths, and equal numbers make a batch."""
    rows = [ids.split(lengths) for ids, lengths in zip(tokens.split(), cuts, strict=True)]
    return [Tokens.pack([part.tolist() for part in parts]) for parts in zip(*rows, strict=True)]


def in_order(read: list[Tensor], cuts: list[list[int]]) -> Tensor:
    """Return the logits of the segments in the order of the whole sequences."""
    parts = [flat.split([lengths[number] for lengths in cuts]) for number, flat in enumerate(read)]
    return torch.cat([part[row] for row in range(len(cuts)) for part in parts])


def read_in_pieces(model: RNN, tokens: Tokens, cuts: list[list[int]], carry: bool) -> tuple[Tensor, RNNState]:
    state, read = None, []
    for piece in pieces(tokens, cuts):
        logits, state = model.read(piece, state)
        state = model.carried(state) if carry else state
        read.append(logits)
    return in_order(read, cuts), state


CUTS = [[2, 2, 2], [1, 0, 4], [3, 1, 1], [0, 2, 0]]
EVEN = [[2, 3], [2, 3]]


@pytest.mark.parametrize("cuts", [CUTS, EVEN], ids=["ragged", "even"])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("cell", CELLS)
def test_a_text_in_pieces_with_a_carried_state_reads_as_the_whole(cell, layers, cuts):
    model, tokens = make(6, cell=cell, layers=layers, residual=True), draw([sum(lengths) for lengths in cuts])
    whole, after = model.read(tokens)
    torch.testing.assert_close(whole, model.logits(tokens), rtol=1e-12, atol=1e-12)
    actual, state = read_in_pieces(model, tokens, cuts, carry=True)
    torch.testing.assert_close(actual, whole, rtol=1e-12, atol=1e-12)
    for layer, expected_layer in zip(state.layers, after.layers, strict=True):
        for part, expected in zip(layer, expected_layer, strict=True):
            torch.testing.assert_close(part, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("attention", SCORES)
@pytest.mark.parametrize("cell", ["gru", "peephole"])
def test_with_attention_it_does_so_with_the_whole_state(cell, attention):
    model, tokens = make(7, cell=cell, layers=2, attention=attention), draw([sum(lengths) for lengths in CUTS])
    actual, _ = read_in_pieces(model, tokens, CUTS, carry=False)
    torch.testing.assert_close(actual, model.logits(tokens), rtol=1e-12, atol=1e-12)


def test_with_attention_a_carried_state_is_one_step_to_look_back_at():
    """So a piece reads as after its last step alone: the tape does not grow with the text."""
    model, tokens = make(8, cell="lstm", attention="additive"), draw([6, 5])
    first, second = pieces(tokens, [[4, 2], [3, 2]])
    _, state = model.read(first)
    carried = model.carried(state)
    actual, _ = model.read(second, carried)
    assert [tuple(part.shape) for part in carried.layers[0]] == [(2, 1, 4), (2, 1, 4), (2, 1), (2, 4)]
    w, expected = weights_of(model), []
    for row, ids in enumerate(second.split()):
        *tapes, _, mixed = (part[row] for part in carried.layers[0])
        inputs = [w["embed.weight"][token] for token in ids]
        memory = [(tapes[0][0], tapes[1][0])]
        tape, _, _ = equations.intra("lstm", "additive", below(w, "recurrent.layers.0.0"), inputs, memory, mixed)
        expected += [affine(w, "output", h) for h, _ in tape[1:]]
    torch.testing.assert_close(actual, torch.stack(expected), rtol=1e-10, atol=1e-12)
    assert not torch.allclose(actual, model.read(second, state)[0])


@quick
@given(
    st.sampled_from(CELLS),
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=4),
    st.booleans(),
    st.integers(0, 99),
)
def test_any_two_pieces_read_as_the_whole(cell, cuts, attention, seed):
    model, cuts = make(seed, cell=cell, attention="dot" if attention else "none"), [list(lengths) for lengths in cuts]
    tokens = draw([sum(lengths) for lengths in cuts])
    actual, _ = read_in_pieces(model, tokens, cuts, carry=not attention)
    torch.testing.assert_close(actual, model.logits(tokens), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("attention", ["none", "general"])
@pytest.mark.parametrize("cell", CELLS)
def test_the_gradient_of_a_piece_stops_where_it_was_carried(cell, attention):
    """Truncated back-propagation: the words of the first piece get none, unless the state is not carried."""
    model = make(9, cell=cell, layers=2, attention=attention)
    first, second = Tokens.pack([[0, 1], [2]]), Tokens.pack([[4, 5], [6]])
    _, state = model.read(first)
    carried = model.carried(state)
    assert not any(part.requires_grad for layer in carried.layers for part in layer)
    for from_state, reaches in ((carried, False), (state, True)):
        logits, _ = model.read(second, from_state)
        (grad,) = torch.autograd.grad(logits.square().sum(), model.embed.weight)
        assert grad[:3].abs().gt(0).any(1).tolist() == [reaches] * 3
        assert grad[4:].any(1).all()
    # Within the piece it is that of a state that was always a constant.
    loose = RNNState(tuple(tuple(part.clone() for part in layer) for layer in carried.layers))
    parameters = dict(model.named_parameters())
    agree([model.read(second, carried)[0]], [model.read(second, loose)[0]], parameters)


def test_a_carried_state_shares_no_change_with_the_old():
    model, piece = make(10, cell="gru"), draw([3, 3])
    _, state = model.read(piece)
    before = [part.clone() for layer in state.layers for part in layer]
    model.read(piece, model.carried(state))
    after = [part for layer in state.layers for part in layer]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


@pytest.mark.parametrize("attention", ["none", "cosine"])
def test_a_piece_with_no_token_leaves_the_state(attention):
    model, piece, empty = make(11, attention=attention), draw([3, 2]), Tokens.pack([[], []])
    _, state = model.read(piece)
    logits, same = model.read(empty, state)
    assert logits.shape == (0, VOCAB)
    assert all(
        torch.equal(first, second)
        for layers in zip(same.layers, state.layers, strict=True)
        for first, second in zip(*layers, strict=True)
    )
    _, fresh = model.read(empty)
    assert torch.equal(model.read(piece, model.carried(fresh))[0], model.read(piece)[0])


def test_select_picks_the_rows_of_every_part():
    model = make(12, cell="lstm", layers=2, attention="dot")
    _, state = model.start(draw([4, 2, 3]))
    chosen = state.select(torch.tensor([2, 0, 2, 1]))
    for layer, old in zip(chosen.layers, state.layers, strict=True):
        assert all(torch.equal(part, old_part[[2, 0, 2, 1]]) for part, old_part in zip(layer, old, strict=True))


@pytest.mark.parametrize("attention", ["none", "additive"])
@pytest.mark.parametrize("cell", CELLS)
def test_ragged_and_even_prompts_take_different_ways_to_the_same_place(cell, attention):
    model, (first, second, short) = make(13, cell=cell, attention=attention), ([1, 2, 3], [4, 5, 6], [2])
    even, even_state = model.start(Tokens.pack([first, second]))
    alone, alone_state = model.start(Tokens.pack([short]))
    ragged, state = model.start(Tokens.pack([first, second, short]))
    torch.testing.assert_close(ragged, torch.cat([even, alone]))
    follow = torch.tensor([1, 2, 3])
    after = torch.cat([model.step(follow[:2], even_state)[0], model.step(follow[2:], alone_state)[0]])
    torch.testing.assert_close(model.step(follow, state)[0], after)


# Encoding.


def test_layers_are_counted_from_the_embeddings():
    model, tokens = make(14, layers=3), draw(RAGGED)
    every = model.encode(tokens, layers=(0, 1, 2, 3))
    assert every.shape == (4, sum(RAGGED), 4)
    assert torch.equal(every[0], model.embed.weight[tokens.ids])
    assert torch.equal(model.encode(tokens, layers=(-1, -2, -3, -4)), every.flip(0))
    assert torch.equal(model.encode(tokens), every[3:])
    assert torch.equal(model.encode(tokens, layers=(2, 2)), every[[2, 2]])
    torch.testing.assert_close(model.output(every[3]), model.logits(tokens))


@pytest.mark.parametrize("layer", [4, -5])
def test_a_layer_that_it_lacks_is_refused(layer):
    with pytest.raises(ConfigError, match=rf"layers: this rnn has 0, the embeddings, to 3, but \[1, {layer}\] is"):
        make(layers=3).encode(draw(RAGGED), layers=(1, layer))


def test_embeddings_of_another_width_do_not_go_with_the_layers():
    model, tokens = make(embedding=3, layers=2), draw(RAGGED)
    assert model.encode(tokens, layers=(1, 2)).shape == (2, sum(RAGGED), 4)
    with pytest.raises(WeftError, match="layers: layer 0 is 3 wide and the last is 4: they do not go together"):
        model.encode(tokens, layers=(0, 1))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_summary_is_what_each_walk_ends_in(direction):
    model, tokens = make(15, direction=direction, layers=2), draw(RAGGED)
    parts = tokens.split(model.encode(tokens)[0])
    first, last = torch.stack([part[0] for part in parts]), torch.stack([part[-1] for part in parts])
    expected = {"forward": last, "backward": first, "both": torch.cat([last[:, :2], first[:, 2:]], 1)}[direction]
    assert torch.equal(model.pooled_output(tokens), expected)
    assert model.pooled_output(tokens).shape == (len(RAGGED), model.width)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("attention", ["none", "cosine"])
def test_empty_sequences_among_others_change_nothing_and_spoil_no_gradient(direction, attention):
    model, tokens = make(16, direction=direction, attention=attention, layers=2), draw([4, 1, 6])
    gaps = Tokens.flat(tokens.ids, torch.tensor([0, 4, 1, 0, 6, 0]))
    rows = [1, 2, 4]
    actual = [model.pooled_output(gaps)[rows], model.encode(gaps)]
    expected = [model.pooled_output(tokens), model.encode(tokens)]
    if direction == "forward":
        actual += [model.read(gaps)[0], model.start(gaps)[0][rows]]
        expected += [model.read(tokens)[0], model.start(tokens)[0]]
    agree(actual, expected, dict(model.named_parameters()))
    assert not model.pooled_output(gaps)[[0, 3, 5]].any()


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("cell", CELLS)
def test_a_batch_with_no_token_at_all_is_answered(cell, direction):
    model, nothing = make(cell=cell, direction=direction, layers=2), Tokens.pack([[], []])
    assert model.encode(nothing).shape == (1, 0, 4)
    assert model.pooled_output(nothing).tolist() == [[0.0] * 4] * 2
    if model.output is not None:
        assert model.logits(nothing, direction=direction).shape == (0, VOCAB)
    if direction == "forward":
        torch.testing.assert_close(model.start(nothing)[0], model.output.bias.expand(2, -1))


@pytest.mark.parametrize("attention", ["none", "additive"])
@pytest.mark.parametrize("cell", CELLS)
def test_what_stands_in_empty_places_changes_no_answer(cell, attention, monkeypatch):
    model, tokens = make(17, cell=cell, attention=attention, layers=2), draw(RAGGED)
    lay = TimeMajor.pad

    def poisoned(self: TimeMajor, flat: Tensor, reverse: bool = False) -> Tensor:
        laid, real = lay(self, flat, reverse), self.mask
        if laid.is_floating_point():
            return laid.masked_fill(~real[..., None], math.nan)
        return laid.where(real, torch.tensor(1))

    def answers() -> list[Tensor]:
        (read, state), (following, _) = model.read(tokens), model.start(tokens)
        further, _ = model.read(tokens, state)
        return [model.logits(tokens), model.pooled_output(tokens), read, following, further]

    with torch.no_grad():
        clean = answers()
        monkeypatch.setattr(TimeMajor, "pad", poisoned)
        assert all(torch.equal(actual, expected) for actual, expected in zip(answers(), clean, strict=True))


@pytest.mark.parametrize("attention", ["none", "additive"])
def test_longest_may_be_more_than_the_longest(attention):
    """Compiled batches round `longest` up."""
    model, tokens = make(18, attention=attention, layers=2), draw(RAGGED)
    wide = Tokens(tokens.ids, tokens.starts, tokens.lengths, tokens.longest + 3)
    for method in (
        model.logits,
        model.pooled_output,
        lambda batch: model.read(batch)[0],
        lambda batch: model.start(batch)[0],
    ):
        torch.testing.assert_close(method(wide), method(tokens))


# Configurations.


def sizes(model: RNN) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def config_of(**config: object) -> RNNConfig:
    return RNNConfig(name="rnn", **config)


def test_its_roles_follow_from_its_direction():
    assert RNN.roles(config_of()) == {Role.ENCODER, Role.LANGUAGE_MODEL, Role.GENERATOR}
    assert RNN.roles(config_of(direction="both")) == {Role.ENCODER, Role.MASKED_LM}
    assert RNN.roles(config_of(direction="backward")) == {Role.ENCODER, Role.LANGUAGE_MODEL}
    assert RNN.roles(config_of(direction="both", layers=2)) == {Role.ENCODER}, "what meets below has seen the word"
    assert RNN.roles(config_of(direction="both", layers=2, apart=True)) == {Role.ENCODER, Role.MASKED_LM}
    assert RNN.roles(config_of(chars=3)) == {Role.ENCODER}


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_it_has_an_output_where_it_can_score_or_fill(direction):
    assert RNN.directions(config_of(direction=direction)) == (direction,)
    assert make(direction=direction).output is not None
    assert (make(direction=direction, layers=2).output is None) is (direction == "both")


@pytest.mark.parametrize("needs", [{Role.ENCODER}, set()])
def test_keep_drops_the_output_where_nothing_is_scored(needs):
    model, tokens = make(19), draw(RAGGED)
    before = model.encode(tokens), sizes(model)
    model.prune_unused(needs)
    assert model.output is None
    assert not any(name.startswith("output") for name in model.state_dict())
    assert sizes(model) == before[1] - VOCAB * (4 + 1)
    assert torch.equal(model.encode(tokens), before[0])


@pytest.mark.parametrize(
    "needs", [{Role.LANGUAGE_MODEL}, {Role.GENERATOR}, {Role.MASKED_LM}, {Role.ENCODER, Role.MASKED_LM}]
)
def test_keep_keeps_the_output_where_something_is(needs):
    model = make(19, direction="both" if Role.MASKED_LM in needs else "forward")
    before = dict(model.state_dict())
    model.prune_unused(needs)
    assert model.output is not None
    assert set(model.state_dict()) == set(before)


def test_tie_makes_the_output_read_the_embeddings():
    loose, tied = make(tie=False), make(tie=True)
    assert tied.output.weight is tied.embed.weight
    assert sizes(loose) - sizes(tied) == VOCAB * 4


def test_embeddings_start_at_unit_size_unless_they_score_too():
    torch.manual_seed(0)
    plain, tied = (RNN(config_of(width=64, tie=tie), 500) for tie in (False, True))
    assert plain.embed.weight.std().item() == pytest.approx(1, rel=0.05)
    assert tied.embed.weight.std().item() == pytest.approx(1 / 8, rel=0.05)


def test_a_seed_decides_the_first_weights():
    models = []
    for _ in range(8):
        torch.manual_seed(7)
        models.append(RNN(config_of(width=4, layers=2, cell="jordan", attention="additive"), VOCAB))
    for other in models[1:]:
        assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("config", [{}, {"layers": 3}, {"layers": 2, "attention": "dot"}], ids=str)
def test_dropout_stands_on_embeddings_between_layers_and_before_the_output(config):
    model, tokens, dropped = make(dropout=0.5, **config), draw(RAGGED), []
    parts = {"input": model.drop_input, "between": model.recurrent.dropout, "output": model.drop_output}
    for name, part in parts.items():
        part.register_forward_hook(lambda *_, name=name: dropped.append(name))
    between = ["between"] * (config.get("layers", 1) - 1)
    for ask in (model.logits, model.read, model.start, model.encode, model.pooled_output):
        dropped.clear()
        ask(tokens)
        assert dropped == ["input", *between, *["output"] * (ask not in (model.encode, model.pooled_output))]


def test_dropout_is_active_in_training_only():
    model, still, tokens = make(20, dropout=0.5), make(20), draw(RAGGED)
    assert torch.equal(model.logits(tokens), still.logits(tokens))
    model.train()
    assert not torch.equal(model.logits(tokens), model.logits(tokens))
    assert not torch.equal(model.encode(tokens), model.encode(tokens))
    assert torch.equal(still.train().logits(tokens), still.eval().logits(tokens))


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"width": 7, "direction": "both"}, "model.width must be even, half for each direction: got 7; try 8"),
        ({"width": 1}, "model.width: should be greater than or equal to 2, but is 1 instead"),
        ({"layers": 0}, "model.layers: should be greater than or equal to 1, but is 0 instead"),
        ({"dropout": 1.0}, "model.dropout: should be less than 1, but is 1.0 instead"),
        ({"embedding": 0}, "model.embedding: should be greater than or equal to 1, but is 0 instead"),
        ({"cell": "lstn"}, "but is 'lstn' instead; did you mean 'lstm'?"),
        ({"direction": "bath"}, "but is 'bath' instead; did you mean 'both'?"),
        ({"attention": "location"}, "but is 'location' instead"),
        ({"tie": True, "embedding": 5, "direction": "both"}, "model.embedding must be even, half for each direction"),
        ({"apart": True}, "model.apart is for model.direction=both, but that is forward; leave it out"),
        ({"dropout_recurrent": 1}, "model.dropout_recurrent: should be less than 1"),
        ({"heads": 2}, "model.heads: unknown key"),
    ],
    ids=str,
)
def test_a_wrong_config_is_refused_with_the_remedy(raw, message):
    with pytest.raises(ConfigError) as caught:
        read_section(RNNConfig, {"name": "rnn", **raw}, "model")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "raw", [{"width": 7}, {"width": 7, "direction": "backward"}, {"tie": True, "embedding": 5, "width": 8}], ids=str
)
def test_what_is_only_near_to_wrong_is_taken(raw):
    """The negative control of the refusals."""
    assert read_section(RNNConfig, {"name": "rnn", **raw}, "model").width == raw["width"]


# Looking at attention.


def test_capture_records_each_layers_own_attention():
    model, tokens = make(21, attention="additive", layers=2), draw(RAGGED)
    before = model.logits(tokens)
    with capture() as maps:
        assert torch.equal(model.logits(tokens), before)
    assert set(maps.weights) == {("self", 0), ("self", 1)}
    for (weights,) in maps.weights.values():
        assert weights.shape == (len(RAGGED), 6, 6)
        assert not weights.triu().any()
    with capture(layers=[1]) as captured:
        model.logits(tokens)
    assert set(captured.weights) == {("self", 1)}
    with capture() as none:
        make(21).logits(tokens)
    assert none.weights == {}
