"""Recurrent layers, forward and backward: weft's cells beside torch.nn.LSTM of the same size, in one run.

python bench/cells.py                     # CPU: widths 128, 256, 512
python bench/cells.py --device cuda       # bf16, width 1024, 64 x 256 steps, beside cuDNN's LSTM
"""

import argparse
import time

import torch
from torch import nn

from weft.nn.rnn.cells import LSTM, Cell, make_cell
from weft.nn.rnn.self_attentive import LSTMN

PEER = "torch.nn.LSTM"


class OwnScan(LSTM):
    """The plain LSTM, walked by weft's scan in place of the library's kernel."""

    forward = Cell.forward


def layers(width: int) -> dict[str, nn.Module]:
    return {
        PEER: nn.LSTM(width, width),
        **{name: make_cell(name, width, width) for name in ("elman", "jordan", "lstm", "peephole", "gru")},
        "lstm, own scan": OwnScan(width, width),
        "lstm + intra-attention": LSTMN(make_cell("lstm", width, width), "dot"),
    }


def seconds(layer: nn.Module, inputs: torch.Tensor, bf16: bool) -> float:
    began = time.perf_counter()
    with torch.autocast(inputs.device.type, torch.bfloat16, enabled=bf16):
        outputs = layer(inputs)[0]
    outputs.backward(torch.ones_like(outputs))
    if inputs.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - began


def best_of(found: dict[str, nn.Module], inputs: torch.Tensor, rounds: int) -> dict[str, float]:
    best = dict.fromkeys(found, float("inf"))
    for turn in range(rounds + 2):  # all in turn, so that what else the machine does meets each alike
        for name, layer in found.items():
            took = seconds(layer, inputs, inputs.is_cuda)
            best[name] = min(best[name], took) if turn > 1 else best[name]
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--widths", type=int, nargs="+")
    parser.add_argument("--rows", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", nargs="+")
    args = parser.parse_args()
    cuda = args.device == "cuda"
    rows, steps = args.rows or (64 if cuda else 32), args.steps or (256 if cuda else 64)
    print(f"torch {torch.__version__}, {args.device}, {torch.get_num_threads()} threads, {rows} x {steps} steps")
    for width in args.widths or ([1024] if cuda else [128, 256, 512]):
        inputs = torch.randn(steps, rows, width, device=args.device, requires_grad=True)
        wanted = {name: one for name, one in layers(width).items() if not args.only or name in (PEER, *args.only)}
        best = best_of({name: layer.to(args.device) for name, layer in wanted.items()}, inputs, args.rounds)
        for name, took in best.items():
            rate = f"{rows * steps / took:12,.0f} tokens/s"
            print(f"width {width:5}  {name:24} {took * 1e3:8.2f} ms  {rate}  {best[PEER] / took:5.2f}x", flush=True)


if __name__ == "__main__":
    main()
