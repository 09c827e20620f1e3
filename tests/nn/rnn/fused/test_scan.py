"""A scan is its cell step by step: values and gradients, for weft's cells and for cells of one's own."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import equations
from tests.equations import CELLS, affine, agree, scatter, weights_of
from torch import Tensor, nn

from weft.nn.rnn.cells import Cell, Stage, make_cell
from weft.nn.rnn.fused import scan as scanning
from weft.nn.rnn.fused.scan import scan

quick = settings(deadline=None, derandomize=True, max_examples=25)
WIDTH = 3


# Cells of one's own, and below each what it is step by step, without stages.


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
        return (Stage(leak, self.matrix),)


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
        return Stage(narrow, self.inner.weight), Stage(widen, self.outer.weight, self.outer.bias)


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
    """A stage of operations that few would foresee."""

    def __init__(self, inputs, width):
        super().__init__(inputs, width)
        del self.rate
        self.matrix = nn.Parameter(torch.zeros(width, width))

    def vectors(self):
        return None

    def stages(self):
        return (Stage(crooked, self.matrix),)


def odd(w, input_proj, h):
    turned = w["matrix"] @ h
    return (torch.where(input_proj > 0, input_proj * torch.sin(turned), turned.clamp(-0.4, 0.4)) + h / 2,)


OWN = {"leaky": (Leaky, leaky), "twofold": (Twofold, twofold), "odd": (Odd, odd)}
ALL = [*CELLS, *OWN]


def make(name: str, seed: int = 0, width: int = WIDTH) -> Cell:
    cell = (make_cell(name, 2, width) if name in CELLS else OWN[name][0](2, width)).double()
    scatter(cell, seed)
    return cell


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def given_to(cell: Cell, steps: int, rows: int) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Draw inputs (T, B, I) and a state to start from."""
    return draw(steps, rows, cell.inputs), tuple(draw(rows, cell.width) for _ in range(cell.states))


def walk(cell: Cell, inputs: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return scan(cell, cell.ahead(inputs), state)


def by_hand(name: str, cell: Cell, inputs: Tensor, state: tuple[Tensor, ...]) -> list[Tensor]:
    """Walk row by row; return each part of the state after every step, (T, B, D)."""
    w, rows = weights_of(cell), []
    for row in range(inputs.shape[1]):
        one, walked = tuple(part[row] for part in state), []
        for x in inputs[:, row]:
            one = OWN[name][1](w, affine(w, "read", x), *one) if name in OWN else equations.step(name, w, x, one)
            walked.append(torch.stack(one))
        rows.append(torch.stack(walked))  # (T, parts, D)
    return list(torch.stack(rows, 1).unbind(2))


def all_given(cell: Cell, inputs: Tensor, state: tuple[Tensor, ...]) -> dict[str, Tensor]:
    return {**weights_of(cell), "inputs": inputs, **{f"state {number}": part for number, part in enumerate(state)}}


def check(name: str, cell: Cell, steps: int, rows: int) -> None:
    inputs, state = given_to(cell, steps, rows)
    agree(walk(cell, inputs, state), by_hand(name, cell, inputs, state), all_given(cell, inputs, state))


@pytest.fixture(params=[None, torch.float64], ids=["by steps", "in kernels"])
def way(request, monkeypatch):
    """Walk step by step, or in kernels, which are made for single precision unless told otherwise."""
    monkeypatch.setattr(scanning, "FUSED", request.param)


@pytest.mark.parametrize("steps", [1, 9])
@pytest.mark.parametrize("name", ALL)
def test_a_scan_is_its_cell_step_by_step(name, steps, way):
    check(name, make(name, 1), steps, 3)


@quick
@given(st.sampled_from(ALL), st.integers(1, 7), st.integers(1, 4), st.integers(1, 5), st.integers(0, 99), st.booleans())
def test_it_is_so_for_any_size(name, steps, rows, width, seed, kernels):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scanning, "FUSED", torch.float64 if kernels else None)
        check(name, make(name, seed, width), steps, rows)


@pytest.mark.parametrize("name", OWN)
def test_a_scan_of_another_cell_is_caught(name, way, monkeypatch):
    """The negative control: what is told of the cell is not quite so."""
    kind, told = OWN[name]
    monkeypatch.setitem(
        OWN, name, (kind, lambda w, input_proj, *state: told(w, input_proj, *(1.001 * part for part in state)))
    )
    with pytest.raises(AssertionError, match="not close"):
        check(name, make(name, 1), 6, 3)


@pytest.mark.parametrize("name", ["jordan", "peephole", "twofold"])
def test_its_gradient_is_that_of_its_function(name, way):
    cell = make(name, 2, width=2)
    inputs, state = given_to(cell, 5, 2)
    named = all_given(cell, inputs, state)
    assert torch.autograd.gradcheck(lambda *_: walk(cell, inputs, state), tuple(named.values()), fast_mode=True)


