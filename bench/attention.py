"""Training a recurrent encoder-decoder with additive attention: weft's `seq2seq` beside joeynmt's, target tokens/s.

    pip install --no-deps --target .cache/joeynmt joeynmt==2.3.0     # once; its own dependencies are not needed
    python bench/attention.py                                        # CPU, fp32
    python bench/attention.py --device cuda                          # fp32, then bf16 autocast for both

Both have embeddings of `--width`, one bidirectional layer of half that each way, a bridge with tanh, one decoder layer
of `--width`, attention with a hidden layer of that size, no dropout. Both get the same pairs in the same batches, ready
on the device, and do forward, cross-entropy, backward and a fused Adam step. joeynmt's batches are padded by its own
`Batch`; the right answers that its trainer also counts are left out. A rate counts real target tokens.

`--place` says where attention stands:

    before    the cell, weft's default (Bahdanau et al. 2015): [E y ; c_t] goes in. joeynmt has no such decoder; beside
              it stands its own default, where [E y ; h~_{t-1}] goes into a cell of that shape. weft's reads out E y too
    fed       after the cell, with input feeding: joeynmt's default, on both sides
    after     after the cell, without

In the last two both compute the same function: joeynmt's weights are copied into weft, and gradients must agree.

`--order`: `sorted` gives both the same batches of like length, as weft's loader makes them; `drawn` gives both the same
pairs as they come, as joeynmt's sampler does; `own` gives each those that its own loader would make of the same pairs.
"""

import argparse
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.models.seq2seq.model import Seq2Seq, Seq2SeqConfig
from weft.nn.layers.losses import cross_entropy_sum
from weft.tokens import Tokens

UNK, PAD, BOS, EOS = range(4)  # joeynmt's
VOCAB, BUDGET, WARM = 8000, 4096, 2
POOL = 12_500  # pairs: about the 64 batches that weft's loader sorts together
# What joeynmt imports for plots, subwords and logs; none of it has a part in training.
ASIDE = (
    "importlib_metadata",
    "packaging",
    "packaging.version",
    "torch.utils.tensorboard",
    "joeynmt.plotting",
    "joeynmt.tokenizers",
)

Pairs = list[tuple[np.ndarray, np.ndarray]]


@dataclass
class Side:
    """One of the two: a model, its batches, and how a batch becomes a sum of losses."""

    model: nn.Module
    batches: list
    loss: Callable[[Any], Tensor]
    best: float = float("inf")  # seconds for all batches


def draw_batches(count: int, like_lengths: bool, seed: int) -> list[Pairs]:
    """Draw pairs of 5 to 60 words, cut them into batches, and take `count` of these, evenly from first to last."""
    rng = np.random.default_rng(seed)
    source = rng.normal(20, 8, POOL).round().clip(5, 60).astype(int)
    target = (source * rng.normal(1, 0.2, POOL)).round().clip(5, 60).astype(int)  # about as long as its source
    order = np.lexsort((source, target)) if like_lengths else np.arange(POOL)
    batch_of = (target[order] + 1).cumsum() // BUDGET
    batches = []
    for number in np.linspace(0, batch_of[-1], count + 2).astype(int)[1:-1]:
        rows = order[batch_of == number]
        rows = rows[np.argsort(-source[rows], kind="stable")]  # joeynmt wants the longest source first
        words = [[rng.integers(EOS + 1, VOCAB, side[row]) for side in (source, target)] for row in rows]
        batches.append([(np.r_[x, EOS], np.r_[BOS, y, EOS]) for x, y in words])
    return batches


def padding(sequences: list[list[np.ndarray]]) -> float:
    """Say what part of the batches, laid out as rectangles, would be padding."""
    lengths = [[len(one) for one in batch] for batch in sequences]
    return 1 - sum(map(sum, lengths)) / sum(len(batch) * max(batch) for batch in lengths)


def load_joeynmt(folder: str) -> SimpleNamespace:
    logging.disable(logging.INFO)
    sys.path.append(folder)
    aside = {name: MagicMock() for name in ASIDE if name not in sys.modules}
    sys.modules.update(aside)
    try:
        from joeynmt import __version__
        from joeynmt.batch import Batch
        from joeynmt.model import build_model
        from joeynmt.vocabulary import Vocabulary
    except ModuleNotFoundError as error:
        raise SystemExit(f"{error}: pip install --no-deps --target {folder} joeynmt==2.3.0") from error
    for name in aside:
        del sys.modules[name]
    return SimpleNamespace(version=__version__, Batch=Batch, build_model=build_model, Vocabulary=Vocabulary)


