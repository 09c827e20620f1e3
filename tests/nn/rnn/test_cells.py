"""The five cells equal their equations, and torch's networks where it has them: outputs, final states, gradients."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import equations
from tests.equations import CELLS, agree, scatter, weights_of
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from weft.nn.rnn import cells as rnn_cells
from weft.nn.rnn.cells import Cell, at_last, make_cell

quick = settings(deadline=None, derandomize=True, max_examples=12)

INPUTS, WIDTH = 3, 4
RAGGED = [4, 1, 7, 3, 7]
GAPS = [0, 5, 0, 2, 1, 0]
TORCHS = {"elman": nn.RNN, "lstm": nn.LSTM, "gru": nn.GRU}


def make(name: str, seed: int = 0) -> Cell:
    cell = make_cell(name, INPUTS, WIDTH).double()
    scatter(cell, seed)
    return cell


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def real_places(lengths: list[int]) -> Tensor:
    return torch.arange(max(lengths))[:, None] < torch.tensor(lengths)  # (T, B)


def real_rows(grid: Tensor, lengths: list[int]) -> list[Tensor]:
    """Return each row of (T, B, D) without padding."""
    return [grid[:length, row] for row, length in enumerate(lengths)]


# Against the equations.


def by_equations(name: str, w: equations.Weights, inputs: Tensor, lengths: list[int], state: tuple[Tensor, ...]):
    """Run row by row, step by step; return each row's outputs and each part of the state after its last step."""
    outputs, finals = [], []
    for row, length in enumerate(lengths):
        initial = tuple(part[row] for part in state)
        states = equations.walk(name, w, list(inputs[:length, row]), initial)
        outputs.append(torch.stack([tensor[0] for tensor in states]) if states else inputs.new_zeros(0, WIDTH))
        finals.append(states[-1] if states else initial)
    return outputs, [torch.stack(parts) for parts in zip(*finals, strict=True)]


def check_equations(cell: Cell, name: str, lengths: list[int], with_state: bool, with_mask: bool = True) -> None:
    """`with_state`: from a state, not from zeros. `with_mask`: rows of unequal length; else every row has all steps."""
    inputs = draw(max(lengths), len(lengths), INPUTS)
    state = tuple(draw(len(lengths), WIDTH) for _ in range(cell.states))
    start = state if with_state else tuple(torch.zeros_like(part) for part in state)
    outputs, finals = cell(inputs, state if with_state else None, real_places(lengths) if with_mask else None)
    expected, expected_finals = by_equations(name, weights_of(cell), inputs, lengths, start)
    named = {**weights_of(cell), "inputs": inputs}
    named |= {f"state {number}": part for number, part in enumerate(state)} if with_state else {}
    agree([*real_rows(outputs, lengths), *finals], [*expected, *expected_finals], named)


@pytest.mark.parametrize("with_state", [False, True], ids=["from zeros", "from a state"])
@pytest.mark.parametrize("name", CELLS)
def test_a_cell_is_its_equations_on_ragged_rows(name, with_state):
    check_equations(make(name, 1), name, RAGGED, with_state)


@pytest.mark.parametrize("with_state", [False, True], ids=["from zeros", "from a state"])
@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize("lengths", [[6, 6, 6], [1, 1], [2]], ids=str)
def test_a_cell_is_its_equations_where_no_row_ends_early(name, with_state, lengths):
    check_equations(make(name, 2), name, lengths, with_state, with_mask=False)


@quick
@given(
    st.sampled_from(CELLS),
    st.lists(st.integers(0, 6), min_size=1, max_size=5).filter(any),
    st.booleans(),
    st.integers(0, 99),
)
def test_it_is_so_for_any_lengths(name, lengths, with_state, seed):
    check_equations(make(name, seed), name, lengths, with_state)


PEEPHOLE, GRU = equations.peephole, equations.gru  # as they are, when a test puts another in their place


def lstm_for_peephole(w, x, h, c):
    named = {"kernel.weight_ih_l0": w["input_weight"], "kernel.weight_hh_l0": w["state_weight"]}
    return equations.lstm({**named, "kernel.bias_ih_l0": w["bias"], "kernel.bias_hh_l0": 0 * w["bias"]}, x, h, c)


def output_gate_sees_the_old_cell(w, x, h, c):
    """Graves 2013 with c_{t-1} in equation 10, where c_t stands."""
    o = w["input_weight"][3 * WIDTH :] @ x + w["state_weight"][3 * WIDTH :] @ h + w["bias"][3 * WIDTH :]
    _, new = PEEPHOLE(w, x, h, c)
    return torch.sigmoid(o + w["peepholes"][2] * c) * torch.tanh(new), new


