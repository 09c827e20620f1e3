"""A scan equals its cell run step by step: values and gradients, for weft's cells and for user-defined cells."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import equations
from tests.equations import CELLS, affine, agree, scatter, weights_of
from torch import Tensor, nn

from weft.nn.kernels import dispatch
from weft.nn.rnn.cells import Cell, CellStage, make_cell
from weft.nn.rnn.fused.scan import scan

quick = settings(deadline=None, derandomize=True, max_examples=12)
WIDTH = 3


# User-defined cells, and below each its equations for one step, without stages.


def leak(input_proj, product, state, vectors):
    a = torch.sigmoid(product[1] + vectors[0])
    return ((1 - a) * state[0] + a * torch.tanh(input_proj[0] + product[0]),)


class Leaky(Cell):
    """One stage of two products, a vector, no bias."""

    gates = 1

    def __init__(self, inputs, width):
        super().__init__(inputs, width)
        self.read, self.rate = nn.Linear(inputs, width), nn.Parameter(torch.zeros(1, width))
        self.matrix = nn.Parameter(torch.zeros(2 * width, width))

    def from_input(self):
        return self.read.weight, self.read.bias

    def vectors(self):
        return self.rate

    def stages(self):
        return (CellStage(leak, self.matrix),)


def leaky(w, input_proj, h):
    first, second = w["matrix"].chunk(2)
    a = torch.sigmoid(second @ h + w["rate"][0])
    return (h - a * h + a * torch.tanh(input_proj + first @ h),)


def narrow(input_proj, product, state, vectors):
    return (torch.tanh(input_proj[0] + product[0]) * state[1],)


def widen(input_proj, product, state, vectors):
    h = torch.sigmoid(input_proj[1] + product[1]) * state[0] - torch.tanh(product[0]) / 2
    return h, vectors[1] * state[2] + torch.relu(h + vectors[0]), input_proj[1] - state[1]


class Twofold(Cell):
    """Two stages, the second of two products with a bias; a state of three parts; every stage reads every kind."""

    gates, states = 2, 3

    def __init__(self, inputs, width):
        super().__init__(inputs, width)
        self.read, self.pair = nn.Linear(inputs, 2 * width), nn.Parameter(torch.zeros(2, width))
        self.inner, self.outer = nn.Linear(width, width, bias=False), nn.Linear(width, 2 * width)

    def from_input(self):
        return self.read.weight, self.read.bias

    def vectors(self):
        return self.pair

    def stages(self):
        return CellStage(narrow, self.inner.weight), CellStage(widen, self.outer.weight, self.outer.bias)


def twofold(w, input_proj, h, m, n):
    first, second = input_proj.chunk(2)
    inner = torch.tanh(first + w["inner.weight"] @ h) * m
    down, gate = (w["outer.weight"] @ inner + w["outer.bias"]).chunk(2)
    new = torch.sigmoid(second + gate) * h - 0.5 * torch.tanh(down)
    return new, w["pair"][1] * n + (new + w["pair"][0]).clamp(min=0), second - m


def crooked(input_proj, product, state, vectors):
    h = torch.where(input_proj[0] > 0, input_proj[0] * torch.sin(product[0]), product[0].clamp(-0.4, 0.4))
    return (torch.add(h, state[0], alpha=0.5),)


class Odd(Leaky):
    """A stage with operations that cannot be fused."""

    def __init__(self, inputs, width):
        super().__init__(inputs, width)
        del self.rate
        self.matrix = nn.Parameter(torch.zeros(width, width))

    def vectors(self):
        return None

    def stages(self):
        return (CellStage(crooked, self.matrix),)


def odd(w, input_proj, h):
    transposed = w["matrix"] @ h
    return (torch.where(input_proj > 0, input_proj * torch.sin(transposed), transposed.clamp(-0.4, 0.4)) + h / 2,)


OWN = {"leaky": (Leaky, leaky), "twofold": (Twofold, twofold), "odd": (Odd, odd)}
ALL = [*CELLS, *OWN]


def make(name: str, seed: int = 0, width: int = WIDTH) -> Cell:
    cell = (make_cell(name, 2, width) if name in CELLS else OWN[name][0](2, width)).double()
    scatter(cell, seed)
    return cell


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def draw_inputs(cell: Cell, steps: int, rows: int) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Draw inputs (T, B, I) and an initial state."""
    return draw(steps, rows, cell.inputs), tuple(draw(rows, cell.width) for _ in range(cell.states))


