"""Translation by one Transformer-base of fixed random weights: weft beside transformers (Marian) and CTranslate2.

    pip install --no-deps --target .cache/ctranslate2 ctranslate2    # once, for the CPU; its dependencies are weft's
    python bench/translate.py                                        # CPU, 2 threads, beam 5: output tokens/s
    python bench/translate.py --device cuda                          # bf16: beam 5, greedy, and one sentence alone

All sides have the same weights, get the same sources and must write exactly `--length` tokens for each, since a random
model does not know when to stop. Each side has a process of its own and is timed with the batches that it is fastest
with. The sides take turns, so that a change in the machine's speed meets all.

On the CPU, sources have the lengths of captions: by default drawn (15 tokens in the mean), with `--lengths FILE` those
of the lines of a file, in words and an end. The sides in fp32 must give the same translations with the same scores.
"same" in the table is the share of sentences whose translation is transformers' to the token; with random weights the
next tokens lie so close together that a rounding changes them, so that in int8 and bf16 this says nothing of quality.

"bytes a token" is what a side's memory grew by while it translated, at its peak, over the output tokens in flight.
"""

import argparse
import ctypes
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from translators import (
    EOS,
    HIDDEN,
    LAYERS,
    UNK,
    VOCAB,
    WIDTH,
    CTranslate2,
    Found,
    Marian,
    Setting,
    Side,
    Weft,
    Workload,
    convert,
    load_ctranslate2,
    make_marian,
)

BANDWIDTH = 4.2e12  # bytes/s that an H200 was measured to read


class Metrics(NamedTuple):
    """One pass over the work."""

    seconds: float
    memory: int  # bytes, at the peak
    found: list[Found]


class _Here:
    """What a side's process holds."""

    side: Side
    cuda: bool
    how: str | None = None
    base = 0  # bytes held before the first sentence


def _load(make: Callable[[], Side], threads: int, cuda: bool) -> None:
    torch.set_num_threads(threads)
    _Here.side, _Here.cuda = make(), cuda


def _memory(peak: bool) -> int:
    if _Here.cuda:
        return torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM" if peak else "VmRSS"))


def _forget_peak() -> None:
    if _Here.cuda:
        torch.cuda.reset_peak_memory_stats()
    else:
        ctypes.CDLL(None).malloc_trim(0)  # what is freed but held would hide what is taken next
        Path("/proc/self/clear_refs").write_text("5")


def _measure(work: Workload, setting: Setting) -> Metrics:
    """Translate all; a side that a setting is new to gets ready for it first, which does not count."""
    if setting.how != _Here.how:
        _Here.side.prepare(setting.how)
        _Here.side.translate(work._replace(sources=work.sources[:1]), setting)  # so that all weights are in memory
        _forget_peak()
        _Here.how, _Here.base = setting.how, _memory(peak=False)
    _forget_peak()
    began = time.perf_counter()
    found = _Here.side.translate(work, setting)
    if _Here.cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    assert all(len(one.ids) == work.length and EOS not in one.ids for one in found)
    return Metrics(seconds, _memory(peak=True) - _Here.base, found)


@dataclass
class Worker:
    """A side as the parent sees it."""

    name: str
    pool: ProcessPoolExecutor
    settings: list[Setting]

    def run(self, work: Workload, setting: Setting) -> Metrics:
        """Make one pass."""
        return self.pool.submit(_measure, work, setting).result()


def start(
    stack: ExitStack, name: str, make: Callable[[], Side], args: argparse.Namespace, settings: list[Setting]
) -> list[Worker]:
    """Start a side's process; one that this machine does not have is left out, aloud."""
    if not name.startswith(tuple(args.sides)):
        return []
    pool = stack.enter_context(ProcessPoolExecutor(1, get_context("spawn")))
    try:
        pool.submit(_load, make, args.threads, args.device == "cuda").result()
    except ImportError as error:
        print(f"{name} is left out: {error}", flush=True)
        return []
    return [Worker(name, pool, settings)]


# --- the comparison ---------------------------------------------------------------------------------------------------


