"""ELMo as its paper and bilm-tf write it: one sentence, one word and one step at a time, a vector for each symbol.

It imports nothing of weft. What a network is made of is told by `of_weft`, from the names of weft's weights, and by
`of_bilm`, from those of the published files; the equations know neither.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LONGEST = 50  # signs of a word
SPECIAL = {"<S>": "first", "</S>": "last"}


@dataclass
class Layer:
    x: dict[str, Tensor]  # by gate, (C, I)
    h: dict[str, Tensor]  # (C, P)
    b: dict[str, Tensor]  # (C,)
    project: Tensor  # (P, C)


@dataclass
class Network:
    letters: dict[int | str, Tensor]  # a byte, or begin, end, pad, first, last
    filters: list[tuple[Tensor, Tensor]]  # (F, E, k) and (F,)
    highways: list[tuple[Tensor, Tensor, Tensor, Tensor]]  # gate and transform, (F, F) and (F,) each
    project: tuple[Tensor, Tensor]
    ahead: list[Layer]
    back: list[Layer]
    activation: str
    clip: float | None
    residual: bool


def signs(word: str) -> list[int | str]:
    inside: list[int | str] = [SPECIAL[word]] if word in SPECIAL else [*word.encode()][: LONGEST - 2]
    spelt = ["begin", *inside, "end"]
    return spelt + ["pad"] * (LONGEST - len(spelt))


def spelt(net: Network, word: str) -> Tensor:
    letters, features = [net.letters[sign] for sign in signs(word)], []
    for weight, bias in net.filters:
        width = weight.shape[-1]
        windows = range(LONGEST - width + 1)
        scores = [bias + sum(weight[:, :, k] @ letters[at + k] for k in range(width)) for at in windows]
        found = torch.stack(scores).max(0).values
        features.append(torch.tanh(found) if net.activation == "tanh" else found.clamp(min=0))
    x = torch.cat(features)
    for gate_weight, gate_bias, weight, bias in net.highways:
        gate = torch.sigmoid(gate_weight @ x + gate_bias)
        x = gate * (weight @ x + bias).clamp(min=0) + (1 - gate) * x
    return net.project[0] @ x + net.project[1]


def clipped(net: Network, x: Tensor) -> Tensor:
    return x if net.clip is None else torch.clamp(x, -net.clip, net.clip)


def walk(net: Network, layers: Sequence[Layer], xs: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return each layer's outputs, in the order that they are read."""
    read, found = list(xs), []
    for depth, layer in enumerate(layers):
        h, c, outputs = xs[0].new_zeros(len(layer.project)), xs[0].new_zeros(layer.project.shape[1]), []
        for x in read:
            i, f, g, o = (layer.x[gate] @ x + layer.h[gate] @ h + layer.b[gate] for gate in "ifgo")
            c = clipped(net, torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g))
            h = clipped(net, layer.project @ (torch.sigmoid(o) * torch.tanh(c)))
            outputs.append(h + x if depth and net.residual else h)
        found.append(outputs)
        read = outputs
    return found


def encoded(net: Network, words: Sequence[str]) -> list[Tensor]:
    """Return the layers of a sentence, (T, D) each; 0 is the spelling, twice."""
    xs = [spelt(net, word) for word in words]
    ahead = walk(net, net.ahead, xs)
    back = [outputs[::-1] for outputs in walk(net, net.back, xs[::-1])]
    return [
        torch.stack([torch.cat(pair) for pair in zip(one, other, strict=True)])
        for one, other in zip([xs, *ahead], [xs, *back], strict=True)
    ]


def of_weft(w: Mapping[str, Tensor], activation: str, clip: float | None, residual: bool) -> Network:
    """Read the weights of weft's model: bytes, begin, end, pad, first, last; gates i, f, g, o."""
    embed = w["char_encoder.filters.embed.weight"]
    letters: dict[int | str, Tensor] = dict(enumerate(embed[:256]))
    letters |= dict(zip(("begin", "end", "pad", "first", "last"), embed[256:], strict=True))
    filters, highways = [], []
    while f"char_encoder.filters.convolve.{len(filters)}.weight" in w:
        name = f"char_encoder.filters.convolve.{len(filters)}"
        filters.append((w[f"{name}.weight"], w[f"{name}.bias"]))
    while f"char_encoder.highways.{len(highways)}.gate.weight" in w:
        name = f"char_encoder.highways.{len(highways)}"
        highways.append(
            tuple(w[f"{name}.{part}"] for part in ("gate.weight", "gate.bias", "transform.weight", "transform.bias"))
        )
    project = w["char_encoder.project.weight"], w["char_encoder.project.bias"]
    ways = [_ways_of_weft(w, way) for way in ("forward_lstm", "backward_lstm")]
    return Network(letters, filters, highways, project, *ways, activation, clip, residual)


def _ways_of_weft(w: Mapping[str, Tensor], way: str) -> list[Layer]:
    layers: list[Layer] = []
    while (name := f"{way}.layers.{len(layers)}") + ".project" in w:
        x, h, b = (
            dict(zip("ifgo", w[f"{name}.{part}"].chunk(4), strict=True))
            for part in ("input_weight", "state_weight", "bias")
        )
        layers.append(Layer(x, h, b, w[f"{name}.project"]))
    return layers


def of_bilm(arrays: Mapping[str, Tensor], options: Mapping) -> Network:
    """Read a published file: bytes, first, last, begin, end, pad; a matrix stands to the right of what it is for."""
    cnn, lstm = options["char_cnn"], options["lstm"]
    letters: dict[int | str, Tensor] = dict(enumerate(arrays["char_embed"][:256]))
    letters |= dict(zip(("first", "last", "begin", "end", "pad"), arrays["char_embed"][256:], strict=True))
    filters = [
        (arrays[f"CNN/W_cnn_{n}"][0].permute(2, 1, 0), arrays[f"CNN/b_cnn_{n}"]) for n in range(len(cnn["filters"]))
    ]
    highways = [
        (
            arrays[f"CNN_high_{n}/W_carry"].T,
            arrays[f"CNN_high_{n}/b_carry"],
            arrays[f"CNN_high_{n}/W_transform"].T,
            arrays[f"CNN_high_{n}/b_transform"],
        )
        for n in range(cnn["n_highway"])
    ]
    project = arrays["CNN_proj/W_proj"].T, arrays["CNN_proj/b_proj"]
    ways = [[_cell_of_bilm(arrays, way, n) for n in range(lstm["n_layers"])] for way in (0, 1)]
    activation, clip = cnn["activation"], lstm["cell_clip"]
    return Network(letters, filters, highways, project, *ways, activation, clip, lstm["use_skip_connections"])


def _cell_of_bilm(arrays: Mapping[str, Tensor], way: int, depth: int) -> Layer:
    """Take the gates as TensorFlow's cell has them: i, g ("j"), f and o, with 1 added to f before its sigmoid."""
    name = f"RNN_{way}/RNN/MultiRNNCell/Cell{depth}/LSTMCell"
    project = arrays[f"{name}/W_P_0"].T
    gates = dict(zip("igfo", arrays[f"{name}/W_0"].T.chunk(4), strict=True))
    bias = dict(zip("igfo", arrays[f"{name}/B"].chunk(4), strict=True))
    bias["f"] = bias["f"] + 1
    size = len(arrays[f"{name}/W_0"]) - len(project)  # of what the layer reads
    x, h = ({gate: part[:, cut] for gate, part in gates.items()} for cut in (slice(size), slice(size, None)))
    return Layer(x, h, bias, project)
