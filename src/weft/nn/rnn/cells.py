"""Recurrent networks: five cells, each by its equations, written as steps.

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
the matrices from cell to gate are diagonal; GRU: Cho et al. 2014, the reset gate after the product, as cuDNN has it. A
Jordan network hands its output on, not its hidden layer.

A cell is a step written as stages, each a product with a matrix and a function place by place; what the inputs alone
decide is one product for all steps. Elman, LSTM and GRU walk in the library's fused kernels (oneDNN, cuDNN) where those
are the fastest, every other cell in `weft.nn.rnn.fused.scan`; a cell of one's own needs only its stages. Where the
library has no kernel in half precision for this CPU, its kernel in float32 serves (`has_half_kernel`).
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.errors import ConfigError
from weft.nn.layers.dropout import draw_mask
from weft.nn.rnn.fused.codegen_triton import in_half
from weft.nn.rnn.fused.scan import SHORT, scan
from weft.nn.rnn.init import init_recurrent_

Parts = Sequence[Tensor]  # vectors of one width, (B, D) each
State = tuple[Tensor, ...]  # what a layer hands from step to step, batch-first
Pointwise = Callable[[Parts, Parts, Parts, Parts], Parts]

CELLS = ("elman", "jordan", "lstm", "peephole", "gru")
_HALF_ERROR = 0.05  # of outputs within ±1 after a few steps in bfloat16, which rounds each to 2^-9 of itself


class Stage(NamedTuple):
    """The product of a matrix with the last value, and what is done with it place by place.

    `pointwise(known, product, state, vectors)` gets what the input decided, this product, the state before the step and
    the cell's vectors, and returns values: the first is what the next stage multiplies. Those of the last stage are
    the new state, of which the first is the step's output.
    """

    pointwise: Pointwise
    weight: Tensor  # (G·D, D)
    bias: Tensor | None = None  # (G·D,)


def _undefined(cell: "Cell", method: str) -> ConfigError:
    """What a cell of one's own meets where it leaves out a part."""
    return ConfigError(f"{type(cell).__name__} does not define {method}(), which every cell needs")


