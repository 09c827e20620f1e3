"""Training Transformer-base on ragged pairs: weft's trainer beside transformers' Marian, compiled; tokens/s and MFU.

    python bench/training.py                      # one GPU, bf16
    python bench/training.py --budget 65536       # tokens a batch, both sides together

Pairs have 10 to 120 tokens a side. Both sides have the same model (512 wide, 6+6 layers, a vocabulary of 32,000, tied),
dropout 0.1, label smoothing 0.1, bf16 autocast, clipped gradients and a fused AdamW. weft trains as `weft train` does:
files, tokenizer, loader, compiled step, checks, reports. transformers gets batches of like lengths from the same
pairs, of as many real tokens, padded to their longest sequences and ready on the device, and one graph compiled for
all shapes (`dynamic=True`); the loss is compiled with the model. What compiling takes is not counted, but printed.

A rate counts real tokens of both sides. MFU counts useful operations alone, three passes of 2 x the numbers of each
matrix x the real tokens that meet it, and 4 x width for each pair of tokens of which one may see the other; over what
a large product reaches on this machine in one run of this script. "bytes a token" is the peak of device memory, weights
and optimizer included, over the real tokens of a batch.
"""

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from translators import HIDDEN, LAYERS, PAD, VOCAB, WIDTH, marian_config
from weft.config.run import Run
from weft.data.batching.loader import plan_batches
from weft.data.batching.packed_items import PackedItems
from weft.tasks.base import Task
from weft.tasks.factory import make_task
from weft.tasks.prepare import fit_tokenizer, pack_split
from weft.tokenization.trainable import Tokenizer
from weft.training.distributed import join_world
from weft.training.flops import peak_flops
from weft.training.reporting import Notice, Record, Step
from weft.training.run import make_trainer
from weft.training.trainer import Trainer

SHORTEST, LONGEST, POOL = 10, 120, 20_000  # tokens a side; pairs
SMOOTHING, CLIP, RATE = 0.1, 1.0, 1e-4
SPECIALS = 3  # as many as the tokenizer of words has: unknown, beginning, end


class Span(NamedTuple):
    """Some updates in a row."""

    tokens_per_s: float
    mfu: float


class Result(NamedTuple):
    """What a side did: spans after it had warmed up, and its memory."""

    spans: list[Span]
    peak: int  # bytes
    batch: float  # real tokens of one, in the mean


def write_pairs(folder: Path, seed: int) -> list[str]:
    """Write pairs of like lengths as words; each side, with its end, has SHORTEST to LONGEST tokens."""
    rng = np.random.default_rng(seed)
    source = rng.integers(SHORTEST, LONGEST + 1, POOL)
    target = (source * rng.normal(1, 0.15, POOL)).round().clip(SHORTEST, LONGEST).astype(int)
    paths = [folder / "pairs.source", folder / "pairs.target"]
    for path, lengths in zip(paths, (source, target), strict=True):
        rows = (rng.integers(0, VOCAB - SPECIALS, length - 1).tolist() for length in lengths)
        path.write_text("".join(" ".join(f"w{word}" for word in row) + "\n" for row in rows))
    return [str(path) for path in paths]


def recipe(paths: list[str], args: argparse.Namespace) -> Run:
    """What `weft train` would be given."""
    train = {"batch_tokens": args.budget, "lr": RATE, "clip": CLIP, "device": args.device, "seed": args.seed}
    train |= {"steps": args.steps * (args.spans + 1), "report_every": args.steps, "schedule": "constant"}
    train |= {"precision": "bf16" if args.device == "cuda" else "fp32"}
    return Run.parse(
        {
            "task": {"name": "translate", "label_smoothing": SMOOTHING},
            "data": {"train": paths, "format": "txt", "workers": args.workers},
            "tokenizer": {"name": "words", "size": VOCAB},
            "model": {"name": "transformer", "preset": "transformer-base", "layers": args.layers},
            "train": train,
        }
    )


