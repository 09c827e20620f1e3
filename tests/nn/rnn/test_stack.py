"""A stack equals its layers' equations, sentence by sentence and in each direction, and torch's deep networks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import equations
from tests.equations import CELLS, agree, scatter, weights_of
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence

from weft.nn.rnn.stack import RecurrentStack
from weft.nn.rnn.time_major import TimeMajor
from weft.tokens import Tokens

quick = settings(deadline=None, derandomize=True, max_examples=12)

INPUTS, WIDTH = 5, 4
RAGGED = [4, 1, 6, 3, 6]
DIRECTIONS = ("forward", "backward", "both")
TORCHS = {"elman": nn.RNN, "lstm": nn.LSTM, "gru": nn.GRU}


def make(cell: str = "lstm", layers: int = 1, seed: int = 0, inputs: int = INPUTS, **options: object) -> RecurrentStack:
    stack = RecurrentStack(cell, inputs, WIDTH, layers, **options).double()
    scatter(stack, seed)
    return stack


def grid_of(lengths: list[int]) -> TimeMajor:
    return TimeMajor(Tokens.flat(torch.zeros(sum(lengths), dtype=torch.long), torch.tensor(lengths)))


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def by_equations(stack: RecurrentStack, flat: Tensor, lengths: list[int], cell: str, **options: object) -> list[Tensor]:
    """Return each layer's outputs, (N, D), and then its final outputs, (B, D)."""
    w, sentences = weights_of(stack), [part for part in flat.split(lengths) if len(part)]
    alone = [equations.stack(cell, w, list(sentence), WIDTH, **options) for sentence in sentences]
    layers = range(len(alone[0][1]))
    outputs = [torch.cat([torch.stack(hidden[depth]) for hidden, _ in alone]) for depth in layers]
    return [*outputs, *(torch.stack([ends[depth] for _, ends in alone]) for depth in layers)]


def check(stack: RecurrentStack, lengths: list[int], cell: str, inputs: int = INPUTS, **options: object) -> None:
    flat = draw(sum(lengths), inputs)
    outputs, ends = stack(flat, grid_of(lengths))
    full = torch.tensor(lengths) > 0
    expected = by_equations(stack, flat, lengths, cell, **options)
    agree([*outputs, *(end[full] for end in ends)], expected, {**weights_of(stack), "inputs": flat})
    assert not any(end[~full].any() for end in ends)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("cell", CELLS)
def test_it_is_its_equations_sentence_by_sentence(cell, direction):
    check(make(cell, 2, 1, direction=direction), RAGGED, cell, direction=direction)


@pytest.mark.parametrize("residual", [False, True], ids=["plain", "residual"])
@pytest.mark.parametrize("inputs", [WIDTH, INPUTS])
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_it_is_so_however_deep_and_with_ways_around(direction, layers, inputs, residual):
    stack = make("gru", layers, 2, inputs, direction=direction, residual=residual)
    check(stack, RAGGED, "gru", inputs, direction=direction, residual=residual)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("attention", [name for name in equations.SCORES if name != "location"])
def test_it_is_so_with_attention_over_its_own_states(attention, direction):
    stack = make("lstm", 2, 3, direction=direction, attention=attention, residual=True)
    check(stack, RAGGED, "lstm", direction=direction, attention=attention, residual=True)


@quick
@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=5).filter(any),
    st.sampled_from(CELLS),
    st.sampled_from(DIRECTIONS),
    st.sampled_from(["none", "none", "additive", "cosine", "dot"]),
    st.booleans(),
    st.integers(1, 3),
    st.integers(0, 99),
)
def test_it_is_so_for_any_lengths_and_options(lengths, cell, direction, attention, residual, layers, seed):
    options = {"direction": direction, "attention": attention, "residual": residual}
    check(make(cell, layers, seed, **options), lengths, cell, **options)


def test_a_walk_the_wrong_way_is_caught(monkeypatch):
    """The negative control: the backward layer reads forwards."""
    lay = TimeMajor.pad
    monkeypatch.setattr(TimeMajor, "pad", lambda self, flat, reverse=False: lay(self, flat))
    check(make("elman"), RAGGED, "elman")
    with pytest.raises(AssertionError, match="not close"):
        check(make("elman", direction="both"), RAGGED, "elman", direction="both")