def reset_before_the_product(w, x, h):
    """Cho et al. 2014 as printed: W_hn (r ⊙ h)."""
    (W_xr, _, W_xn), (W_hr, _, W_hn) = w["kernel.weight_ih_l0"].chunk(3), w["kernel.weight_hh_l0"].chunk(3)
    (b_xr, _, b_xn), (b_hr, _, b_hn) = w["kernel.bias_ih_l0"].chunk(3), w["kernel.bias_hh_l0"].chunk(3)
    (right,) = GRU(w, x, h)
    r = torch.sigmoid(W_xr @ x + W_hr @ h + b_xr + b_hr)
    n, wrong = torch.tanh(W_xn @ x + b_xn + r * (W_hn @ h + b_hn)), torch.tanh(W_xn @ x + b_xn + W_hn @ (r * h) + b_hn)
    z = (right - n) / (h - n)
    return ((1 - z) * wrong + z * h,)


def hidden_layer_is_handed_on(w, x, h):
    return (torch.tanh(w["input_weight"] @ x + w["state_weight"] @ h + w["bias"]),)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("peephole", lstm_for_peephole),
        ("peephole", output_gate_sees_the_old_cell),
        ("gru", reset_before_the_product),
        ("jordan", hidden_layer_is_handed_on),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_slightly_different_cell_is_caught(name, wrong, monkeypatch):
    monkeypatch.setattr(equations, name, wrong)
    with pytest.raises(AssertionError, match="not close"):
        check_equations(make(name, 1), name, RAGGED, with_state=True)


def test_a_row_that_ends_where_another_does_is_caught(monkeypatch):
    """The negative control of ragged ends: the state after the last step of the grid."""
    monkeypatch.setattr(rnn_cells, "at_last", lambda states, start, real: states[-1])
    with pytest.raises(AssertionError, match="not close"):
        check_equations(make("jordan", 1), "jordan", RAGGED, with_state=True)


# Against torch's own networks.


def check_torch(cell: Cell, theirs: nn.RNNBase, mine: dict[str, Tensor], lengths: list[int]) -> None:
    """Compare a cell with torch's network on packed sequences; `mine` are the weights by torch's names."""
    with torch.no_grad():
        for name, weight in mine.items():
            theirs.get_parameter(name).copy_(weight)
    inputs, state = draw(max(lengths), len(lengths), INPUTS), [draw(len(lengths), WIDTH) for _ in range(cell.states)]
    outputs, finals = cell(inputs, tuple(state), real_places(lengths))
    packed = pack_padded_sequence(inputs, torch.tensor(lengths), enforce_sorted=False)
    initial = tuple(part[None] for part in state)
    packed_outputs, after = theirs(packed, initial if cell.states > 1 else initial[0])
    expected = real_rows(pad_packed_sequence(packed_outputs)[0], lengths)
    expected_finals = [part[0] for part in after] if cell.states > 1 else [after[0]]
    shared = {"inputs": inputs, **{f"state {number}": part for number, part in enumerate(state)}}
    yours = {**shared, **dict(theirs.named_parameters())}
    agree([*real_rows(outputs, lengths), *finals], [*expected, *expected_finals], {**shared, **mine}, yours)


@pytest.mark.parametrize("name", TORCHS)
@pytest.mark.parametrize("lengths", [RAGGED, [3, 3], [1]], ids=str)
def test_a_cell_is_torchs_own(name, lengths):
    cell = make(name, 3)
    mine = {full.removeprefix("kernel."): weight for full, weight in weights_of(cell).items()}
    check_torch(cell, TORCHS[name](INPUTS, WIDTH, dtype=torch.float64), mine, lengths)


def check_unseen_peepholes(cell: Cell) -> None:
    """A peephole LSTM has one bias where torch's LSTM has two; the second is set to zero."""
    mine = {"weight_ih_l0": cell.input_weight, "weight_hh_l0": cell.state_weight, "bias_ih_l0": cell.bias}
    theirs = nn.LSTM(INPUTS, WIDTH, dtype=torch.float64)
    nn.init.zeros_(theirs.bias_hh_l0)
    check_torch(cell, theirs, mine, RAGGED)


def test_a_peephole_lstm_that_sees_nothing_is_torchs_lstm_and_one_that_sees_is_not():
    cell = make("peephole", 4)
    with pytest.raises(AssertionError, match="not close"):
        check_unseen_peepholes(cell)
    nn.init.zeros_(cell.peepholes)
    check_unseen_peepholes(cell)


# The contract of a layer.