def choose(worker: Worker, work: Workload) -> list[Setting]:
    """Return the setting with which a side is fastest; those that it cannot do are left out, aloud."""
    seconds = {}
    for setting in worker.settings:
        try:
            worker.run(work._replace(sources=work.sources[:4]), setting)  # to warm up
            seconds[setting] = worker.run(work, setting).seconds
        except Exception as error:  # whatever a peer raises in a process of its own
            print(f"  {worker.name} cannot do {setting}: {type(error).__name__} {error}"[:200], flush=True)
            continue
        print(f"  {worker.name:18} {setting!s:26} {rate(work, seconds[setting]):10,.0f} tokens/s", flush=True)
    return sorted(seconds, key=lambda setting: seconds[setting])[:1]


def rate(work: Workload, seconds: float) -> float:
    """Output tokens a second."""
    return len(work.sources) * work.length / seconds


def compare(title: str, workers: list[Worker], work: Workload, rounds: int, exact: Sequence[str] = ()) -> None:
    """Time all sides in turn and print the table; the sides named in `exact` must agree with the first."""
    print(f"\n{title}: {len(work.sources)} sentences x {work.length} tokens, beam {work.beam}", flush=True)
    settings = {worker.name: setting for worker in workers for setting in choose(worker, work)}
    workers = [worker for worker in workers if worker.name in settings]
    runs: dict[str, list[Metrics]] = {worker.name: [] for worker in workers}
    for _ in range(rounds + 1):  # the first is to warm up
        for worker in workers:
            runs[worker.name].append(worker.run(work, settings[worker.name]))
    first = workers[0].name
    speeds = {name: rate(work, min(run.seconds for run in passes[1:])) for name, passes in runs.items()}
    width = max(map(len, runs))
    for name, passes in runs.items():
        setting, reference = settings[name], runs[first][-1].found
        flying = min(setting.batch * parallel(setting), len(work.sources)) * work.length
        grown = max(run.memory for run in passes) / flying
        same = np.mean([one.ids == other.ids for one, other in zip(passes[-1].found, reference, strict=True)])
        print(f"{name:{width}}  {speeds[name]:9,.0f} tokens/s {speeds[name] / work.length:9,.1f} sentences/s", end="")
        print(
            f" {speeds[name] / speeds[first]:7.2f}x {grown:9,.0f} bytes a token  same {same:4.0%}  {setting}",
            flush=True,
        )
        if name in exact:
            check(name, passes[-1].found, reference)


def parallel(setting: Setting) -> int:
    """How many batches are worked on at once."""
    return int(setting.how.split(" x ")[0]) if " x " in setting.how else 1


def check(name: str, found: list[Found], reference: list[Found]) -> None:
    """Refuse to compare the speed of different functions; two tokens that are all but equal may change places."""
    same = [one.ids == other.ids for one, other in zip(found, reference, strict=True)]
    apart = [abs(one.logprob - other.logprob) for one, other in zip(found, reference, strict=True)]
    if np.mean(same) < 0.9 or not np.nanmax(np.where(same, apart, 0)) < 1e-2:
        raise SystemExit(f"{name} computes another function: {np.mean(same):.0%} same, scores {max(apart):.1e} apart")


def caption_lengths(file: Path | None, count: int, rng: np.random.Generator) -> list[int]:
    """How many tokens each source has, its end included."""
    if file is None:
        return (rng.gamma(10, 1.4, count).round().clip(4, 40) + 1).astype(int).tolist()
    with file.open(encoding="utf-8") as lines:
        lengths = [len(line.split()) + 1 for line in lines]
    return [lengths[place] for place in rng.permutation(len(lengths))[:count]]


def draw(lengths: Sequence[int], rng: np.random.Generator) -> list[list[int]]:
    """Draw sources of these lengths."""
    return [[*rng.integers(UNK + 1, VOCAB, length - 1).tolist(), EOS] for length in lengths]