class Cell(nn.Module):
    """One layer's step. `gates` says how many products of the input it needs, `states` how many vectors it hands on."""

    gates: ClassVar[int]
    states: ClassVar[int] = 1
    drop: float = 0.0  # the share of the weights from state to state that a walk in training goes without

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.inputs, self.width = inputs, width

    def from_input(self) -> tuple[Tensor, Tensor]:
        """Return the matrix (G·D, I) and bias (G·D,) of what the input alone decides."""
        raise _undefined(self, "from_input")

    def stages(self) -> tuple[Stage, ...]:
        """Return the step's stages."""
        raise _undefined(self, "stages")

    def vectors(self) -> Tensor | None:
        """Return the cell's own vectors (K, D), if it has any."""
        return None

    def dropped(self) -> tuple[Stage, ...]:
        """Return the stages of one walk: in training DropConnect thins out what multiplies the state."""
        first, *rest = self.stages()
        if self.training and self.drop:
            first = first._replace(weight=first.weight * draw_mask(self.drop, first.weight.shape, first.weight))
        return first, *rest

    def ahead(self, inputs: Tensor) -> Tensor:
        """Compute what inputs (..., I) alone decide, for all steps at once: (..., G·D)."""
        return F.linear(inputs, *self.from_input())

    def step(self, known: Tensor, state: State, stages: Sequence[Stage] | None = None) -> State:
        """Make one step from what the input decided, known (B, G·D); in a walk, by its stages."""
        parts, vectors = known.chunk(self.gates, -1), self.vectors()
        values: Parts = state
        for stage in stages or self.stages():
            product = F.linear(values[0], stage.weight, stage.bias)
            gates = product.chunk(product.shape[-1] // self.width, -1)
            values = stage.pointwise(parts, gates, state, () if vectors is None else vectors.unbind())
        return tuple(values)

    def begin(self, rows: int, like: Tensor) -> State:
        """Return the state before the first step: zeros."""
        return tuple(like.new_zeros(rows, self.width) for _ in range(self.states))

    def forward(self, inputs: Tensor, state: State | None = None, real: Tensor | None = None) -> tuple[Tensor, State]:
        """Read inputs (T, B, I); return the output of every step, (T, B, D), and the state after each row's last.

        A row's steps are those that `real` (T, B) has, from the first on; without it all are.
        """
        begun = state or self.begin(inputs.shape[1], inputs)
        walked = scan(self, self.ahead(inputs), begun, self.dropped())
        return walked[0], tuple(at_last(part, start, real) for part, start in zip(walked, begun, strict=True))


def at_last(walked: Tensor, start: Tensor, real: Tensor | None) -> Tensor:
    """Read from (T, B, ...) what stands at each row's last real step; a row that has none keeps `start` (B, ...)."""
    if not len(walked):
        return start
    if real is None:
        return walked[-1]
    steps = real.sum(0)
    rows = torch.arange(walked.shape[1], device=walked.device)
    found = walked[(steps - 1).clamp(min=0), rows]
    return torch.where((steps > 0).view(-1, *[1] * (found.dim() - 1)), found, start)


class _Library(Cell):
    """A cell that torch has a fused kernel for; its weights lie as the kernel wants them."""

    kernel: nn.RNN | nn.LSTM | nn.GRU
    walk: ClassVar[Callable[..., Any]]  # the kernel, given its weights

    def from_input(self) -> tuple[Tensor, Tensor]:
        """The input's matrix, and both biases: what a step adds anyway need not wait for it."""
        weight, _, bias, other = self.kernel.all_weights[0]
        return weight, bias + other

    def forward(self, inputs: Tensor, state: State | None = None, real: Tensor | None = None) -> tuple[Tensor, State]:
        """Walk in the fused kernel; where rows end apart, that tells the last state only if it is an output too."""
        if not len(inputs) or (real is not None and self.states > 1) or self._better_scanned(inputs):
            return super().forward(inputs, state, real)
        if inputs.device.type == "cpu" and torch.is_autocast_enabled("cpu"):
            half = torch.get_autocast_dtype("cpu")
            if not has_half_kernel(type(self.kernel).__name__, half):
                return self._in_single(inputs, state, real, half)
        begun = state or self.begin(inputs.shape[1], inputs)
        wrapped = tuple(part[None].contiguous() for part in begun)
        start = wrapped if self.states > 1 else wrapped[0]
        from_input, _, *biases = self.kernel.all_weights[0]
        weights = [from_input, self.dropped()[0].weight, *biases]
        outputs, *ends = type(self).walk(inputs, start, weights, True, 1, 0.0, self.training, False, False)
        if real is not None:
            return outputs, (at_last(outputs, begun[0], real),)
        return outputs, tuple(part[0] for part in ends)

    def _in_single(
        self, inputs: Tensor, state: State | None, real: Tensor | None, half: torch.dtype
    ) -> tuple[Tensor, State]:
        """Walk in float32; what is returned is rounded to half precision, as the library's kernel for that would."""
        begun = None if state is None else tuple(part.float() for part in state)
        with torch.autocast("cpu", enabled=False):
            outputs, ends = self.forward(inputs.float(), begun, real)
        return outputs.to(half), tuple(part.to(half) for part in ends)

    def _better_scanned(self, inputs: Tensor) -> bool:
        """Say whether cuDNN would walk in float16 whatever was asked for, or copy weights that do not lie its way."""
        halved = in_half(inputs) and len(inputs) >= SHORT
        return halved or (inputs.is_cuda and self.training and self.drop > 0)

    def _stage(self, pointwise: Pointwise) -> tuple[Stage, ...]:
        return (Stage(pointwise, self.kernel.all_weights[0][1]),)


@cache
def has_half_kernel(network: str, half: torch.dtype) -> bool:
    """Say whether the library's RNN, LSTM or GRU walks under autocast to this type on this CPU, and as in float32.

    oneDNN's LSTM in bfloat16 needs AVX-512, and in float16 more than that; without it, it raises. So a small one is
    tried, once a process, in evaluation and in training (there and back).
    """
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
        torch.manual_seed(0)
        small, inputs = getattr(nn, network)(8, 8), torch.randn(4, 2, 8)
        with torch.autocast("cpu", enabled=False):
            exact = small(inputs)[0]
        try:
            with torch.autocast("cpu", half):
                walked = [small.train(training)(inputs)[0].float() for training in (False, True)]
                walked[-1].sum().backward()
        except RuntimeError:
            return False
    return all(torch.allclose(outputs, exact, rtol=0, atol=_HALF_ERROR) for outputs in walked)


def lacking_half_kernels(module: nn.Module, half: torch.dtype) -> list[str]:
    """Name the library's networks in a module that walk in float32 on this CPU, having no kernel in half precision."""
    networks = {type(part.kernel).__name__ for part in module.modules() if isinstance(part, _Library)}
    return sorted(network for network in networks if not has_half_kernel(network, half))


class Elman(_Library):
    """A simple recurrent network."""

    gates, walk = 1, torch.rnn_tanh

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__(inputs, width)
        self.kernel = nn.RNN(inputs, width)
        init_recurrent_(*self.kernel.parameters(), gates=1)

    def stages(self) -> tuple[Stage, ...]:
        """One product, one tanh."""
        return self._stage(_elman)


def _elman(known: Parts, product: Parts, state: Parts, vectors: Parts) -> Parts:
    return (torch.tanh(known[0] + product[0]),)


class LSTM(_Library):
    """Long short-term memory; its state is (h, c)."""

    gates, states, walk = 4, 2, torch.lstm

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__(inputs, width)
        self.kernel = nn.LSTM(inputs, width)
        init_recurrent_(*self.kernel.parameters(), gates=4, open_gate=1)

    def stages(self) -> tuple[Stage, ...]:
        """One product for all four gates."""
        return self._stage(_lstm)


def _lstm(known: Parts, product: Parts, state: Parts, vectors: Parts) -> Parts:
    i, f, g, o = (one + other for one, other in zip(known, product, strict=True))
    c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


class GRU(_Library):
    """A gated recurrent unit."""

    gates, walk = 3, torch.gru

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__(inputs, width)
        self.kernel = nn.GRU(inputs, width)
        init_recurrent_(*self.kernel.parameters(), gates=3)

    def from_input(self) -> tuple[Tensor, Tensor]:
        """The input's matrix and bias; the state's own bias must meet the reset gate."""
        weight, _, bias, _ = self.kernel.all_weights[0]
        return weight, bias

    def stages(self) -> tuple[Stage, ...]:
        """One product for all three gates."""
        _, weight, _, bias = self.kernel.all_weights[0]
        return (Stage(_gru, weight, bias),)


def _gru(known: Parts, product: Parts, state: Parts, vectors: Parts) -> Parts:
    r = torch.sigmoid(known[0] + product[0])
    z = torch.sigmoid(known[1] + product[1])
    n = torch.tanh(known[2] + r * product[2])
    return ((1 - z) * n + z * state[0],)


class Peephole(Cell):
    """An LSTM whose gates see the cell; its state is (h, c)."""

    gates, states = 4, 2

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__(inputs, width)
        self.input_weight = nn.Parameter(torch.empty(4 * width, inputs))
        self.state_weight = nn.Parameter(torch.empty(4 * width, width))
        self.bias = nn.Parameter(torch.empty(4 * width))
        self.peepholes = nn.Parameter(torch.zeros(3, width))  # w_ci, w_cf, w_co
        init_recurrent_(self.input_weight, self.state_weight, self.bias, gates=4, open_gate=1)

    def from_input(self) -> tuple[Tensor, Tensor]:
        """The input's matrix and bias."""
        return self.input_weight, self.bias

    def vectors(self) -> Tensor:
        """The peepholes, one number a unit and gate."""
        return self.peepholes

    def stages(self) -> tuple[Stage, ...]:
        """One product for all four gates."""
        return (Stage(_peephole, self.state_weight),)


def _peephole(known: Parts, product: Parts, state: Parts, vectors: Parts) -> Parts:
    i, f, g, o = (one + other for one, other in zip(known, product, strict=True))
    before = state[1]
    c = torch.sigmoid(f + vectors[1] * before) * before + torch.sigmoid(i + vectors[0] * before) * torch.tanh(g)
    return torch.sigmoid(o + vectors[2] * c) * torch.tanh(c), c


class Jordan(Cell):
    """The output-recurrent form: what a step puts out is what the next one's hidden layer reads."""

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
        """The input's matrix and bias."""
        return self.input_weight, self.bias

    def stages(self) -> tuple[Stage, ...]:
        """The hidden layer, then the output."""
        return Stage(_elman, self.state_weight), Stage(_put_out, self.output.weight, self.output.bias)


def _put_out(known: Parts, product: Parts, state: Parts, vectors: Parts) -> Parts:
    return (torch.tanh(product[0]),)


def make_cell(name: str, inputs: int, width: int) -> Cell:
    """Make the cell of that name."""
    kinds = {"elman": Elman, "jordan": Jordan, "lstm": LSTM, "peephole": Peephole, "gru": GRU}
    return kinds[name](inputs, width)