@pytest.mark.parametrize("name", CELLS)
def test_a_step_is_one_line_of_the_walk(name):
    cell, inputs = make(name, 5), draw(3, 2, INPUTS)
    state, outputs = cell.begin(2, inputs), []
    input_proj = cell.ahead(inputs)
    assert input_proj.shape == (3, 2, cell.gates * WIDTH)
    assert [part.shape for part in state] == [(2, WIDTH)] * cell.states == [(2, WIDTH)] * equations.STATES[name]
    for tensor in input_proj:
        state = cell.step(tensor, state)
        outputs.append(state[0])
    states, after = cell(inputs)
    agree([torch.stack(outputs), *state], [states, *after], {**weights_of(cell), "inputs": inputs})


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize("cut", [0, 1, 5, 8])
def test_a_walk_in_two_pieces_is_the_walk(name, cut):
    cell, inputs = make(name, 6), draw(8, 3, INPUTS)
    state = tuple(draw(3, WIDTH) for _ in range(cell.states))
    whole, after = cell(inputs, state)
    first, between = cell(inputs[:cut], state)
    second, end = cell(inputs[cut:], between)
    named = {**weights_of(cell), "inputs": inputs, **{f"state {n}": part for n, part in enumerate(state)}}
    agree([torch.cat([first, second]), *end], [whole, *after], named)


@pytest.mark.parametrize("name", CELLS)
def test_a_row_with_no_step_keeps_its_state(name):
    cell, state = make(name, 7), tuple(draw(6, WIDTH) for _ in range(equations.STATES[name]))
    _, after = cell(draw(5, 6, INPUTS), state, real_places(GAPS))
    for part, start in zip(after, state, strict=True):
        assert torch.equal(part[[0, 2, 5]], start[[0, 2, 5]])
        assert not torch.equal(part[[1, 3, 4]], start[[1, 3, 4]])


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("name", CELLS)
def test_a_walk_of_no_steps_gives_none_and_leaves_the_state(name, with_state):
    cell = make(name)
    state = tuple(draw(2, WIDTH) for _ in range(cell.states)) if with_state else None
    for real in (None, torch.zeros(0, 2, dtype=torch.bool)):
        outputs, after = cell(draw(0, 2, INPUTS), state, real)
        assert outputs.shape == (0, 2, WIDTH)
        for part, start in zip(after, state or cell.begin(2, outputs), strict=True):
            assert torch.equal(part, start)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", CELLS)
def test_what_stands_past_a_rows_end_reaches_nothing(name, dtype):
    cell, real = make(name, 8).to(dtype), real_places(RAGGED)
    inputs = draw(7, 5, INPUTS).detach().to(dtype)
    poisoned = inputs.masked_fill(~real[..., None], math.nan)
    with torch.no_grad():
        (clean, finals), (dirty, dirty_finals) = cell(inputs, None, real), cell(poisoned, None, real)
    assert dirty.isnan().any()  # the NaN is in the padding
    for tensor, reference in zip(
        [*real_rows(clean, RAGGED), *finals], [*real_rows(dirty, RAGGED), *dirty_finals], strict=True
    ):
        assert torch.equal(tensor, reference)


@pytest.mark.parametrize("name", CELLS)
def test_its_gradient_is_that_of_its_function(name):
    cell = make_cell(name, 2, 2).double()
    scatter(cell, 9)
    real, state = real_places([2, 5, 0]), [draw(3, 2) for _ in range(cell.states)]

    def walk(inputs, *rest):
        outputs, after = cell(inputs, tuple(rest[: cell.states]), real)
        return outputs[real], *after

    assert torch.autograd.gradcheck(walk, (draw(5, 3, 2), *state, *cell.parameters()), fast_mode=True)


@pytest.mark.parametrize("name", ["elman", "lstm", "peephole", "gru"])
def test_single_precision_is_close_to_double(name):
    cell = make(name, 10)
    inputs = draw(12, 3, INPUTS)
    outputs, after = cell(inputs)
    expected = torch.autograd.grad(
        outputs.square().sum() + sum(part.sum() for part in after), [*cell.parameters(), inputs]
    )
    single = make(name, 10).float()
    single.load_state_dict(cell.state_dict())
    narrow = inputs.detach().float().requires_grad_()
    outputs32, after32 = single(narrow)
    actual = torch.autograd.grad(
        outputs32.square().sum() + sum(part.sum() for part in after32), [*single.parameters(), narrow]
    )
    for tensor, reference in zip([outputs32, *after32, *actual], [outputs, *after, *expected], strict=True):
        assert tensor.dtype == torch.float32
        torch.testing.assert_close(tensor, reference.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", CELLS)
def test_half_precision_by_autocast_is_near(name):
    """As in training with `precision: bf16`; the loss is far from the cell, so its dtype is the cell's choice."""
    cell = make(name, 11).float()
    inputs, real = draw(6, 3, INPUTS).detach().float(), real_places([6, 2, 4])
    outputs, after = cell(inputs, None, real)
    with torch.autocast("cpu", torch.bfloat16):
        half, half_after = cell(inputs, None, real)
    for tensor, reference in zip([half, *half_after], [outputs, *after], strict=True):
        torch.testing.assert_close(tensor.float(), reference, rtol=0.1, atol=0.05)
    half.float().sum().backward()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in cell.parameters())