def run_scan(cell: Cell, inputs: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return scan(cell, cell.ahead(inputs), state)


def by_steps(name: str, cell: Cell, inputs: Tensor, state: tuple[Tensor, ...]) -> list[Tensor]:
    """Run row by row, step by step; return each part of the state after every step, (T, B, D)."""
    w, rows = weights_of(cell), []
    for row in range(inputs.shape[1]):
        row_state, states = tuple(part[row] for part in state), []
        for x in inputs[:, row]:
            row_state = (
                OWN[name][1](w, affine(w, "read", x), *row_state)
                if name in OWN
                else equations.step(name, w, x, row_state)
            )
            states.append(torch.stack(row_state))
        rows.append(torch.stack(states))  # (T, parts, D)
    return list(torch.stack(rows, 1).unbind(2))


def named_tensors(cell: Cell, inputs: Tensor, state: tuple[Tensor, ...]) -> dict[str, Tensor]:
    return {**weights_of(cell), "inputs": inputs, **{f"state {number}": part for number, part in enumerate(state)}}


def check(name: str, cell: Cell, steps: int, rows: int) -> None:
    inputs, state = draw_inputs(cell, steps, rows)
    agree(run_scan(cell, inputs, state), by_steps(name, cell, inputs, state), named_tensors(cell, inputs, state))


@pytest.fixture(params=[None, torch.float64], ids=["by steps", "in kernels"])
def implementation(request, monkeypatch):
    """Run step by step, or in kernels, which by default are used for single precision only."""
    monkeypatch.setattr(dispatch, "SCAN_DTYPE", request.param)


@pytest.mark.parametrize("steps", [1, 9])
@pytest.mark.parametrize("name", ALL)
def test_a_scan_is_its_cell_step_by_step(name, steps, implementation):
    check(name, make(name, 1), steps, 3)


@quick
@given(st.sampled_from(ALL), st.integers(1, 7), st.integers(1, 4), st.integers(1, 5), st.integers(0, 99), st.booleans())
def test_it_is_so_for_any_size(name, steps, rows, width, seed, kernels):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "SCAN_DTYPE", torch.float64 if kernels else None)
        check(name, make(name, seed, width), steps, rows)


@pytest.mark.parametrize("name", OWN)
def test_a_scan_of_another_cell_is_caught(name, implementation, monkeypatch):
    """The negative control: equations that differ slightly from the cell."""
    kind, step = OWN[name]
    monkeypatch.setitem(
        OWN, name, (kind, lambda w, input_proj, *state: step(w, input_proj, *(1.001 * part for part in state)))
    )
    with pytest.raises(AssertionError, match="not close"):
        check(name, make(name, 1), 6, 3)


@pytest.mark.parametrize("name", ["jordan", "peephole", "twofold"])
def test_its_gradient_is_that_of_its_function(name, implementation):
    cell = make(name, 2, width=2)
    inputs, state = draw_inputs(cell, 5, 2)
    named = named_tensors(cell, inputs, state)
    assert torch.autograd.gradcheck(lambda *_: run_scan(cell, inputs, state), tuple(named.values()), fast_mode=True)


# Single precision, for which kernels are the default.


