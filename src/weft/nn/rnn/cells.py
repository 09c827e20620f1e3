"""Recurrent cells: Elman, Jordan, LSTM, peephole LSTM and GRU, each a step function given by its equations.

    Elman (1990)         h_t = tanh(U x_t + W h_{t-1} + b)
    Jordan (1986)        h_t = tanh(U x_t + W y_{t-1} + b)             y_t = tanh(V h_t + b_y)
    LSTM                 i_t = σ(W_xi x_t + W_hi h_{t-1} + b_i)        f_t = σ(W_xf x_t + W_hf h_{t-1} + b_f)
                         g_t = tanh(W_xg x_t + W_hg h_{t-1} + b_g)     o_t = σ(W_xo x_t + W_ho h_{t-1} + b_o)
                         c_t = f_t ⊙ c_{t-1} + i_t ⊙ g_t               h_t = o_t ⊙ tanh(c_t)
    peephole             as LSTM, with  + w_ci ⊙ c_{t-1} in i_t,  + w_cf ⊙ c_{t-1} in f_t,  + w_co ⊙ c_t in o_t
    GRU                  r_t = σ(W_xr x_t + W_hr h_{t-1} + b_r)        z_t = σ(W_xz x_t + W_hz h_{t-1} + b_z)
                         n_t = tanh(W_xn x_t + b_n + r_t ⊙ (W_hn h_{t-1} + b_hn))
                         h_t = (1 - z_t) ⊙ n_t + z_t ⊙ h_{t-1}

LSTM: Hochreiter & Schmidhuber 1997 with the forget gate of Gers et al. 2000; peephole: Graves 2013, eqs. 7 to 11, where
the matrices from cell to gate are diagonal; GRU: Cho et al. 2014, the reset gate after the product, as in cuDNN. The
recurrent input of a Jordan network is its output, not its hidden layer.

A step is a sequence of stages, each a matrix product followed by an elementwise function. The input projection
W_x x_t + b is one product for all steps. Elman, LSTM and GRU run in torch's fused kernels (oneDNN, cuDNN) where those
are the fastest, every other cell in `weft.nn.rnn.fused.scan`. A user-defined cell needs only its stages. Where torch
has no half-precision kernel for this CPU, its float32 kernel is used (`has_half_kernel`).
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.errors import ConfigError
from weft.nn.kernels import dispatch
from weft.nn.layers.dropout import draw_mask
from weft.nn.rnn.fused.scan import scan
from weft.nn.rnn.fused.trace import Parts, Pointwise
from weft.nn.rnn.init import init_recurrent_

CellState = tuple[Tensor, ...]  # the recurrent state of a layer, (B, D) each

CELLS = ("elman", "jordan", "lstm", "peephole", "gru")
_HALF_ERROR = 0.05  # absolute, of outputs within ±1 after a few steps in bfloat16, whose relative rounding is 2^-9


class CellStage(NamedTuple):
    """One stage of a step: a matrix product, then an elementwise function.

    `pointwise(input_proj, product, state, vectors)` takes the gates' input projections, the gates of this product, the
    previous state and the cell's vectors. The next stage's matrix multiplies the first value that it returns. The
    values of the last stage are the new state; the first of them is the step's output.
    """

    pointwise: Pointwise
    weight: Tensor  # (G·D, D)
    bias: Tensor | None = None  # (G·D,)


def _missing_method(cell: "Cell", method: str) -> ConfigError:
    """Return the error for a user-defined cell that lacks a required method."""
    return ConfigError(f"{type(cell).__name__} does not define {method}(), which every cell needs")


class Cell(nn.Module):
    """A recurrent cell. `gates` is the number of input projections G, `states` the number of vectors in its state."""

    gates: ClassVar[int]
    states: ClassVar[int] = 1
    drop: float = 0.0  # DropConnect on the state-to-state weights: the share dropped in training

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.inputs, self.width = inputs, width

    def from_input(self) -> tuple[Tensor, Tensor]:
        """Return weight (G·D, I) and bias (G·D,) of the input projection."""
        raise _missing_method(self, "from_input")

    def stages(self) -> tuple[CellStage, ...]:
        """Return the step's stages."""
        raise _missing_method(self, "stages")

    def vectors(self) -> Tensor | None:
        """Return the cell's own vectors (K, D), if it has any."""
        return None

    def dropped(self) -> tuple[CellStage, ...]:
        """Return the stages for one sequence; in training with DropConnect on the state-to-state weights."""
        first, *rest = self.stages()
        if self.training and self.drop:
            first = first._replace(weight=first.weight * draw_mask(self.drop, first.weight.shape, first.weight))
        return first, *rest

    def ahead(self, inputs: Tensor) -> Tensor:
        """Compute the input projection W_x x + b of inputs (..., I), for all steps at once: (..., G·D)."""
        return F.linear(inputs, *self.from_input())

    def step(self, input_proj: Tensor, state: CellState, stages: Sequence[CellStage] | None = None) -> CellState:
        """Return the state after one step, given input_proj (B, G·D); `stages` replace the cell's own (`dropped`)."""
        parts, vectors = input_proj.chunk(self.gates, -1), self.vectors()
        values: Parts = state
        for stage in stages or self.stages():
            product = F.linear(values[0], stage.weight, stage.bias)
            gates = product.chunk(product.shape[-1] // self.width, -1)
            values = stage.pointwise(parts, gates, state, () if vectors is None else vectors.unbind())
        return tuple(values)

    def begin(self, rows: int, like: Tensor) -> CellState:
        """Return the state before the first step: zeros."""
        return tuple(like.new_zeros(rows, self.width) for _ in range(self.states))

    def forward(
        self, inputs: Tensor, state: CellState | None = None, real: Tensor | None = None
    ) -> tuple[Tensor, CellState]:
        """Return the outputs (T, B, D) for inputs (T, B, I), and the state after each row's last real step.

        `real` (T, B) is True at a row's steps, False at the padding after them; None means no padding.
        """
        initial = state or self.begin(inputs.shape[1], inputs)
        states = scan(self, self.ahead(inputs), initial, self.dropped())
        return states[0], tuple(at_last(part, start, real) for part, start in zip(states, initial, strict=True))


def at_last(states: Tensor, initial: Tensor, real: Tensor | None) -> Tensor:
    """Return states (T, B, ...) at each row's last real step, (B, ...); a row without one gets `initial` (B, ...)."""
    if not len(states):
        return initial
    if real is None:
        return states[-1]
    steps = real.sum(0)
    rows = torch.arange(states.shape[1], device=states.device)
    last = states[(steps - 1).clamp(min=0), rows]
    return torch.where((steps > 0).view(-1, *[1] * (last.dim() - 1)), last, initial)


def join_layers(layers: Sequence[CellState], others: Sequence[CellState]) -> tuple[CellState, ...]:
    """Return the states of layers for the rows of both, one after the other.

    The states of a layer that attends to its own past are as long as it: the shorter ones get masked steps before.
    """
    pairs = (zip(layer, other, strict=True) for layer, other in zip(layers, others, strict=True))
    return tuple(tuple(_join(*pair) for pair in parts) for parts in pairs)


def _join(part: Tensor, other: Tensor) -> Tensor:
    """Concatenate (A, ...) and (B, ...); in between, the shorter is padded before with zeros, a mask with True."""
    is_past = part.dim() == 3 or part.dtype is torch.bool  # (B, T, D), or its mask (B, T)
    longest = max(part.shape[1], other.shape[1])
    tail = (0, 0) * (part.dim() - 2)
    parts = [
        F.pad(each, (*tail, longest - each.shape[1], 0), value=each.dtype is torch.bool) if is_past else each
        for each in (part, other)
    ]
    return torch.cat(parts)


class _TorchCell(Cell):
    """A cell for which torch has a fused kernel; its weights are in the kernel's layout."""

    kernel: nn.RNN | nn.LSTM | nn.GRU
    torch_function: ClassVar[Callable[..., Any]]  # torch's functional form, which takes the weights

    def from_input(self) -> tuple[Tensor, Tensor]:
        """Return the input weight and the sum of both biases: the state's bias need not wait for the step."""
        weight, _, input_bias, state_bias = self.kernel.all_weights[0]
        return weight, input_bias + state_bias

    def forward(
        self, inputs: Tensor, state: CellState | None = None, real: Tensor | None = None
    ) -> tuple[Tensor, CellState]:
        """Run torch's fused kernel. For rows of unequal length it yields the last state only if that is the output."""
        dropped = self.training and self.drop > 0
        if not len(inputs) or (real is not None and self.states > 1) or not dispatch.library_rnn(inputs, dropped):
            return super().forward(inputs, state, real)
        if inputs.device.type == "cpu" and torch.is_autocast_enabled("cpu"):
            half = torch.get_autocast_dtype("cpu")
            if not has_half_kernel(type(self.kernel).__name__, half):
                return self._forward_float32(inputs, state, real, half)
        initial = state or self.begin(inputs.shape[1], inputs)
        wrapped = tuple(part[None].contiguous() for part in initial)
        start = wrapped if self.states > 1 else wrapped[0]
        input_weight, _, *biases = self.kernel.all_weights[0]
        weights = [input_weight, self.dropped()[0].weight, *biases]
        outputs, *finals = type(self).torch_function(inputs, start, weights, True, 1, 0.0, self.training, False, False)
        if real is not None:
            return outputs, (at_last(outputs, initial[0], real),)
        return outputs, tuple(part[0] for part in finals)

    def _forward_float32(
        self, inputs: Tensor, state: CellState | None, real: Tensor | None, half: torch.dtype
    ) -> tuple[Tensor, CellState]:
        """Run in float32 and round the results to half precision, as torch's half-precision kernel would."""
        initial = None if state is None else tuple(part.float() for part in state)
        with torch.autocast("cpu", enabled=False):
            outputs, finals = self.forward(inputs.float(), initial, real)
        return outputs.to(half), tuple(part.to(half) for part in finals)

    def _single_stage(self, pointwise: Pointwise) -> tuple[CellStage, ...]:
        return (CellStage(pointwise, self.kernel.all_weights[0][1]),)


@cache
def has_half_kernel(network: str, half: torch.dtype) -> bool:
    """Return whether torch's RNN, LSTM or GRU runs under CPU autocast to `half` here and agrees with float32.

    oneDNN's LSTM in bfloat16 needs AVX-512, and in float16 more than that; without it, it raises. So a small network
    is tried once per process, in evaluation mode and in training mode (forward and backward).
    """
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
        torch.manual_seed(0)
        small, inputs = getattr(nn, network)(8, 8), torch.randn(4, 2, 8)
        with torch.autocast("cpu", enabled=False):
            exact = small(inputs)[0]
        try:
            with torch.autocast("cpu", half):
                halves = [small.train(training)(inputs)[0].float() for training in (False, True)]
                halves[-1].sum().backward()
        except RuntimeError:
            return False
    return all(torch.allclose(outputs, exact, rtol=0, atol=_HALF_ERROR) for outputs in halves)


def lacking_half_kernels(module: nn.Module, half: torch.dtype) -> list[str]:
    """Return the names of torch's networks in a module that have no half-precision kernel on this CPU."""
    networks = {type(part.kernel).__name__ for part in module.modules() if isinstance(part, _TorchCell)}
    return sorted(network for network in networks if not has_half_kernel(network, half))


class Elman(_TorchCell):
    """Elman's simple recurrent network."""

    gates, torch_function = 1, torch.rnn_tanh

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__(inputs, width)
        self.kernel = nn.RNN(inputs, width)
        init_recurrent_(*self.kernel.parameters(), gates=1)

    def stages(self) -> tuple[CellStage, ...]:
        """Return the one stage: tanh."""
        return self._single_stage(_elman)


def _elman(input_proj: Parts, product: Parts, state: Parts, vectors: Parts) -> Parts:
    return (torch.tanh(input_proj[0] + product[0]),)


class LSTM(_TorchCell):
    """Long short-term memory; the state is (h, c)."""

    gates, states, torch_function = 4, 2, torch.lstm

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__(inputs, width)
        self.kernel = nn.LSTM(inputs, width)
        init_recurrent_(*self.kernel.parameters(), gates=4, open_gate=1)

    def stages(self) -> tuple[CellStage, ...]:
        """Return the one stage: one product for all four gates."""
        return self._single_stage(_lstm)


def _lstm(input_proj: Parts, product: Parts, state: Parts, vectors: Parts) -> Parts:
    i, f, g, o = (x + h for x, h in zip(input_proj, product, strict=True))
    c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


class GRU(_TorchCell):
    """Gated recurrent unit."""

    gates, torch_function = 3, torch.gru

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__(inputs, width)
        self.kernel = nn.GRU(inputs, width)
        init_recurrent_(*self.kernel.parameters(), gates=3)

    def from_input(self) -> tuple[Tensor, Tensor]:
        """Return the input weight and bias; the state's bias is multiplied by the reset gate, so it stays apart."""
        weight, _, bias, _ = self.kernel.all_weights[0]
        return weight, bias

    def stages(self) -> tuple[CellStage, ...]:
        """Return the one stage: one product for all three gates."""
        _, weight, _, bias = self.kernel.all_weights[0]
        return (CellStage(_gru, weight, bias),)


def _gru(input_proj: Parts, product: Parts, state: Parts, vectors: Parts) -> Parts:
    r = torch.sigmoid(input_proj[0] + product[0])
    z = torch.sigmoid(input_proj[1] + product[1])
    n = torch.tanh(input_proj[2] + r * product[2])
    return ((1 - z) * n + z * state[0],)


class Peephole(Cell):
    """LSTM with peephole connections from the cell to the gates; the state is (h, c)."""

    gates, states = 4, 2

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__(inputs, width)
        self.input_weight = nn.Parameter(torch.empty(4 * width, inputs))
        self.state_weight = nn.Parameter(torch.empty(4 * width, width))
        self.bias = nn.Parameter(torch.empty(4 * width))
        self.peepholes = nn.Parameter(torch.zeros(3, width))  # w_ci, w_cf, w_co
        init_recurrent_(self.input_weight, self.state_weight, self.bias, gates=4, open_gate=1)

    def from_input(self) -> tuple[Tensor, Tensor]:
        """Return the input weight and bias."""
        return self.input_weight, self.bias

    def vectors(self) -> Tensor:
        """Return the peephole weights, one per gate and unit: (3, D)."""
        return self.peepholes

    def stages(self) -> tuple[CellStage, ...]:
        """Return the one stage: one product for all four gates."""
        return (CellStage(_peephole, self.state_weight),)


def _peephole(input_proj: Parts, product: Parts, state: Parts, vectors: Parts) -> Parts:
    i, f, g, o = (x + h for x, h in zip(input_proj, product, strict=True))
    old = state[1]
    c = torch.sigmoid(f + vectors[1] * old) * old + torch.sigmoid(i + vectors[0] * old) * torch.tanh(g)
    return torch.sigmoid(o + vectors[2] * c) * torch.tanh(c), c


class Jordan(Cell):
    """Output-recurrent network: the recurrent input is the previous output y_{t-1}."""

    gates = 1

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__(inputs, width)
        self.input_weight = nn.Parameter(torch.empty(width, inputs))
        self.state_weight = nn.Parameter(torch.empty(width, width))
        self.bias = nn.Parameter(torch.empty(width))
        self.output = nn.Linear(width, width)
        init_recurrent_(self.input_weight, self.state_weight, self.bias, gates=1)
        nn.init.orthogonal_(self.output.weight)
        nn.init.zeros_(self.output.bias)

    def from_input(self) -> tuple[Tensor, Tensor]:
        """Return the input weight and bias."""
        return self.input_weight, self.bias

    def stages(self) -> tuple[CellStage, ...]:
        """Return two stages: the hidden layer, then the output."""
        return CellStage(_elman, self.state_weight), CellStage(_jordan_output, self.output.weight, self.output.bias)


def _jordan_output(input_proj: Parts, product: Parts, state: Parts, vectors: Parts) -> Parts:
    return (torch.tanh(product[0]),)


def make_cell(name: str, inputs: int, width: int) -> Cell:
    """Return a new cell of the kind `name`, one of `CELLS`."""
    kinds = {"elman": Elman, "jordan": Jordan, "lstm": LSTM, "peephole": Peephole, "gru": GRU}
    return kinds[name](inputs, width)