def useful(source: np.ndarray, target: np.ndarray, layers: int) -> float:
    """Count the operations of an update on pairs of these lengths."""
    square, feed = WIDTH * WIDTH, 2 * WIDTH * HIDDEN
    met = source.sum() * layers * (4 * square + feed + 2 * square)  # the last: keys and values for the decoder
    met += target.sum() * (layers * (4 * square + 2 * square + feed) + WIDTH * VOCAB)
    pairs = (source * source + target * (target + 1) // 2 + source * target).sum()
    return 3.0 * (2 * int(met) + 4 * WIDTH * layers * int(pairs))


# --- transformers -----------------------------------------------------------------------------------------------------


class Padded(NamedTuple):
    """A batch as transformers reads it, and its real lengths."""

    given: dict[str, Tensor]
    labels: Tensor
    source: np.ndarray
    target: np.ndarray


def padded(items: list[tuple[np.ndarray, ...]], device: str) -> Padded:
    """Lay pairs out as rectangles."""

    def grid(rows: list[np.ndarray], value: int) -> Tensor:
        return nn.utils.rnn.pad_sequence([torch.from_numpy(row.astype(np.int64)) for row in rows], True, value)

    sources, read, answers = (
        [item[0] for item in items],
        *([item[1][cut] for item in items] for cut in (slice(-1), slice(1, None))),
    )
    source, target = (np.array([len(row) for row in rows]) for rows in (sources, read))
    mask = torch.arange(int(source.max())) < torch.from_numpy(source)[:, None]
    given = {"input_ids": grid(sources, PAD), "attention_mask": mask.long(), "decoder_input_ids": grid(read, PAD)}
    given = {name: value.to(device) for name, value in given.items()}
    return Padded(given, grid(answers, -100).to(device), source, target)


def learner(
    loss: Callable[..., Tensor], model: nn.Module, optimizer: torch.optim.Optimizer, device: str
) -> Callable[..., None]:
    """Return what makes one update of transformers' model, given what the loss is given."""

    def learn(*given: Any) -> None:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            found = loss(*given)
        found.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()

    return learn


def first(update: Callable[[], None], device: str) -> None:
    """Make the first update, and say how long it took."""
    began = time.perf_counter()
    update()
    wait(device)
    print(f"transformers: the first update, with compiling, took {time.perf_counter() - began:.1f} s", flush=True)


def train_marian(packed: PackedItems, args: argparse.Namespace) -> Result:
    """Train a span to warm up and then those that count."""
    from transformers import MarianMTModel

    torch.manual_seed(args.seed)
    model = MarianMTModel(marian_config(VOCAB, args.layers)).to(args.device).train()
    # Or a number is drawn for each layer to say whether to drop it, which the compiler cannot pass. It costs the
    # dropout of the embeddings.
    model.model.encoder.training = model.model.decoder.training = False
    optimizer = torch.optim.AdamW(model.parameters(), RATE, betas=(0.9, 0.98), fused=True)
    drawn = islice(plan_batches(packed, args.budget, args.seed), args.steps)
    batches = [padded([packed[item] for item in items.tolist()], args.device) for items in drawn]
    filled = sum(one.given["input_ids"].numel() + one.labels.numel() for one in batches)
    real = sum(int(one.source.sum() + one.target.sum()) for one in batches)
    print(f"transformers: {1 - real / filled:.1%} of its batches is padding", flush=True)

    def loss(given: dict[str, Tensor], labels: Tensor) -> Tensor:
        logits = model(**given, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=SMOOTHING)

    learn = learner(loss if args.eager else torch.compile(loss, dynamic=True), model, optimizer, args.device)

    def update(batch: Padded) -> None:
        learn(batch.given, batch.labels)

    first(lambda: update(batches[0]), args.device)
    for batch in batches:  # the other shapes
        update(batch)
    work = sum(useful(one.source, one.target, args.layers) for one in batches)
    seconds = [timed(update, batches, args.device) for _ in range(args.spans)]
    most = top(args.device)
    return Result([Span(real / one, work / one / most) for one in seconds], peak(args.device), real / len(batches))


def timed(update: Callable[[Padded], None], batches: list[Padded], device: str) -> float:
    """Make an update on each batch; return the seconds that it took."""
    wait(device)
    began = time.perf_counter()
    for batch in batches:
        update(batch)
    wait(device)
    return time.perf_counter() - began


# --- weft -------------------------------------------------------------------------------------------------------------


class Listener:
    """A reporter that keeps what the trainer says."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def __call__(self, record: Record) -> None:
        if isinstance(record, Step):
            self.steps.append(record)
        elif isinstance(record, Notice):
            print(f"weft: {record.text}", flush=True)

    def close(self) -> None:
        pass


def train_weft(run: Run, task: Task, tokenizer: Tokenizer, args: argparse.Namespace) -> Result:
    """Train as `weft train` does, but write no checkpoint; its own reports say the rest."""
    heard, layers = Listener(), args.layers
    with ExitStack() as stack:
        trainer = make_trainer(run, task, tokenizer, join_world(args.device), None, stack, None, heard)
        assert isinstance(trainer, Trainer)
        items = [trainer.loader.data[item] for item in range(8)]
        batch = trainer.task.collate(items, np.random.default_rng(0))
        lengths = [np.array([len(item[side]) - side for item in items]) for side in (0, 1)]
        assert 3 * trainer.head.flops(batch) == useful(lengths[0], lengths[1], layers), "counted alike"
        trainer.fit()
    spans = [Span(step.tokens_per_s, step.mfu) for step in heard.steps[1:]]  # the first is to warm up
    tokens = [
        (after.elapsed - before.elapsed) * after.tokens_per_s
        for before, after in zip(heard.steps, heard.steps[1:], strict=False)
    ]
    return Result(spans, peak(args.device), statistics.mean(tokens) / args.steps)


# --- the comparison ---------------------------------------------------------------------------------------------------


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def peak(device: str) -> int:
    """Bytes that were held on the device at once since the last call; of a CPU it is not known."""
    if device == "cpu":
        return 0
    found = torch.cuda.max_memory_allocated()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return found


def top(device: str) -> float:
    """Operations a second of a large product."""
    return peak_flops(join_world(device).device, "bf16" if device == "cuda" else "fp32")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cuda", help="the CPU is for trying the script out"
    )
    parser.add_argument("--budget", type=int, default=32_768, help="tokens a batch, both sides together")
    parser.add_argument("--steps", type=int, default=40, help="updates a span")
    parser.add_argument("--spans", type=int, default=5)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--workers", type=int, default=4, help="weft's loader's processes")
    parser.add_argument("--eager", action="store_true", help="do not compile transformers")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = recipe(write_pairs(Path(folder), args.seed), args)
        task = make_task(run)
        tokenizer = fit_tokenizer(run.tokenizer, run.data, task)
        assert len(tokenizer) == VOCAB, f"{len(tokenizer)} words"
        task.tokenizer = tokenizer
        packed, _ = pack_split(run.data, "train", task, tokenizer)
        print(f"torch {torch.__version__}, transformers {version('transformers')}; ", end="")
        print(
            f"{len(packed):,} pairs of {packed.sizes.mean():.0f} tokens; ceiling {top(args.device) / 1e12:,.1f} TFLOP/s"
        )
        peak(args.device)
        results = {"transformers": train_marian(packed, args)}
        torch.compiler.reset()
        results["weft"] = train_weft(run, task, tokenizer, args)
    first = statistics.median(span.tokens_per_s for span in results["transformers"].spans)
    for name, result in results.items():
        rate, mfu = (statistics.median(values) for values in zip(*result.spans, strict=True))
        print(f"{name:12} {rate:10,.0f} tokens/s {rate / first:6.2f}x  MFU {mfu:6.1%}", end="")
        print(f"  {result.peak / result.batch:10,.0f} bytes a token, {result.batch:,.0f} a batch")


if __name__ == "__main__":
    main()