@pytest.mark.parametrize("name", ["peephole", "odd"])
def test_single_precision_is_close_to_double(name):
    cell = make(name, 3, width=9)
    inputs, state = draw_inputs(cell, 11, 4)
    single = copy.deepcopy(cell).float()
    inputs32, *state32 = (tensor.detach().float().requires_grad_() for tensor in (inputs, *state))
    actual, expected = run_scan(single, inputs32, tuple(state32)), by_steps(name, cell, inputs, state)
    named, grad_outputs = named_tensors(cell, inputs, state), [torch.randn_like(tensor) for tensor in expected]
    grads = torch.autograd.grad(
        sum((tensor * weight.float()).sum() for tensor, weight in zip(actual, grad_outputs, strict=True)),
        list(named_tensors(single, inputs32, tuple(state32)).values()),
    )
    expected_grads = torch.autograd.grad(
        sum((tensor * weight).sum() for tensor, weight in zip(expected, grad_outputs, strict=True)),
        list(named.values()),
    )
    for what, tensor, reference in zip(
        [*map(str, range(len(actual))), *named], [*actual, *grads], [*expected, *expected_grads], strict=True
    ):
        close = 1e-5 * max(reference.abs().max().item(), 1)
        torch.testing.assert_close(
            tensor.double(), reference, rtol=1e-5, atol=close, msg=lambda message, what=what: f"{what}: {message}"
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_bears_numbers_that_saturate(dtype):
    cell = make("peephole", 4).to(dtype)
    inputs, state = draw_inputs(cell, 6, 3)
    inputs = (1e4 * inputs.detach().to(dtype)).requires_grad_()
    states = run_scan(cell, inputs, tuple(part.detach().to(dtype) for part in state))
    (grad,) = torch.autograd.grad(sum(part.sum() for part in states), inputs)
    assert all(tensor.isfinite().all() for tensor in (*states, grad))
    assert states[0].abs().max() <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_not_a_number_stays_in_its_row_and_after_its_step(dtype):
    cell, is_nan = make("peephole", 5).to(dtype), torch.zeros(6, 3, dtype=torch.bool)
    is_nan[4:, 1] = True
    inputs = draw(6, 3, cell.inputs).detach().to(dtype)
    state = tuple(torch.zeros(3, WIDTH, dtype=dtype) for _ in range(cell.states))
    clean = run_scan(cell, inputs, state)
    inputs[4, 1] = math.nan
    for dirty, tensor in zip(run_scan(cell, inputs, state), clean, strict=True):
        assert dirty[is_nan].isnan().all()
        assert torch.equal(dirty[~is_nan], tensor[~is_nan])


# How it is called.


@pytest.mark.parametrize("name", ALL)
def test_a_walk_of_no_steps_or_no_rows_is_empty(name, implementation):
    cell = make(name)
    for steps, rows in ((0, 2), (5, 0), (0, 0)):
        states = run_scan(cell, *draw_inputs(cell, steps, rows))
        assert [part.shape for part in states] == [(steps, rows, WIDTH)] * cell.states


def strided(kind: str, input_proj: Tensor) -> Tensor:
    """Return the same numbers in another memory layout."""
    match kind:
        case "batch-first":
            return input_proj.transpose(0, 1).contiguous().transpose(0, 1)
        case "every second":
            return input_proj.repeat_interleave(2, 0)[::2]
        case "places first":
            return input_proj.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    return input_proj[:1].expand_as(input_proj)  # one step for all, stride 0


@pytest.mark.parametrize("kind", ["batch-first", "every second", "places first", "expanded"])
@pytest.mark.parametrize("name", ["peephole", "twofold"])
def test_it_reads_what_does_not_lie_in_one_piece(name, kind, implementation):
    cell = make(name, 6)
    input_proj, columns = draw(6, 4, cell.gates * WIDTH), [draw(WIDTH, 4) for _ in range(cell.states)]
    strided_input, state = strided(kind, input_proj), tuple(column.T for column in columns)
    assert not strided_input.is_contiguous()
    assert not state[0].is_contiguous()
    whole = scan(cell, strided_input.contiguous(), tuple(part.contiguous() for part in state))
    agree(
        scan(cell, strided_input, state), whole, {"input_proj": input_proj, **dict(zip("hcn", columns, strict=False))}
    )


@pytest.mark.parametrize("name", ["jordan", "twofold"])
def test_gradients_may_come_in_any_layout(name, implementation):
    cell = make(name, 7)
    inputs, state = draw_inputs(cell, 6, 4)
    wanted = list(named_tensors(cell, inputs, state).values())

    def back(grad_outputs: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(run_scan(cell, inputs, state), wanted, [grad_outputs] * cell.states)

    transposed = torch.randn(4, WIDTH, 6, dtype=torch.float64).permute(2, 0, 1)
    scalar = torch.ones((), dtype=torch.float64).expand(6, 4, WIDTH)  # the gradient of a sum
    for grad_outputs in (transposed, scalar):
        for tensor, reference in zip(back(grad_outputs), back(grad_outputs.contiguous()), strict=True):
            torch.testing.assert_close(tensor, reference)


@pytest.mark.parametrize("name", ["peephole", "twofold"])
def test_without_gradients_it_gives_the_same_and_keeps_nothing(name, implementation):
    cell = make(name, 8)
    inputs, state = draw_inputs(cell, 6, 3)
    expected = run_scan(cell, inputs, state)
    assert expected[0].requires_grad
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            actual = run_scan(cell, inputs, state)
        for tensor, reference in zip(actual, expected, strict=True):
            assert not tensor.requires_grad
            torch.testing.assert_close(tensor, reference)


@pytest.mark.parametrize(
    "part",
    [
        lambda states: states[0][-1],
        lambda states: states[-1][-1],
        lambda states: states[0][:, 1],
        lambda states: states[-1][2],
        lambda states: states[0][:1],
    ],
    ids=["last output", "last of the last part", "one row", "one step of the last part", "first step"],
)
@pytest.mark.parametrize("name", ["peephole", "jordan"])
def test_a_loss_may_use_a_part_of_what_it_gives(name, part, implementation):
    cell = make(name, 9)
    inputs, state = draw_inputs(cell, 6, 3)
    named = named_tensors(cell, inputs, state)
    agree([part(run_scan(cell, inputs, state))], [part(by_steps(name, cell, inputs, state))], named)


@pytest.mark.parametrize("wanted", ["inputs", "state 0", "state 1", "state_weight", "peepholes"])
def test_only_what_asks_for_a_gradient_gets_one(wanted, implementation):
    cell = make("peephole", 10)
    inputs, state = draw_inputs(cell, 6, 3)
    named = named_tensors(cell, inputs, state)
    (expected,) = torch.autograd.grad(sum(part.square().sum() for part in run_scan(cell, inputs, state)), named[wanted])
    for name, tensor in named.items():
        tensor.requires_grad_(name == wanted)
    (actual,) = torch.autograd.grad(sum(part.square().sum() for part in run_scan(cell, inputs, state)), named[wanted])
    torch.testing.assert_close(actual, expected)


def test_one_tensor_may_be_every_part_of_the_first_state(implementation):
    cell, start = make("peephole", 11), draw(3, WIDTH)
    inputs, _ = draw_inputs(cell, 6, 3)
    agree(run_scan(cell, inputs, (start, start)), by_steps("peephole", cell, inputs, (start, start)), {"start": start})


@pytest.mark.parametrize("name", ["jordan", "twofold"])
def test_it_changes_nothing_that_it_is_given_and_can_be_walked_back_twice(name, implementation):
    cell = make(name, 12)
    input_proj, state = draw(6, 3, cell.gates * WIDTH), draw_inputs(cell, 6, 3)[1]
    given = (input_proj, *state, *cell.parameters())
    before = [tensor.detach().clone() for tensor in given]
    loss = sum(part.square().sum() for part in scan(cell, input_proj, state))
    first, second = (torch.autograd.grad(loss, input_proj, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    assert all(torch.equal(tensor, old) for tensor, old in zip(given, before, strict=True))


def test_a_gradient_of_the_gradient_is_right_or_refused(monkeypatch):
    """The kernels' backward pass is not differentiable: that must raise, not drop terms silently."""
    cell = make("peephole", 15)
    inputs, state = draw_inputs(cell, 6, 3)

    def twice() -> None:
        (grad,) = torch.autograd.grad(run_scan(cell, inputs, state)[0].square().sum(), inputs, create_graph=True)
        grad.square().sum().backward()

    monkeypatch.setattr(dispatch, "SCAN_DTYPE", None)
    twice()
    assert cell.state_weight.grad.any()
    monkeypatch.setattr(dispatch, "SCAN_DTYPE", torch.float64)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        twice()


def test_two_walks_of_one_cell_add_up(implementation):
    cell = make("peephole", 13)
    losses = [sum(part.square().sum() for part in run_scan(cell, *draw_inputs(cell, 6, 3))) for _ in range(2)]
    separate = [torch.autograd.grad(loss, cell.state_weight, retain_graph=True)[0] for loss in losses]
    (both,) = torch.autograd.grad(sum(losses), cell.state_weight)
    torch.testing.assert_close(both, sum(separate))


# A user-defined cell is a layer.


@pytest.mark.parametrize("name", OWN)
def test_a_cell_of_ones_own_reads_ragged_rows(name, implementation):
    cell, lengths = make(name, 14), [5, 0, 2]
    inputs, state = draw(5, 3, 2), tuple(draw(3, WIDTH) for _ in range(cell.states))
    real = torch.arange(5)[:, None] < torch.tensor(lengths)
    outputs, after = cell(inputs, state, real)
    expected = by_steps(name, cell, inputs, state)
    ends = [
        torch.stack([part[length - 1, row] if length else start[row] for row, length in enumerate(lengths)])
        for part, start in zip(expected, state, strict=True)
    ]
    agree([outputs[real], *after], [expected[0][real], *ends], {**weights_of(cell), "inputs": inputs})
