"""One layer forward over one text: self-attention, LSTM and convolution, over length and width, beside the law.

    python bench/layers.py                              # CPU, fp32
    python bench/layers.py --device cuda                # bf16; --rows 16 reads so many texts at once
    python bench/layers.py --plot layers.png            # and the picture: time over length, and over width

The law is that of Vaswani et al. 2017, table 1. What it counts are the operations of products, where a multiply and an
add are two; at length = dim = 1000 and kernel 3 it gives 4, 16 and 6 · 10⁹:

    self-attention  O(length² · dim)          4 · length² · dim            scores q kᵀ and the mix of values, 2 each
    LSTM            O(length · dim²)          16 · length · dim²           four gates from input and state, 2 each
    convolution     O(length · dim² · kernel) 2 · kernel · length · dim²

Not in the law, but in the layer and in its time: the projections of attention to q, k, v and output, 8 · length · dim².
They are counted apart, and the rate is that of both. Sums, exponentials, gates and biases are not counted.

Attention is `weft.nn.attention.multihead.MultiHeadAttention`, its heads 64 wide or wider; the LSTM is weft's cell,
which runs in the library's kernel; the convolution is `torch.nn.Conv1d`. A time is the best of several rounds, in which
all take turns.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from weft.nn.attention.multihead import AttentionLayout, MultiHeadAttention
from weft.nn.rnn.cells import make_cell
from weft.tokens import Tokens

KERNEL, HEAD = 3, 64
HUES = ("#1b74c5", "#d9620b", "#0a5f50")
ENOUGH = 4.0  # seconds of measuring at one size, after three rounds


@dataclass(frozen=True)
class Law:
    """How many operations a layer takes for one text: those of the law, and those beside it."""

    name: str
    order: str
    inside: Callable[[int, int], int]
    beside: Callable[[int, int], int] = lambda length, dim: 0

    def all(self, length: int, dim: int) -> int:
        return self.inside(length, dim) + self.beside(length, dim)


LAWS = [
    Law("self-attention", "length² · dim", lambda n, d: 4 * n * n * d, lambda n, d: 8 * n * d * d),
    Law("LSTM", "length · dim²", lambda n, d: 16 * n * d * d),
    Law("convolution", "length · dim² · kernel", lambda n, d: 2 * KERNEL * n * d * d),
]

Found = dict[tuple[str, int, int], float]  # seconds by layer, length and width


def layers(length: int, dim: int, rows: int = 1, device: str = "cpu") -> dict[str, Callable[[], Tensor]]:
    """Return what runs each layer over `rows` texts, by the names of the laws."""
    tokens = Tokens.pack([range(length)] * rows).to(device)
    heads = next(count for count in range(max(1, dim // HEAD), 0, -1) if dim % count == 0)
    attention = MultiHeadAttention(dim, heads, "encoder", 0)
    made = [attention, make_cell("lstm", dim, dim), nn.Conv1d(dim, dim, KERNEL, padding=KERNEL // 2)]
    kind = torch.bfloat16 if device.startswith("cuda") else torch.float32
    attention, lstm, convolution = (layer.to(device, kind).eval() for layer in made)
    flat, steps, planes = (
        torch.randn(*shape, device=device, dtype=kind)
        for shape in ((rows * length, dim), (length, rows, dim), (rows, dim, length))
    )
    layout = AttentionLayout.self_attention(tokens)
    runs = [partial(attention, flat, layout), lambda: lstm(steps)[0], partial(convolution, planes)]
    return {law.name: run for law, run in zip(LAWS, runs, strict=True)}


def seconds(run: Callable[[], Tensor], device: str) -> float:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    began = time.perf_counter()
    run()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter() - began


def measure(length: int, dim: int, args: argparse.Namespace) -> Found:
    """Take the best time of each layer; those of a warm-up do not count."""
    found = layers(length, dim, args.rows, args.device)
    best, began = dict.fromkeys(found, float("inf")), time.perf_counter()
    for turn in range(args.rounds + 1):
        for name, run in found.items():
            took = seconds(run, args.device)
            best[name] = min(best[name], took) if turn else best[name]
        if turn >= 3 and time.perf_counter() - began > ENOUGH:
            break
    return {(name, length, dim): took for name, took in best.items()}


def show(found: Found, rows: int) -> None:
    laws = {law.name: law for law in LAWS}
    for (name, length, dim), took in found.items():
        inside, whole = (rows * count(length, dim) / 1e9 for count in (laws[name].inside, laws[name].all))
        counts = f"{inside:9.3f} {whole:9.3f} {whole / took:9.1f}"
        print(f"{length:6} {dim:6}  {name:15} {took * 1e3:10.3f} {counts}", flush=True)


def draw(found: Found, path: str, about: str) -> None:
    """Draw time over length and over width: measured, and dashed the counted operations at the rate of the last."""
    from matplotlib.figure import Figure

    lengths, widths = (sorted({key[axis] for key in found}) for axis in (1, 2))
    length, width = lengths[len(lengths) // 2], widths[len(widths) // 2]
    figure = Figure(figsize=(9.5, 3.9), layout="constrained")
    left, right = figure.subplots(1, 2)
    draw_side(left, found, lengths, [(one, width) for one in lengths])
    draw_side(right, found, widths, [(length, one) for one in widths])
    left.set(xlabel="length", title=f"width {width}")
    right.set(xlabel="width", title=f"length {length}")
    left.legend(frameon=False, title="dashed: operations counted", fontsize=9, title_fontsize=9)
    figure.suptitle(about, fontsize=9)
    figure.savefig(path, dpi=100, pil_kwargs={"optimize": True})


def draw_side(axes: Any, found: Found, places: list[int], sizes: list[tuple[int, int]]) -> None:
    for law, hue in zip(LAWS, HUES, strict=True):
        times = [found[law.name, *size] * 1e3 for size in sizes]
        counted = [law.all(*size) * times[-1] / law.all(*sizes[-1]) for size in sizes]
        axes.plot(places, times, "o-", color=hue, markersize=4, label=law.name)
        axes.plot(places, counted, "--", color=hue, linewidth=1)
    axes.set(xscale="log", yscale="log", ylabel="ms")
    axes.set_xticks(places, [str(place) for place in places])
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 128, 256, 512, 1024, 2048])
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256, 512, 1024])
    parser.add_argument("--rows", type=int, default=1, help="texts at once")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--plot", metavar="FILE.png")
    args = parser.parse_args()
    kind = "bf16" if args.device.startswith("cuda") else f"fp32, OMP_NUM_THREADS={torch.get_num_threads()}"
    about = (
        f"torch {torch.__version__}, {args.device}, {kind}, {args.rows} {'text' if args.rows == 1 else 'texts'} at once"
    )
    print(about)
    for law in LAWS:
        at = (law.inside(1000, 1000) / 1e9, law.beside(1000, 1000) / 1e9)
        print(
            f"{law.name:15} O({law.order}): {at[0]:g} · 10⁹ operations at 1000 x 1000, {at[1]:g} · 10⁹ beside the law"
        )
    print(f"length  width  {'layer':15}         ms    law, G    all, G  GFLOP/s")
    found: Found = {}
    with torch.inference_mode():
        for dim in args.widths:
            for length in args.lengths:
                measured = measure(length, dim, args)
                show(measured, args.rows)
                found |= measured
    if args.plot:
        draw(found, args.plot, about)


if __name__ == "__main__":
    main()