def joeynmt_side(joeynmt: SimpleNamespace, args: argparse.Namespace, width: int, drawn: list[Pairs]) -> Side:
    names = {"unk": "<unk>", "pad": "<pad>", "bos": "<s>", "eos": "</s>"}
    tokens, ids = {f"{k}_token": v for k, v in names.items()}, {f"{k}_id": i for i, k in enumerate(names)}
    special = SimpleNamespace(**tokens, **ids, sep_token=None, lang_tags=[])
    vocabulary = joeynmt.Vocabulary([str(number) for number in range(VOCAB - len(names))], special)
    layer = {"type": "recurrent", "rnn_type": args.cell, "num_layers": 1, "embeddings": {"embedding_dim": width}}
    encoder = {**layer, "hidden_size": width // 2, "bidirectional": True}
    decoder = {**layer, "hidden_size": width, "attention": "bahdanau", "init_hidden": "bridge"}
    decoder["input_feeding"] = args.place != "after"
    config = {
        "encoder": encoder,
        "decoder": decoder,
        "embed_initializer": "normal",
        "embed_init_weight": 1.0,
    }  # as weft
    model = joeynmt.build_model(config, vocabulary, vocabulary).to(args.device)
    model.loss_function = ("crossentropy", 0.0)

    def pad(sequences: list[np.ndarray]) -> Tensor:
        return nn.utils.rnn.pad_sequence([torch.from_numpy(one) for one in sequences], True, PAD)

    def make_batch(pairs: Pairs) -> object:
        sources, targets = (list(side) for side in zip(*pairs, strict=True))
        lengths, order = torch.tensor([len(one) for one in sources]), torch.arange(len(pairs))
        device = torch.device(args.device)
        return joeynmt.Batch(pad(sources), lengths, None, pad(targets), None, order, device, PAD, EOS)

    def loss(batch: SimpleNamespace) -> Tensor:  # Model.forward's for "loss", less its count of right answers
        given = {"src_mask": batch.src_mask, "trg_input": batch.trg_input, "unroll_steps": batch.trg_input.shape[1]}
        states, last, *_ = model("encode", src=batch.src, src_length=batch.src_length, src_mask=batch.src_mask)
        logits, *_ = model("decode", encoder_output=states, encoder_hidden=last, **given)
        return model.loss_function(F.log_softmax(logits, -1), trg=batch.trg)

    return Side(model, [make_batch(pairs) for pairs in drawn], loss)


def weft_side(args: argparse.Namespace, width: int, drawn: list[Pairs]) -> Side:
    config = Seq2SeqConfig(
        name="seq2seq",
        width=width,
        cell=args.cell,
        attention="additive",
        place="before" if args.place == "before" else "after",
        input_feeding=args.place == "fed",
    )
    model = Seq2Seq(config, VOCAB, VOCAB).to(args.device)

    def make_batch(pairs: Pairs) -> tuple[Tokens, Tokens, Tensor]:
        sources, targets = zip(*pairs, strict=True)
        answers = torch.from_numpy(np.concatenate([one[1:] for one in targets]))
        read = Tokens.pack([one[:-1] for one in targets])
        return Tokens.pack(sources).to(args.device), read.to(args.device), answers.to(args.device)

    def loss(batch: tuple[Tokens, Tokens, Tensor]) -> Tensor:
        source, read, answers = batch
        return cross_entropy_sum(model.logits(read, source), answers)

    return Side(model, [make_batch(pairs) for pairs in drawn], loss)


@torch.no_grad()
def copy_weights(joeynmt: Side, weft: Side) -> None:
    found, made = joeynmt.model.state_dict(), weft.model.state_dict()
    names = {"src_embed.lut": "encoder.embed", "trg_embed.lut": "decoder.embed", "decoder.bridge_layer": "bridge"}
    names |= {"decoder.att_vector_layer": "decoder.readout", "decoder.output_layer": "decoder.output"}
    names |= {f"decoder.attention.{part}_layer": f"decoder.score.{part}" for part in ("query", "key", "energy")}
    for name, value in found.items():
        owner, _, part = name.rpartition(".")
        way, part = int(part.endswith("_reverse")), part.removesuffix("_reverse")
        kernel = {"encoder.rnn": f"encoder.recurrent.layers.0.{way}.kernel", "decoder.rnn": "decoder.layers.0.kernel"}
        place = made[f"{(names | kernel)[owner]}.{part}"]
        place.copy_(torch.cat([value] * (len(place) // len(value))))  # an LSTM's two states start from one bridge there
    made["decoder.output.bias"].zero_()  # joeynmt has neither
    made["decoder.score.key.bias"].zero_()


def check_same(joeynmt: Side, weft: Side) -> None:
    """Compare gradients by the source's embeddings, which come through the decoder, attention and the encoder."""
    matrices = joeynmt.model.src_embed.lut.weight, weft.model.encoder.embed.weight
    losses = (side.loss(side.batches[0]) for side in (joeynmt, weft))
    one, other = (torch.autograd.grad(*pair)[0] for pair in zip(losses, matrices, strict=True))
    apart = float((one - other).norm() / one.norm())
    if not apart < 0.005:  # room for TF32
        raise SystemExit(f"the two do not compute the same function: gradients are {apart:.2%} apart")


def train(side: Side, device: str, bf16: bool, optimizer: torch.optim.Optimizer, counts: list[int]) -> float:
    """Train on each batch once; keep the time if it is the best, and return the mean loss of a token."""
    total = torch.zeros((), device=device)
    wait(device)
    began = time.perf_counter()
    for batch, count in zip(side.batches, counts, strict=True):
        with torch.autocast(device, torch.bfloat16, enabled=bf16):
            loss = side.loss(batch)
        (loss / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        total += loss.detach()
    wait(device)
    side.best = min(side.best, time.perf_counter() - began)
    return float(total) / sum(counts)


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def compare(
    joeynmt: SimpleNamespace,
    args: argparse.Namespace,
    width: int,
    precision: str,
    theirs: list[Pairs],
    ours: list[Pairs],
) -> None:
    torch.manual_seed(args.seed)
    peer = f"joeynmt {joeynmt.version}"
    sides = {peer: joeynmt_side(joeynmt, args, width, theirs), "weft": weft_side(args, width, ours)}
    if args.place != "before" and theirs is ours:
        copy_weights(*sides.values())
        check_same(*sides.values())
    counts = {"weft": [len(answers) for *_, answers in sides["weft"].batches]}
    counts[peer] = [batch.ntokens for batch in sides[peer].batches]
    assert theirs is not ours or counts["weft"] == counts[peer]
    optimizers = {name: torch.optim.Adam(side.model.parameters(), 3e-4, fused=True) for name, side in sides.items()}
    losses = {}
    for turn in range(WARM + args.rounds):  # in turn, so that what else the machine does meets both alike
        for name, side in sides.items():
            if turn == WARM:
                side.best = float("inf")
            losses[name] = train(side, args.device, precision == "bf16", optimizers[name], counts[name])
    rates = {name: sum(counts[name]) / side.best for name, side in sides.items()}
    for name, side in sides.items():
        size = sum(one.numel() for one in side.model.parameters())
        print(f"{width:5} {args.cell:4} {precision:4}  {args.place:6}  {name:13} {size:10,} parameters", end="")
        print(
            f"  loss {losses[name]:.3f}  {rates[name]:10,.0f} tokens/s  {rates[name] / rates[peer]:5.2f}x", flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--width", type=int, nargs="+", default=[256])
    parser.add_argument("--cell", choices=["lstm", "gru"], default="lstm")
    parser.add_argument("--place", choices=["before", "fed", "after"], default="before")
    parser.add_argument("--order", choices=["sorted", "drawn", "own"], default="sorted")
    parser.add_argument("--precision", choices=["fp32", "bf16"], nargs="+")
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--joeynmt", default=".cache/joeynmt", help="the folder that holds its package")
    args = parser.parse_args()
    joeynmt = load_joeynmt(args.joeynmt)
    theirs = draw_batches(args.batches, args.order == "sorted", args.seed)
    ours = draw_batches(args.batches, True, args.seed) if args.order == "own" else theirs
    sources, targets = ([[pair[side] for pair in pairs] for pairs in theirs] for side in (0, 1))
    name = torch.cuda.get_device_name() if args.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"torch {torch.__version__}, {name}; vocabulary {VOCAB:,}; best of {args.rounds} rounds")
    print(
        f"{args.batches} batches, {sum(map(len, theirs)):,} pairs; padding for joeynmt: {padding(sources):.0%}", end=" "
    )
    print(f"of sources, {padding(targets):.0%} of targets")
    for width in args.width:
        for precision in args.precision or (["fp32", "bf16"] if args.device == "cuda" else ["fp32"]):
            compare(joeynmt, args, width, precision, theirs, ours)


if __name__ == "__main__":
    main()
