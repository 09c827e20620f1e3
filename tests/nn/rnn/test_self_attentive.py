"""Self-attention over a layer's own earlier states equals Cheng et al. 2016, row by row and step by step."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import equations
from tests.equations import CELLS, agree, scatter, weights_of
from torch import Tensor

from weft.nn.attention.capture import capture
from weft.nn.kernels import dispatch
from weft.nn.rnn.cells import make_cell
from weft.nn.rnn.self_attentive import LSTMN

quick = settings(deadline=None, derandomize=True, max_examples=12)

INPUTS, WIDTH = 3, 4
RAGGED, GAPS = [4, 1, 6, 3], [0, 3, 0, 5, 1]
SCORES = [name for name in equations.SCORES if name != "location"]

Rows = list[tuple[list[tuple[Tensor, ...]], Tensor]]  # for each row its tape of states, and h~


def make(cell: str = "lstm", score: str = "additive", seed: int = 0, layer: int = 0) -> LSTMN:
    lstmn = LSTMN(make_cell(cell, INPUTS, WIDTH), score, layer).double()
    scatter(lstmn, seed)
    return lstmn


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def real_places(lengths: list[int], steps: int = 0) -> Tensor:
    return torch.arange(max([steps, *lengths]))[:, None] < torch.tensor(lengths)  # (T, B)


def empty_rows(rows: int) -> Rows:
    return [([], torch.zeros(WIDTH, dtype=torch.float64)) for _ in range(rows)]


def run_equations(
    layer: LSTMN, cell: str, score: str, rows: Rows, inputs: Tensor, lengths: list[int]
) -> tuple[Rows, list[list[Tensor]]]:
    """Run each row by the equations; return the rows' states, and the attention weights of each step."""
    after, weights_per_row = [], []
    for row, ((tape, mixed), length) in enumerate(zip(rows, lengths, strict=True)):
        tape, seen, mixed = equations.intra(cell, score, weights_of(layer), list(inputs[:length, row]), tape, mixed)
        after.append((tape, mixed))
        weights_per_row.append(seen)
    return after, weights_per_row


def of_rows(state: tuple[Tensor, ...]) -> list[Tensor]:
    """Return a layer's state in the form of the equations: each row's states, part by part, and h~."""
    *tapes, empty, mixed = state
    return [tape[row][~empty[row]] for row in range(len(empty)) for tape in tapes] + [mixed]


def as_tensors(rows: Rows, parts: int) -> list[Tensor]:
    tensors = []
    for tape, _ in rows:
        for part in range(parts):
            values = [state[part] for state in tape]
            tensors.append(torch.stack(values) if values else torch.zeros(0, WIDTH, dtype=torch.float64))
    return [*tensors, torch.stack([mixed for _, mixed in rows])]


def check(layer: LSTMN, cell: str, score: str, *pieces: list[int]) -> None:
    """Run segments of these lengths, each row from its last state; compare outputs, state and gradients."""
    state, rows = None, empty_rows(len(pieces[0]))
    named, outputs, expected = weights_of(layer), [], []
    for number, lengths in enumerate(pieces):
        inputs = named[f"inputs {number}"] = draw(max(lengths), len(lengths), INPUTS)
        real = None if len(set(lengths)) == 1 else real_places(lengths)
        hidden, state = layer(inputs, state, real)
        old = [len(tape) for tape, _ in rows]
        rows, _ = run_equations(layer, cell, score, rows, inputs, lengths)
        for row, length in enumerate(lengths):
            outputs += list(hidden[:length, row])
            expected += [states[0] for states in rows[row][0][old[row] :]]
    parts = equations.STATES[cell]
    agree([*outputs, *of_rows(state)], [*expected, *as_tensors(rows, parts)], named)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("cell", CELLS)
def test_it_is_its_equations_on_ragged_rows(cell, score):
    check(make(cell, score, 1), cell, score, RAGGED)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("cell", CELLS)
def test_it_goes_on_from_its_state(cell, score):
    check(make(cell, score, 2), cell, score, [2, 2], [3, 1], [2, 2])


@pytest.mark.parametrize("pieces", [([5],), ([1],), (GAPS, GAPS), ([2, 0], [0, 2], [1, 1]), ([0, 4], [3, 3])], ids=str)
def test_rows_may_end_and_begin_where_they_like(pieces):
    check(make("peephole", "cosine", 3), "peephole", "cosine", *pieces)


@pytest.mark.parametrize("pieces", [([6, 6],), ([4, 4], [2, 3]), ([5], [1], [6])], ids=str)
@pytest.mark.parametrize("score", ["dot", "scaled-dot", "general"])
@pytest.mark.parametrize("cell", ["peephole", "jordan"])
def test_it_is_so_in_kernels_too(cell, score, pieces, monkeypatch):
    """By default they are used for single precision only."""
    monkeypatch.setattr(dispatch, "SCAN_DTYPE", torch.float64)
    check(make(cell, score, 2), cell, score, *pieces)