# Where the library has no kernel in half precision, as for an LSTM in bfloat16 on a CPU without AVX-512.

HALF, ROUNDING = torch.bfloat16, 2**-8  # what a number is rounded to, at most, of itself: half of that
LIBRARY = {"elman": "rnn_tanh", "lstm": "lstm", "gru": "gru"}  # functions of torch


class Kernel:
    """The library's kernel of a cell on a CPU where it knows only float32, and raises or is wrong in half precision."""

    def __init__(self, name: str, is_half: str) -> None:
        self.walk, self.is_half, self.asked = getattr(torch, LIBRARY[name]), is_half, []

    def __call__(self, inputs: Tensor, *rest: object) -> tuple[Tensor, ...]:
        half = torch.is_autocast_enabled("cpu")
        self.asked.append((inputs.dtype, half))
        if half and self.is_half == "raises":
            raise RuntimeError("could not create a primitive descriptor for the LSTM forward propagation primitive")
        with torch.autocast("cpu", enabled=False):
            outputs, *finals = self.walk(inputs, *rest)
        return outputs.flip(0) if half and self.is_half == "wrong" else outputs, *finals


@pytest.fixture
def replace_kernel(monkeypatch):
    """Put another kernel in the place of the library's for a cell, and return it."""

    def replace(name: str, is_half: str = "raises") -> Kernel:
        kernel = Kernel(name, is_half)
        monkeypatch.setattr(type(make_cell(name, 1, 1)), "torch_function", kernel)
        monkeypatch.setattr(torch._VF, LIBRARY[name], kernel)
        rnn_cells.has_half_kernel.cache_clear()
        return kernel

    yield replace
    rnn_cells.has_half_kernel.cache_clear()


def outputs_and_gradients(cell: Cell, inputs: Tensor, state: tuple[Tensor, ...], half: bool) -> list[Tensor]:
    with torch.autocast("cpu", HALF, enabled=half):
        outputs, after = cell(inputs, state)
    loss = outputs.float().square().sum() + sum(part.float().sum() for part in after)
    return [outputs, *after, *torch.autograd.grad(loss, [inputs, *cell.parameters()])]


@pytest.mark.isa
@pytest.mark.parametrize("name", LIBRARY)
def test_without_a_half_kernel_a_cell_walks_in_float32(name, replace_kernel):
    cell, inputs = make(name, 12).float(), draw(9, 3, INPUTS).detach().float().requires_grad_()
    state = tuple(draw(3, WIDTH).detach().float() for _ in range(cell.states))
    expected = outputs_and_gradients(cell, inputs, state, half=False)
    kernel = replace_kernel(name)
    actual = outputs_and_gradients(cell, inputs, state, half=True)
    assert kernel.asked[-1] == (torch.float32, False)
    assert [part.dtype for part in actual[: 1 + cell.states]] == [HALF] * (1 + cell.states)
    for tensor, reference in zip(
        actual, expected, strict=True
    ):  # rounded once: outputs, and through them what comes back
        assert (tensor.float() - reference).norm() <= ROUNDING * reference.norm()


@pytest.mark.isa
@pytest.mark.parametrize("name", LIBRARY)
def test_the_bound_of_rounding_tells_another_state_apart(name, replace_kernel):
    cell, inputs = make(name, 12).float(), draw(9, 3, INPUTS).detach().float().requires_grad_()
    state = tuple(draw(3, WIDTH).detach().float() for _ in range(cell.states))
    expected = outputs_and_gradients(cell, inputs, state, half=False)
    replace_kernel(name)
    actual = outputs_and_gradients(cell, inputs, tuple(0.9 * part for part in state), half=True)
    assert (actual[0].float() - expected[0]).norm() > 2 * ROUNDING * expected[0].norm()


