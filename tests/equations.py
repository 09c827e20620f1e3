"""The recurrent family as its papers write it: one sentence at a time, step by step, a vector for each symbol.

What the tests of cells, scores, layers and models are held against. It imports nothing of weft, has no batch, no grid
and no mask, and knows a network by its weights' names alone.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

Weights = dict[str, Tensor]
Vectors = list[Tensor]  # one vector a step
State = tuple[Tensor, ...]

CELLS = ("elman", "jordan", "lstm", "peephole", "gru")
SCORES = ("cosine", "additive", "location", "general", "dot", "scaled-dot")
STATES = {"elman": 1, "jordan": 1, "lstm": 2, "peephole": 2, "gru": 1}


def weights_of(network: nn.Module) -> Weights:
    """Name every weight, one that stands in two places by both names."""
    return dict(network.named_parameters(remove_duplicate=False))


def below(w: Weights, prefix: str) -> Weights:
    """Return the weights of one part, by their names within it."""
    return {name.removeprefix(prefix + "."): value for name, value in w.items() if name.startswith(prefix + ".")}


def affine(w: Weights, name: str, x: Tensor) -> Tensor:
    """W x, and + b where there is one."""
    product = w[f"{name}.weight"] @ x
    return product + w[f"{name}.bias"] if f"{name}.bias" in w else product


def scatter(network: nn.Module, seed: int) -> None:
    """Draw every weight anew: what starts at nought would hide where it stands."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in network.parameters():
            weight.normal_(std=0.6)


def agree(
    got: Sequence[Tensor],
    must: Sequence[Tensor],
    by: Mapping[str, Tensor],
    theirs: Mapping[str, Tensor] | None = None,
) -> None:
    """Hold two ways of computing the same against each other, and their gradients by each named tensor.

    `theirs` are the tensors of the same names that the other way has of its own.
    """
    for one, other in zip(got, must, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)
    weigh = [torch.randn_like(one) for one in must]
    mine, yours = (
        torch.autograd.grad(
            sum((one * weight).sum() for one, weight in zip(side, weigh, strict=True)),
            [values[name] for name in by],
            materialize_grads=True,
        )
        for side, values in ((got, by), (must, theirs or by))
    )
    for name, one, other in zip(by, mine, yours, strict=True):
        torch.testing.assert_close(
            one, other, rtol=1e-9, atol=1e-11, msg=lambda told, name=name: f"gradient by {name}: {told}"
        )


# The cells.


def step(cell: str, w: Weights, x: Tensor, state: State) -> State:
    """Make one step of a cell; the first part of what it returns is its output."""
    return {"elman": elman, "jordan": jordan, "lstm": lstm, "peephole": peephole, "gru": gru}[cell](w, x, *state)


def elman(w: Weights, x: Tensor, h: Tensor) -> State:
    """Elman 1990."""
    U, W, b = w["kernel.weight_ih_l0"], w["kernel.weight_hh_l0"], w["kernel.bias_ih_l0"] + w["kernel.bias_hh_l0"]
    return (torch.tanh(U @ x + W @ h + b),)


def jordan(w: Weights, x: Tensor, y: Tensor) -> State:
    """Jordan 1986: what is handed on is the output."""
    h = torch.tanh(w["input_weight"] @ x + w["state_weight"] @ y + w["bias"])
    return (torch.tanh(affine(w, "output", h)),)


def lstm(w: Weights, x: Tensor, h: Tensor, c: Tensor) -> State:
    """Hochreiter & Schmidhuber 1997, Gers et al. 2000; the library's order of gates is i, f, g, o."""
    W_xi, W_xf, W_xg, W_xo = w["kernel.weight_ih_l0"].chunk(4)
    W_hi, W_hf, W_hg, W_ho = w["kernel.weight_hh_l0"].chunk(4)
    b_i, b_f, b_g, b_o = (w["kernel.bias_ih_l0"] + w["kernel.bias_hh_l0"]).chunk(4)
    i = torch.sigmoid(W_xi @ x + W_hi @ h + b_i)
    f = torch.sigmoid(W_xf @ x + W_hf @ h + b_f)
    g = torch.tanh(W_xg @ x + W_hg @ h + b_g)
    o = torch.sigmoid(W_xo @ x + W_ho @ h + b_o)
    c = f * c + i * g
    return o * torch.tanh(c), c


def peephole(w: Weights, x: Tensor, h: Tensor, c: Tensor) -> State:
    """Graves 2013, equations 7 to 11; from cell to gate the matrices are diagonal."""
    W_xi, W_xf, W_xc, W_xo = w["input_weight"].chunk(4)
    W_hi, W_hf, W_hc, W_ho = w["state_weight"].chunk(4)
    b_i, b_f, b_c, b_o = w["bias"].chunk(4)
    W_ci, W_cf, W_co = (torch.diag(one) for one in w["peepholes"])
    i = torch.sigmoid(W_xi @ x + W_hi @ h + W_ci @ c + b_i)
    f = torch.sigmoid(W_xf @ x + W_hf @ h + W_cf @ c + b_f)
    c = f * c + i * torch.tanh(W_xc @ x + W_hc @ h + b_c)
    o = torch.sigmoid(W_xo @ x + W_ho @ h + W_co @ c + b_o)
    return o * torch.tanh(c), c