# Single precision, which takes the way of kernels unasked.


@pytest.mark.parametrize("name", ["peephole", "odd"])
def test_single_precision_is_close_to_double(name):
    cell = make(name, 3, width=9)
    inputs, state = given_to(cell, 11, 4)
    single = copy.deepcopy(cell).float()
    inputs32, *state32 = (one.detach().float().requires_grad_() for one in (inputs, *state))
    got, must = walk(single, inputs32, tuple(state32)), by_hand(name, cell, inputs, state)
    named, weigh = all_given(cell, inputs, state), [torch.randn_like(one) for one in must]
    mine = torch.autograd.grad(
        sum((one * weight.float()).sum() for one, weight in zip(got, weigh, strict=True)),
        list(all_given(single, inputs32, tuple(state32)).values()),
    )
    yours = torch.autograd.grad(
        sum((one * weight).sum() for one, weight in zip(must, weigh, strict=True)), list(named.values())
    )
    for what, one, other in zip([*map(str, range(len(got))), *named], [*got, *mine], [*must, *yours], strict=True):
        close = 1e-5 * max(other.abs().max().item(), 1)
        torch.testing.assert_close(
            one.double(), other, rtol=1e-5, atol=close, msg=lambda told, what=what: f"{what}: {told}"
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_bears_numbers_that_saturate(dtype):
    cell = make("peephole", 4).to(dtype)
    inputs, state = given_to(cell, 6, 3)
    inputs = (1e4 * inputs.detach().to(dtype)).requires_grad_()
    walked = walk(cell, inputs, tuple(part.detach().to(dtype) for part in state))
    (grad,) = torch.autograd.grad(sum(part.sum() for part in walked), inputs)
    assert all(one.isfinite().all() for one in (*walked, grad))
    assert walked[0].abs().max() <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_not_a_number_stays_in_its_row_and_after_its_step(dtype):
    cell, hurt = make("peephole", 5).to(dtype), torch.zeros(6, 3, dtype=torch.bool)
    hurt[4:, 1] = True
    inputs = draw(6, 3, cell.inputs).detach().to(dtype)
    state = tuple(torch.zeros(3, WIDTH, dtype=dtype) for _ in range(cell.states))
    clean = walk(cell, inputs, state)
    inputs[4, 1] = math.nan
    for dirty, one in zip(walk(cell, inputs, state), clean, strict=True):
        assert dirty[hurt].isnan().all()
        assert torch.equal(dirty[~hurt], one[~hurt])


# How it is called.


@pytest.mark.parametrize("name", ALL)
def test_a_walk_of_no_steps_or_no_rows_is_empty(name, way):
    cell = make(name)
    for steps, rows in ((0, 2), (5, 0), (0, 0)):
        walked = walk(cell, *given_to(cell, steps, rows))
        assert [part.shape for part in walked] == [(steps, rows, WIDTH)] * cell.states


def strided(kind: str, input_proj: Tensor) -> Tensor:
    """Lay the same numbers out in another way."""
    match kind:
        case "batch-first":
            return input_proj.transpose(0, 1).contiguous().transpose(0, 1)
        case "every second":
            return input_proj.repeat_interleave(2, 0)[::2]
        case "places first":
            return input_proj.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    return input_proj[:1].expand_as(input_proj)  # one step for all, with no memory of its own


@pytest.mark.parametrize("kind", ["batch-first", "every second", "places first", "expanded"])
@pytest.mark.parametrize("name", ["peephole", "twofold"])
def test_it_reads_what_does_not_lie_in_one_piece(name, kind, way):
    cell = make(name, 6)
    input_proj, columns = draw(6, 4, cell.gates * WIDTH), [draw(WIDTH, 4) for _ in range(cell.states)]
    laid, state = strided(kind, input_proj), tuple(column.T for column in columns)
    assert not laid.is_contiguous()
    assert not state[0].is_contiguous()
    whole = scan(cell, laid.contiguous(), tuple(part.contiguous() for part in state))
    agree(scan(cell, laid, state), whole, {"input_proj": input_proj, **dict(zip("hcn", columns, strict=False))})


@pytest.mark.parametrize("name", ["jordan", "twofold"])
def test_gradients_may_come_in_any_layout(name, way):
    cell = make(name, 7)
    inputs, state = given_to(cell, 6, 4)
    wanted = list(all_given(cell, inputs, state).values())

    def back(weigh: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(walk(cell, inputs, state), wanted, [weigh] * cell.states)

    turned = torch.randn(4, WIDTH, 6, dtype=torch.float64).permute(2, 0, 1)
    scalar = torch.ones((), dtype=torch.float64).expand(6, 4, WIDTH)  # what comes of a sum
    for weigh in (turned, scalar):
        for one, other in zip(back(weigh), back(weigh.contiguous()), strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", ["peephole", "twofold"])
def test_without_gradients_it_gives_the_same_and_keeps_nothing(name, way):
    cell = make(name, 8)
    inputs, state = given_to(cell, 6, 3)
    must = walk(cell, inputs, state)
    assert must[0].requires_grad
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            got = walk(cell, inputs, state)
        for one, other in zip(got, must, strict=True):
            assert not one.requires_grad
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    "part",
    [
        lambda walked: walked[0][-1],
        lambda walked: walked[-1][-1],
        lambda walked: walked[0][:, 1],
        lambda walked: walked[-1][2],
        lambda walked: walked[0][:1],
    ],
    ids=["last output", "last of the last part", "one row", "one step of the last part", "first step"],
)
@pytest.mark.parametrize("name", ["peephole", "jordan"])
def test_a_loss_may_use_a_part_of_what_it_gives(name, part, way):
    cell = make(name, 9)
    inputs, state = given_to(cell, 6, 3)
    named = all_given(cell, inputs, state)
    agree([part(walk(cell, inputs, state))], [part(by_hand(name, cell, inputs, state))], named)


@pytest.mark.parametrize("wanted", ["inputs", "state 0", "state 1", "state_weight", "peepholes"])
def test_only_what_asks_for_a_gradient_gets_one(wanted, way):
    cell = make("peephole", 10)
    inputs, state = given_to(cell, 6, 3)
    named = all_given(cell, inputs, state)
    (must,) = torch.autograd.grad(sum(part.square().sum() for part in walk(cell, inputs, state)), named[wanted])
    for name, one in named.items():
        one.requires_grad_(name == wanted)
    (got,) = torch.autograd.grad(sum(part.square().sum() for part in walk(cell, inputs, state)), named[wanted])
    torch.testing.assert_close(got, must)


def test_one_tensor_may_be_every_part_of_the_first_state(way):
    cell, start = make("peephole", 11), draw(3, WIDTH)
    inputs, _ = given_to(cell, 6, 3)
    agree(walk(cell, inputs, (start, start)), by_hand("peephole", cell, inputs, (start, start)), {"start": start})


@pytest.mark.parametrize("name", ["jordan", "twofold"])
def test_it_changes_nothing_that_it_is_given_and_can_be_walked_back_twice(name, way):
    cell = make(name, 12)
    input_proj, state = draw(6, 3, cell.gates * WIDTH), given_to(cell, 6, 3)[1]
    given = (input_proj, *state, *cell.parameters())
    before = [one.detach().clone() for one in given]
    loss = sum(part.square().sum() for part in scan(cell, input_proj, state))
    first, second = (torch.autograd.grad(loss, input_proj, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    assert all(torch.equal(one, old) for one, old in zip(given, before, strict=True))


def test_a_gradient_of_the_gradient_is_right_or_refused(monkeypatch):
    """What kernels walk back has no gradient of its own: nothing may be left out in silence."""
    cell = make("peephole", 15)
    inputs, state = given_to(cell, 6, 3)

    def twice() -> None:
        (grad,) = torch.autograd.grad(walk(cell, inputs, state)[0].square().sum(), inputs, create_graph=True)
        grad.square().sum().backward()

    monkeypatch.setattr(scanning, "FUSED", None)
    twice()
    assert cell.state_weight.grad.any()
    monkeypatch.setattr(scanning, "FUSED", torch.float64)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        twice()


def test_two_walks_of_one_cell_add_up(way):
    cell = make("peephole", 13)
    losses = [sum(part.square().sum() for part in walk(cell, *given_to(cell, 6, 3))) for _ in range(2)]
    apart = [torch.autograd.grad(loss, cell.state_weight, retain_graph=True)[0] for loss in losses]
    (both,) = torch.autograd.grad(sum(losses), cell.state_weight)
    torch.testing.assert_close(both, sum(apart))


# A cell of one's own is a layer at once.


@pytest.mark.parametrize("name", OWN)
def test_a_cell_of_ones_own_reads_ragged_rows(name, way):
    cell, lengths = make(name, 14), [5, 0, 2]
    inputs, state = draw(5, 3, 2), tuple(draw(3, WIDTH) for _ in range(cell.states))
    real = torch.arange(5)[:, None] < torch.tensor(lengths)
    outputs, after = cell(inputs, state, real)
    must = by_hand(name, cell, inputs, state)
    ends = [
        torch.stack([part[length - 1, row] if length else start[row] for row, length in enumerate(lengths)])
        for part, start in zip(must, state, strict=True)
    ]
    agree([outputs[real], *after], [must[0][real], *ends], {**weights_of(cell), "inputs": inputs})