@pytest.mark.isa
@pytest.mark.parametrize("name", LIBRARY)
@pytest.mark.parametrize(("is_half", "taken"), [("right", True), ("raises", False), ("wrong", False)])
def test_a_half_kernel_is_taken_where_a_trial_shows_it_right(name, is_half, taken, replace_kernel):
    replace_kernel(name, is_half)
    before = torch.get_rng_state()
    module = nn.Sequential(make_cell(name, 1, 1), nn.Linear(1, 1))
    torch.set_rng_state(before)
    assert rnn_cells.lacking_half_kernels(module, HALF) == ([] if taken else [TORCHS[name].__name__])
    assert torch.equal(torch.get_rng_state(), before)


# Where a row ends.


def test_at_last_reads_each_rows_last_real_step():
    states, start = torch.arange(24.0).view(4, 3, 2), -torch.ones(3, 2)
    assert torch.equal(at_last(states, start, None), states[3])
    assert torch.equal(at_last(states, start, real_places([4, 4, 4])), states[3])
    actual = at_last(states, start, real_places([2, 0, 4]))
    assert torch.equal(actual, torch.stack([states[1, 0], start[1], states[3, 2]]))


@pytest.mark.parametrize("shape", [(3,), (3, 2), (3, 2, 5)], ids=str)
def test_at_last_takes_parts_of_any_shape(shape):
    states, start = torch.randn(4, *shape), torch.randn(*shape)
    actual = at_last(states, start, real_places([1, 0, 4]))
    assert torch.equal(actual, torch.stack([states[0, 0], start[1], states[3, 2]]))
    assert torch.equal(at_last(states[:0], start, None), start)


def test_at_last_sends_the_gradient_where_it_read():
    states, start = draw(3, 2, 1), draw(2, 1)
    at_last(states, start, torch.tensor([[True, False], [True, False], [False, False]])).sum().backward()
    assert states.grad.squeeze(-1).tolist() == [[0, 0], [1, 0], [0, 0]]
    assert start.grad.squeeze(-1).tolist() == [0, 1]


# First weights.


def from_state(cell: Cell) -> Tensor:
    return cell.kernel.weight_hh_l0 if hasattr(cell, "kernel") else cell.state_weight


def from_input(cell: Cell) -> Tensor:
    return cell.kernel.weight_ih_l0 if hasattr(cell, "kernel") else cell.input_weight


@pytest.mark.parametrize("name", CELLS)
def test_first_weights_carry_signals_far(name):
    torch.manual_seed(0)
    cell = make_cell(name, 30, 20)
    identity, most = torch.eye(20), math.sqrt(6 / (30 + 20))
    for gate in from_state(cell).chunk(cell.gates):
        torch.testing.assert_close(gate @ gate.T, identity, rtol=0, atol=1e-5)
    for gate in from_input(cell).chunk(cell.gates):
        assert 0.9 * most < gate.abs().max().item() <= most
        assert gate.mean().item() == pytest.approx(0, abs=0.05)
    if name == "jordan":
        torch.testing.assert_close(cell.output.weight @ cell.output.weight.T, identity, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", CELLS)
def test_forget_gates_start_open_and_no_other(name):
    biases = [value for full, value in make_cell(name, 3, WIDTH).named_parameters() if "bias" in full]
    summed = sum(bias.sum().item() for bias in biases)
    if name in ("lstm", "peephole"):
        i, f, g, o = sum(biases).chunk(4)
        assert f.tolist() == [1.0] * WIDTH
        assert summed == WIDTH
        assert not torch.cat([i, g, o]).any()
    else:
        assert summed == 0
        assert not any(bias.any() for bias in biases)


@pytest.mark.parametrize("name", CELLS)
def test_a_seed_decides_the_first_weights(name):
    cells = []
    for _ in range(3):
        torch.manual_seed(5)
        cells.append(make_cell(name, 3, WIDTH))
    for reference in cells[1:]:
        assert all(torch.equal(a, b) for a, b in zip(cells[0].parameters(), reference.parameters(), strict=True))


def test_every_name_makes_its_own_cell():
    assert rnn_cells.CELLS == CELLS
    kinds = [type(make_cell(name, 3, 2)).__name__ for name in CELLS]
    assert kinds == ["Elman", "Jordan", "LSTM", "Peephole", "GRU"]


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("elman", 4 * (3 + 4 + 2)),
        ("jordan", 4 * (3 + 4 + 1) + 4 * (4 + 1)),
        ("lstm", 16 * (3 + 4 + 2)),
        ("peephole", 16 * (3 + 4 + 1) + 3 * 4),
        ("gru", 12 * (3 + 4 + 2)),
    ],
)
def test_it_has_as_many_weights_as_its_equations(name, count):
    assert sum(weight.numel() for weight in make_cell(name, INPUTS, WIDTH).parameters()) == count