def on_cpu(stack: ExitStack, folder: Path, args: argparse.Namespace) -> None:
    """Compare on captions, with beam 5."""
    rng = np.random.default_rng(args.seed)
    sources = draw(caption_lengths(args.lengths, args.sentences, rng), rng)
    mean = np.mean([len(ids) for ids in sources])
    print(f"CPU, {args.threads} threads; sources of {mean:.1f} tokens in the mean; best of {args.rounds} rounds")
    sizes = [Setting(size) for size in args.batch]
    ways = [f"1 x {args.threads} threads", f"{args.threads} x 1 threads"]
    cuts = [Setting(size, how) for how in dict.fromkeys(ways) for size in args.batch]
    sides: list[tuple[str, Callable[[], Side], list[Setting]]] = [
        ("transformers fp32", partial(Marian, folder, "cpu", "fp32"), sizes),
        *(
            (f"CTranslate2 {kind}", partial(CTranslate2, folder, args.ctranslate2, kind), cuts)
            for kind in ("fp32", "int8")
        ),
        *((f"weft {kind}", partial(Weft, folder, "cpu", kind), sizes) for kind in ("fp32", "int8")),
    ]
    workers = [one for name, make, settings in sides for one in start(stack, name, make, args, settings)]
    exact = [worker.name for worker in workers if worker.name.endswith("fp32")]
    compare("captions", workers, Workload(sources, args.length or 20, args.beam), args.rounds, exact)


def on_cuda(stack: ExitStack, folder: Path, args: argparse.Namespace) -> None:
    """Compare on 32 sentences of 48 tokens, with beam 5 and greedily, and on one sentence alone."""
    length, rng = args.length or 48, np.random.default_rng(args.seed)
    sources = draw([48] * args.sentences, rng)
    print(f"{torch.cuda.get_device_name()}, bf16; best of {args.rounds} rounds")
    sides: list[tuple[str, Callable[[], Side], str]] = [
        ("transformers bf16", partial(Marian, folder, "cuda", "bf16"), ""),
        *(
            [("transformers bf16, compiled", partial(Marian, folder, "cuda", "bf16"), "static cache")]
            if args.static
            else []
        ),
        ("weft bf16", partial(Weft, folder, "cuda", "bf16"), ""),
    ]
    for title, beam, count in (("beam", args.beam, args.sentences), ("greedy", 1, args.sentences), ("alone", 1, 1)):
        with ExitStack() as inner:
            workers = [
                one for name, make, how in sides for one in start(inner, name, make, args, [Setting(count, how)])
            ]
            compare(title, workers, Workload(sources[:count], length, beam), args.rounds)
    print(f"floor for one alone: {floor(48, length):,.0f} tokens/s, by {BANDWIDTH / 1e12} TB/s")


def floor(source: int, length: int) -> float:
    """Steps a second if all that a greedy step must read, in bf16, came at the measured bandwidth."""
    layer = 6 * WIDTH * WIDTH + 2 * WIDTH * HIDDEN  # the source's keys and values are made once
    caches = 2 * WIDTH * (source + length / 2)
    return BANDWIDTH / (2 * (LAYERS * (layer + caches) + VOCAB * WIDTH))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--lengths", type=Path, help="a text of a sentence a line, whose lengths in words to take")
    parser.add_argument("--sentences", type=int, help="128 on the CPU, 32 on CUDA")
    parser.add_argument("--length", type=int, help="output tokens a sentence: 20 on the CPU, 48 on CUDA")
    parser.add_argument("--beam", type=int, default=5)
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 16, 32, 64], help="sizes to try on the CPU")
    parser.add_argument("--sides", nargs="+", default=["transformers", "CTranslate2", "weft"], help="by first words")
    parser.add_argument("--static", action="store_true", help="on CUDA, also transformers with a compiled static cache")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ctranslate2", default=".cache/ctranslate2", help="the folder that holds its package")
    args = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}  # in the sides' processes too
    args.sentences = args.sentences or {"cpu": 128, "cuda": 32}[args.device]
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        import transformers

        transformers.logging.disable_progress_bar()
        marian, folder = make_marian(args.seed), Path(name)
        marian.save_pretrained(folder / "marian")
        print(f"torch {torch.__version__}, transformers {transformers.__version__}", end="")
        if args.device == "cpu":
            print(f", CTranslate2 {load_ctranslate2(args.ctranslate2)}", end="")
            convert(marian, folder / "ctranslate2")
        print(f"; {sum(one.numel() for one in marian.parameters() if one.requires_grad):,} parameters")
        del marian
        (on_cpu if args.device == "cpu" else on_cuda)(stack, folder, args)


if __name__ == "__main__":
    main()