@quick
@given(
    st.sampled_from(CELLS),
    st.sampled_from(SCORES),
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=4).filter(
        lambda rows: all(any(piece) for piece in zip(*rows, strict=True))
    ),
    st.integers(0, 99),
)
def test_it_is_so_for_any_lengths_of_two_pieces(cell, score, rows, seed):
    check(make(cell, score, seed), cell, score, *([*piece] for piece in zip(*rows, strict=True)))


INTRA = equations.intra  # as it is, when a test puts another in its place


def looks_by_what_it_reads_alone(cell, score, w, inputs, tape, mixed):
    """Equation 4 without h~_{t-1}."""
    for x in inputs:
        tape, _, mixed = INTRA(cell, score, w, [x], tape, torch.zeros_like(mixed))
    return tape, [], mixed


def remembers_the_last_alone(cell, score, w, inputs, tape, mixed):
    """The plain cell."""
    for x in inputs:
        values, _, mixed = INTRA(cell, score, w, [x], tape[-1:], mixed)
        tape = [*tape, values[-1]]
    return tape, [], mixed


@pytest.mark.parametrize("wrong", [looks_by_what_it_reads_alone, remembers_the_last_alone])
def test_a_slightly_different_attention_is_caught(wrong, monkeypatch):
    monkeypatch.setattr(equations, "intra", wrong)
    with pytest.raises(AssertionError, match="not close"):
        check(make("gru", "general", 1), "gru", "general", RAGGED)


@pytest.mark.parametrize("cell", CELLS)
def test_where_only_the_last_state_is_kept_it_is_the_plain_cell(cell):
    """A single position gets all the weight: with one earlier state, attention is plain recurrence."""
    layer, inputs = make(cell, "dot", 4), draw(6, 2, INPUTS)
    expected, _ = layer.cell(inputs)
    state, outputs = None, []
    for step in inputs:
        hidden, state = layer(step[None], state)
        state = layer.carry(state)
        outputs.append(hidden[0])
    torch.testing.assert_close(torch.stack(outputs), expected, rtol=1e-12, atol=1e-12)
    whole, _ = layer(inputs)
    torch.testing.assert_close(whole[:2], expected[:2], rtol=1e-12, atol=1e-12)  # until then there is no choice
    assert not torch.allclose(whole[2:], expected[2:])


# The state carried to the next segment.


@pytest.mark.parametrize("cell", CELLS)
def test_carry_keeps_each_rows_last_step(cell):
    layer, lengths = make(cell, "additive", 5), [3, 0, 5]
    inputs, further = draw(5, 3, INPUTS), draw(2, 3, INPUTS)
    carried = layer.carry(layer(inputs, None, real_places(lengths))[1])
    rows, _ = run_equations(layer, cell, "additive", empty_rows(3), inputs, lengths)
    rows = [(tape[-1:], mixed) for tape, mixed in rows]
    parts = equations.STATES[cell]
    for tensor, reference in zip(of_rows(carried), as_tensors(rows, parts), strict=True):
        torch.testing.assert_close(tensor, reference)
    rows, _ = run_equations(layer, cell, "additive", rows, further, [2, 2, 2])
    _, state = layer(further, carried)
    agree(of_rows(state), as_tensors(rows, parts), {**weights_of(layer), "inputs": inputs, "further": further})


def test_carry_of_nothing_is_nothing():
    layer = make()
    state = layer.begin(2, torch.zeros(1, dtype=torch.float64))
    assert [part.shape for part in layer.carry(state)] == [(2, 0, WIDTH), (2, 0, WIDTH), (2, 0), (2, WIDTH)]
    expected, _ = layer(inputs := draw(3, 2, INPUTS))
    assert torch.equal(layer(inputs, layer.carry(state))[0], expected)


def test_a_row_that_has_read_nothing_yet_has_nothing_to_look_at():
    layer, inputs = make("gru", "general", 6), draw(3, 2, INPUTS)
    _, state = layer(draw(2, 2, INPUTS), None, torch.tensor([[False, True], [False, True]]))
    for before in (state, layer.carry(state)):
        torch.testing.assert_close(layer(inputs, before)[0][:, 0], layer(inputs)[0][:, 0])


def test_a_walk_of_no_steps_gives_none_and_leaves_the_state():
    layer = make()
    _, state = layer(draw(3, 2, INPUTS))
    for real in (None, torch.zeros(0, 2, dtype=torch.bool)):
        outputs, after = layer(draw(0, 2, INPUTS), state, real)
        assert outputs.shape == (0, 2, WIDTH)
        assert all(torch.equal(tensor, reference) for tensor, reference in zip(after, state, strict=True))
        assert layer(draw(0, 2, INPUTS), None, real)[0].shape == (0, 2, WIDTH)