def test_a_residual_that_is_left_out_or_too_much_is_caught():
    for residual, assumed in ((True, False), (False, True)):
        with pytest.raises(AssertionError, match="not close"):
            check(make("gru", 2, residual=residual), RAGGED, "gru", residual=assumed)


# Against torch's own deep networks on packed sequences.


def torchs(
    cell: str, ours: RecurrentStack, layers: int, ways: int, dtype: torch.dtype
) -> tuple[nn.RNNBase, dict[str, Tensor]]:
    """Return torch's network with the same weights, and ours by torch's names."""
    theirs = TORCHS[cell](INPUTS, WIDTH // ways, layers, bidirectional=ways == 2, dtype=dtype)
    mine = {}
    for name, weight in weights_of(ours).items():
        _, depth, way, _, kind = name.split(".")
        mine[f"{kind.removesuffix('0')}{depth}{'_reverse' if way == '1' else ''}"] = weight
    with torch.no_grad():
        for name, weight in mine.items():
            theirs.get_parameter(name).copy_(weight)
    assert set(mine) == {name for name, _ in theirs.named_parameters()}
    return theirs, mine


@pytest.mark.parametrize("lengths", [RAGGED, [2, 2]], ids=str)
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("direction", ["forward", "both"])
@pytest.mark.parametrize("cell", TORCHS)
def test_it_is_torchs_network_on_packed_sequences(cell, direction, layers, lengths):
    ways = 2 if direction == "both" else 1
    ours, flat = make(cell, layers, 4, direction=direction), draw(sum(lengths), INPUTS)
    theirs, mine = torchs(cell, ours, layers, ways, torch.float64)
    outputs, ends = ours(flat, grid_of(lengths))
    packed_outputs, after = theirs(pack_sequence(flat.split(lengths), enforce_sorted=False))
    hidden = (after[0] if cell == "lstm" else after).view(layers, ways, len(lengths), WIDTH // ways)
    rows = pad_packed_sequence(packed_outputs)[0].unbind(1)
    expected = torch.cat([row[:length] for row, length in zip(rows, lengths, strict=True)])
    yours = {**dict(theirs.named_parameters()), "inputs": flat}
    agree(
        [outputs[-1], torch.stack(ends)], [expected, torch.cat(hidden.unbind(1), -1)], {**mine, "inputs": flat}, yours
    )


@pytest.mark.parametrize("cell", TORCHS)
def test_single_precision_is_close_to_torchs(cell):
    ours, flat = make(cell, 2, 5, direction="both").float(), torch.randn(sum(RAGGED), INPUTS)
    theirs, _ = torchs(cell, ours, 2, 2, torch.float32)
    packed_outputs, _ = theirs(pack_sequence(flat.split(RAGGED), enforce_sorted=False))
    rows = pad_packed_sequence(packed_outputs)[0].unbind(1)
    expected = torch.cat([row[:length] for row, length in zip(rows, RAGGED, strict=True)])
    torch.testing.assert_close(ours(flat, grid_of(RAGGED))[0][-1], expected, rtol=1e-5, atol=1e-6)


# Continuing from states.


@pytest.mark.parametrize("attention", ["none", "additive"])
@pytest.mark.parametrize("cell", CELLS)
def test_a_walk_over_a_grid_is_what_it_reads_at_once(cell, attention):
    stack, lengths = make(cell, 2, 6, attention=attention, residual=True), RAGGED
    flat, grid = draw(sum(lengths), INPUTS), grid_of(lengths)
    expected, ends = stack(flat, grid)
    outputs, states = stack.run(grid.pad(flat), None, grid.mask)
    actual = [grid.unpad(tensor) for tensor in outputs]
    agree(
        [*actual, *(grid.last(tensor) for tensor in outputs[:1])],
        [*expected, ends[0]],
        {**weights_of(stack), "inputs": flat},
    )
    if attention == "none":
        assert torch.equal(states[0][0], grid.last(outputs[0]))


@pytest.mark.parametrize("attention", ["none", "scaled-dot"])
@pytest.mark.parametrize("cell", CELLS)
def test_a_walk_in_pieces_is_the_walk(cell, attention):
    stack, inputs = make(cell, 2, 7, attention=attention), draw(7, 3, INPUTS)
    whole, after = stack.run(inputs)
    pieces, states = [], None
    for piece in (inputs[:3], inputs[3:4], inputs[4:4], inputs[4:]):
        outputs, states = stack.run(piece, states)
        pieces.append(outputs[-1])
    named = {**weights_of(stack), "inputs": inputs}
    agree([torch.cat(pieces), states[1][0]], [whole[-1], after[1][0]], named)


def test_ahead_are_the_layers_that_read_forwards():
    for direction in ("forward", "both"):
        stack = make("gru", 3, direction=direction)
        assert stack.ahead == [ways[0] for ways in stack.layers]
        assert len(stack.ahead) == 3


# Padding and empty batches.


@pytest.mark.parametrize("attention", ["none", "cosine"])
@pytest.mark.parametrize("cell", CELLS)
def test_a_sequence_with_no_token_ends_in_zeros_and_changes_no_other(cell, attention):
    stack, flat = make(cell, 2, 8, direction="both", attention=attention), draw(5, INPUTS)
    outputs, ends = stack(flat, grid_of([2, 3]))
    gaps, gap_ends = stack(flat, grid_of([0, 2, 0, 3, 0]))
    agree([*gaps, *(end[[1, 3]] for end in gap_ends)], [*outputs, *ends], {**weights_of(stack), "inputs": flat})
    assert not any(end[[0, 2, 4]].any() for end in gap_ends)


@pytest.mark.parametrize("attention", ["none", "dot"])
@pytest.mark.parametrize("cell", CELLS)
def test_a_batch_with_no_token_at_all_has_no_output_and_ends_in_zeros(cell, attention):
    outputs, ends = make(cell, 2, direction="both", attention=attention)(draw(0, INPUTS), grid_of([0, 0]))
    assert [tensor.shape for tensor in outputs] == [(0, WIDTH)] * 2
    assert torch.equal(torch.stack(ends), torch.zeros(2, 2, WIDTH, dtype=torch.float64))


@pytest.mark.parametrize("attention", ["none", "general"])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("cell", CELLS)
def test_what_stands_in_empty_places_reaches_nothing(cell, direction, attention, monkeypatch):
    stack, flat, grid = make(cell, 2, 9, direction=direction, attention=attention), draw(20, INPUTS), grid_of(RAGGED)
    lay = TimeMajor.pad
    with torch.no_grad():
        outputs, ends = stack(flat, grid)
        monkeypatch.setattr(
            TimeMajor,
            "pad",
            lambda self, read, reverse=False: lay(self, read, reverse).masked_fill(~self.mask[..., None], float("nan")),
        )
        again, again_ends = stack(flat, grid)
    assert torch.equal(again[-1], outputs[-1])
    assert torch.equal(torch.stack(again_ends), torch.stack(ends))


# Sizes and dropout.


def test_each_direction_has_half_the_width():
    stack = RecurrentStack("gru", INPUTS, 6, 2, "both")
    sizes = [[(cell.inputs, cell.width) for cell in ways] for ways in stack.layers]
    assert sizes == [[(INPUTS, 3)] * 2, [(6, 3)] * 2]
    tensor = RecurrentStack("gru", INPUTS, 6, 2, "backward")
    assert [[(cell.inputs, cell.width) for cell in ways] for ways in tensor.layers] == [[(INPUTS, 6)], [(6, 6)]]


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_dropout_stands_between_layers_and_only_in_training(direction):
    grid, flat = grid_of([3, 2]), torch.randn(5, INPUTS)
    for layers, differs in ((1, False), (2, True)):
        stack = RecurrentStack("gru", INPUTS, WIDTH, layers, direction, dropout=0.5)
        assert torch.equal(stack(flat, grid)[0][-1], stack(flat, grid)[0][-1]) is not differs
        assert torch.equal(stack(flat, grid)[0][0], stack(flat, grid)[0][0])
        stack.eval()
        assert torch.equal(stack(flat, grid)[0][-1], stack(flat, grid)[0][-1])


def test_dropout_is_not_on_the_way_around():
    """With every input of the second layer dropped, what the first put out still comes through."""
    stack, inputs = make("elman", 2, residual=True), torch.randn(3, 2, INPUTS, dtype=torch.float64)
    stack.dropout.p = 1.0
    first, second = stack.train().run(inputs)[0]
    beside = stack.ahead[1](torch.zeros_like(first))[0]
    torch.testing.assert_close(second, first + beside)