def gru(w: Weights, x: Tensor, h: Tensor) -> State:
    """Cho et al. 2014, the reset gate after the product; the library's order is r, z, n."""
    W_xr, W_xz, W_xn = w["kernel.weight_ih_l0"].chunk(3)
    W_hr, W_hz, W_hn = w["kernel.weight_hh_l0"].chunk(3)
    b_xr, b_xz, b_xn = w["kernel.bias_ih_l0"].chunk(3)
    b_hr, b_hz, b_hn = w["kernel.bias_hh_l0"].chunk(3)
    r = torch.sigmoid(W_xr @ x + W_hr @ h + b_xr + b_hr)
    z = torch.sigmoid(W_xz @ x + W_hz @ h + b_xz + b_hz)
    n = torch.tanh(W_xn @ x + b_xn + r * (W_hn @ h + b_hn))
    return ((1 - z) * n + z * h,)


def zeros(cell: str, width: int) -> State:
    """Return the state before the first step."""
    return tuple(torch.zeros(width, dtype=torch.float64) for _ in range(STATES[cell]))


def walk(cell: str, w: Weights, inputs: Vectors, state: State) -> list[State]:
    """Step through a sentence; return the state after each step."""
    states = []
    for x in inputs:
        state = step(cell, w, x, state)
        states.append(state)
    return states


# The scores.


def score(name: str, w: Weights, q: Tensor, k: Tensor, place: int) -> Tensor:
    """Say how well the query fits the state that stands at `place`."""
    match name:
        case "cosine":  # Graves et al. 2014, equations 5 and 6
            strength = torch.log1p(torch.exp(affine(w, "strength", q)[0]))
            return strength * (q @ k) / torch.sqrt((q @ q) * (k @ k))
        case "additive":  # Bahdanau et al. 2015, appendix A.1.2
            return w["energy.weight"][0] @ torch.tanh(affine(w, "query", q) + affine(w, "key", k))
        case "location":  # Luong et al. 2015, equation 8
            return w["place.weight"][place] @ q
        case "general":  # Luong et al. 2015, section 3.1
            return q @ (w["key.weight"] @ k)
        case "dot":  # Luong et al. 2015, section 3.1
            return q @ k
    return q @ k / len(q) ** 0.5  # Vaswani et al. 2017, equation 1


def look(name: str, w: Weights, q: Tensor, memory: Vectors) -> tuple[Tensor, Tensor]:
    """Return Σ_j α_j m_j and α: Bahdanau et al. 2015, equations 5 and 6. Location sees its first positions only."""
    seen = memory[: len(w["place.weight"])] if name == "location" else memory
    exps = torch.stack([torch.exp(score(name, w, q, k, place)) for place, k in enumerate(seen)])
    alpha = torch.cat([exps / exps.sum(), torch.zeros(len(memory) - len(seen), dtype=q.dtype)])
    return sum(a * m for a, m in zip(alpha, memory, strict=True)), alpha


# Attention over a layer's own earlier states.


def intra(
    cell: str, attention: str, w: Weights, inputs: Vectors, tape: list[State], mixed: Tensor
) -> tuple[list[State], Vectors, Tensor]:
    """Go on from the states on the tape, Cheng et al. 2016, equations 4 to 9.

    Return the tape with the new states, where each step looked, and the last h~.
    """
    looks = []
    for x in inputs:
        old = zeros(cell, len(mixed))
        if tape:
            h = [state[0] for state in tape]
            _, alpha = look(attention, below(w, "score"), w["query.weight"] @ x + mixed, h)
            weighed = [[a * part for part in state] for a, state in zip(alpha, tape, strict=True)]
            old = tuple(sum(parts) for parts in zip(*weighed, strict=True))
            looks.append(alpha)
        mixed = old[0]
        tape = [*tape, step(cell, below(w, "cell"), x, old)]
    return tape, looks, mixed


# Layers.


def layer(cell: str, w: Weights, inputs: Vectors, width: int, attention: str = "none") -> Vectors:
    """Return the outputs of one walk from zeros."""
    if attention == "none":
        states = walk(cell, w, inputs, zeros(cell, width))
    else:
        states, _, _ = intra(cell, attention, w, inputs, [], torch.zeros(width, dtype=torch.float64))
    return [state[0] for state in states]


def stack(
    cell: str,
    w: Weights,
    inputs: Vectors,
    width: int,
    direction: str = "forward",
    residual: bool = False,
    attention: str = "none",
    last: int | None = None,
    apart: bool = False,
) -> tuple[list[Vectors], Vectors]:
    """Return each layer's outputs, and each layer's last: [h→_T ; h←_1] where both directions are read.

    Where the directions stand `apart`, each is a network of its own.
    """
    outputs, ends = [], []
    layers = 1 + max(int(name.split(".")[1]) for name in w)
    for depth in range(layers):
        wide = last if last and depth == layers - 1 else width
        half = wide // 2 if direction == "both" else wide
        ahead_reads = [x[: len(x) // 2] for x in inputs] if apart and depth else inputs
        back_reads = [x[len(x) // 2 :] for x in inputs] if apart and depth else inputs
        ways = [below(w, f"layers.{depth}.{way}") for way in range(2 if direction == "both" else 1)]
        walks = []
        if direction != "backward":
            ahead = layer(cell, ways[0], ahead_reads, half, attention)
            walks.append((ahead, -1))
        if direction != "forward":
            back = layer(cell, ways[-1], back_reads[::-1], half, attention)
            walks.append((back[::-1], 0))
        read = [torch.cat(parts) for parts in zip(*(found for found, _ in walks), strict=True)]
        if residual and len(read[0]) == len(inputs[0]):
            read = [x + one for x, one in zip(inputs, read, strict=True)]
        outputs.append(read)
        ends.append(torch.cat([read[end][n * half : (n + 1) * half] for n, (_, end) in enumerate(walks)]))
        inputs = read
    return outputs, ends