def test_a_state_is_a_value_that_a_walk_does_not_change():
    layer = make("peephole", "cosine", 7)
    _, state = layer(draw(3, 2, INPUTS))
    before, inputs = [part.clone() for part in state], draw(2, 2, INPUTS)
    first, _ = layer(inputs, state)
    layer(draw(4, 2, INPUTS), state)
    assert torch.equal(layer(inputs, state)[0], first)
    assert all(torch.equal(tensor, reference) for tensor, reference in zip(state, before, strict=True))


# Gradients and padding.


@pytest.mark.parametrize("score", SCORES)
def test_its_gradient_is_that_of_its_function(score):
    layer = LSTMN(make_cell("peephole", 2, 2), score).double()
    scatter(layer, 8)
    real = real_places([2, 3, 0])

    def walk(inputs, *_):
        outputs, (*tapes, _, mixed) = layer(inputs, None, real)
        return outputs[real], *tapes, mixed

    assert torch.autograd.gradcheck(walk, (draw(3, 3, 2), *layer.parameters()), fast_mode=True)


@pytest.mark.parametrize("score", SCORES)
def test_rows_that_end_spoil_no_gradient(score):
    """Not even one that never begins, whose tape is all zeros."""
    layer, inputs = make("lstm", score, 9), draw(5, 5, INPUTS)
    outputs, state = layer(inputs, None, real_places(GAPS))
    grads = torch.autograd.grad(
        outputs.sum() + sum(part.sum() for part in state if part.is_floating_point()), [inputs, *layer.parameters()]
    )
    assert all(grad.isfinite().all() for grad in grads)
    assert not grads[0][~real_places(GAPS)].any()


@pytest.mark.parametrize("score", SCORES)
def test_what_stands_past_a_rows_end_reaches_nothing(score):
    layer, real = make("jordan", score, 10), real_places(GAPS)
    inputs, further = draw(5, 5, INPUTS).detach(), draw(2, 5, INPUTS).detach()
    poisoned = inputs.masked_fill(~real[..., None], math.nan)
    with torch.no_grad():
        (clean, state), (dirty, dirty_state) = layer(inputs, None, real), layer(poisoned, None, real)
        assert torch.equal(dirty[real], clean[real])
        for tensor, reference in zip(of_rows(dirty_state), of_rows(state), strict=True):
            assert torch.equal(tensor, reference)
        assert torch.equal(layer(further, dirty_state)[0], layer(further, state)[0])


@pytest.mark.parametrize("score", ["additive", "dot"])
def test_single_precision_is_close_to_double(score):
    layer, inputs = make("peephole", score, 11), draw(9, 3, INPUTS)
    single = make("peephole", score, 11).float()
    single.load_state_dict(layer.state_dict())
    torch.testing.assert_close(single(inputs.float())[0].double(), layer(inputs)[0], rtol=1e-4, atol=1e-5)


# Captured attention weights.


@pytest.mark.parametrize("score", SCORES)
def test_capture_records_where_each_step_looked_and_changes_nothing(score):
    layer, inputs, lengths = make("lstm", score, 12), draw(4, 3, INPUTS), [4, 2, 4]
    expected, _ = layer(inputs, None, real_places(lengths))
    with capture() as maps:
        actual, _ = layer(inputs, None, real_places(lengths))
    assert torch.equal(actual, expected)
    (weights,) = maps.weights["self", 0]
    assert weights.shape == (3, 4, 4)
    assert not weights.triu().any()  # a step sees those before it
    _, weights_per_row = run_equations(layer, "lstm", score, empty_rows(3), inputs, lengths)
    for row, length in enumerate(lengths):
        for step in range(1, length):
            torch.testing.assert_close(weights[row, step, :step], weights_per_row[row][step - 1].detach())
    torch.testing.assert_close(weights[:, 1:].sum(-1), torch.ones(3, 3, dtype=torch.float64))


def test_capture_sees_what_is_carried_too():
    layer = make(layer=2)
    _, state = layer(draw(3, 2, INPUTS))
    with capture() as maps:
        layer(draw(2, 2, INPUTS), layer.carry(state))
        layer(draw(1, 2, INPUTS))
        layer(draw(0, 2, INPUTS))
    weights = maps.weights["self", 2][0]
    assert weights.shape == (2, 2, 3)
    assert weights[:, 0].tolist() == [[1, 0, 0]] * 2
    with capture(layers=[1]) as reference:
        layer(draw(3, 2, INPUTS))
    assert reference.weights == {}
