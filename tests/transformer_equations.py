"""The Transformer as its paper writes it (Vaswani et al. 2017): one sentence at a time, head by head.

What the tests of attention, blocks and models are held against. It imports nothing of weft, has no batch, no mask of
empty places and no cache, and knows a network by its weights' names alone. A head that is off is computed and nought.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from tests.equations import Weights, below

Place = tuple[str, int]  # "encoder", "decoder" or "cross", and the layer


@dataclass
class Kind:
    """How a network is built, and where its heads looked in the last sentence: (H, T, S) each."""

    heads: int
    norm: str = "post"
    activation: str = "relu"
    off: Mapping[Place, Collection[int]] = field(default_factory=dict)
    seen: dict[Place, Tensor] = field(default_factory=dict)


def affine(w: Weights, name: str, x: Tensor) -> Tensor:
    """X W + b, for each row of x."""
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def attention(Q: Tensor, K: Tensor, V: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Equation 1, and the weights; where it is causal, a row sees the rows up to its own (section 3.2.3)."""
    exps = torch.exp(Q @ K.T / K.shape[1] ** 0.5)
    exps = exps.tril() if causal else exps
    weights = exps / exps.sum(1, keepdim=True)
    return weights @ V, weights


def multi_head(w: Weights, kind: Kind, place: Place, x: Tensor, memory: Tensor) -> Tensor:
    """Section 3.2.2: [head_1 ; … ; head_H] W_O."""
    if place[0] == "cross":
        Q, (K, V) = affine(w, "in_proj", x), affine(w, "kv_proj", memory).chunk(2, 1)
    else:
        Q, K, V = affine(w, "in_proj", x).chunk(3, 1)
    found, looks = [], []
    for head, parts in enumerate(zip(*(one.chunk(kind.heads, 1) for one in (Q, K, V)), strict=True)):
        answer, weights = attention(*parts, causal=place[0] == "decoder")
        found.append(torch.zeros_like(answer) if head in kind.off.get(place, ()) else answer)
        looks.append(weights)
    kind.seen[place] = torch.stack(looks)
    return affine(w, "out_proj", torch.cat(found, 1))


def feed(w: Weights, kind: Kind, x: Tensor) -> Tensor:
    """Equation 2; GELU is Hendrycks & Gimpel 2016, SiLU Elfwing et al. 2018."""
    x = affine(w, "fc1", x)
    near = torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))
    act = {"relu": x.clamp(min=0), "gelu": x * (1 + torch.erf(x / 2**0.5)) / 2, "silu": x / (1 + torch.exp(-x))}
    act["gelu-tanh"] = x * (1 + near) / 2
    return affine(w, "fc2", act[kind.activation])


def layer_norm(w: Weights, x: Tensor) -> Tensor:
    """Ba et al. 2016, equation 4."""
    away = x - x.mean(1, keepdim=True)
    return away / torch.sqrt(away.square().mean(1, keepdim=True) + 1e-5) * w["weight"] + w["bias"]


def block(w: Weights, kind: Kind, place: Place, x: Tensor, memory: Tensor | None = None) -> Tensor:
    """Section 3.1; norms before the layers are Xiong et al. 2020, figure 1 (b)."""
    layers = {
        "attention": lambda y: multi_head(below(w, "attention"), kind, place, y, y),
        "cross_attention": lambda y: multi_head(below(w, "cross_attention"), kind, ("cross", place[1]), y, memory),
        "feed_forward": lambda y: feed(below(w, "feed_forward"), kind, y),
    }
    for name, layer in layers.items():
        if name == "cross_attention" and memory is None:
            continue
        norm = below(w, f"{name}_residual.norm")
        x = x + layer(layer_norm(norm, x)) if kind.norm == "pre" else layer_norm(norm, x + layer(x))
    return x


def stack(w: Weights, kind: Kind, place: str, x: Tensor, memory: Tensor | None = None) -> Tensor:
    """Section 3.1; one more norm at the end where they come before (Xiong et al. 2020)."""
    for layer in range(1 + max(int(name.split(".")[1]) for name in w if name.startswith("blocks."))):
        x = block(below(w, f"blocks.{layer}"), kind, (place, layer), x, memory)
    return layer_norm(below(w, "norm"), x) if kind.norm == "pre" else x


def positions(count: int, width: int) -> Tensor:
    """Section 3.5."""
    place, number = torch.arange(count, dtype=torch.float64)[:, None], torch.arange(width)
    angle = place / 10000.0 ** ((number - number % 2) / width)
    return torch.where(number % 2 == 0, angle.sin(), angle.cos())


def logits(w: Weights, kind: Kind, target: Tensor, source: Tensor, places: Tensor) -> Tensor:
    """Score one sentence, (T, V): sections 3.1 and 3.4. `places` has a vector for each position."""

    def embedded(ids: Tensor, name: str) -> Tensor:
        rows = w[f"{name}.weight"][ids]
        if (project := f"{name.replace('embed', 'project')}.weight") in w:
            rows = rows @ w[project].T
        return rows * places.shape[1] ** 0.5 + places[: len(ids)]

    memory = stack(below(w, "encoder"), kind, "encoder", embedded(source, "embed"))
    inputs = embedded(target, "target_embed")
    states = stack(below(w, "decoder"), kind, "decoder", inputs, memory)
    scores = states @ w["output.weight"].T + w.get("output.bias", 0.0)  # which Marian has
    return copied(below(w, "copy_attention"), scores, states, inputs, memory, source)


def copied(w: Weights, scores: Tensor, states: Tensor, inputs: Tensor, memory: Tensor, source: Tensor) -> Tensor:
    """See et al. 2017, equations 8 and 9, where the network has a head that copies."""
    if not w:
        return scores
    context, weights = attention(states @ w["query.weight"].T, memory @ w["key.weight"].T, memory, causal=False)
    generate = torch.sigmoid(affine(w, "gate", torch.cat([context, states, inputs], 1)))
    pointed = weights @ torch.eye(scores.shape[1], dtype=scores.dtype)[source]
    return torch.log(generate * torch.softmax(scores, 1) + (1 - generate) * pointed)


@torch.no_grad()
def spread_weights(model: nn.Module, std: float = 0.4) -> None:
    """Fill a model in which no weight is zero or one, or equal to another."""
    for name, weight in model.named_parameters():
        weight.normal_(mean=float("norm" in name and "weight" in name), std=std)
