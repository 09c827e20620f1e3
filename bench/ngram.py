"""5-grams of WikiText-2 with Kneser-Ney: weft beside KenLM. Estimation, queries, file size, perplexity.

    python bench/ngram.py ~/wikitext2 --kenlm ~/kenlm/build/bin        # lmplz and build_binary; pip install kenlm

KenLM is no dependency: build it (`cmake -B build && make -C build lmplz build_binary`; it wants Boost), and install its
module. A line of the text is a sentence, empty ones too, on both sides.

`<unk>` in the text: it is a word like any other on both sides. lmplz keeps this spelling for words that it has never
seen and refuses it in a text, so here the text spells it `<UNK>`; both sides then have one more word, the unknown one,
that no text has, and |V| is the same.

Estimation goes from the text to a model's file: for lmplz the ARPA file, to which build_binary's time comes before it
can be asked; for weft `model.safetensors`, which is asked as it is. weft's words are numbered by
`weft.tokenization.whitespace`. A query goes from lines of text to their log-probabilities, by that and
`NGram.log_prob`; the module of KenLM has one thread, weft one for each core.
"""

import argparse
import math
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import kenlm
import numpy as np
import torch
from safetensors.torch import load_file, save_file

from weft.data.batching.packed_items import PackedItems
from weft.models.base import FitBudget
from weft.models.ngram.model import NGram, NGramConfig
from weft.tokenization.whitespace import WordTable
from weft.tokens import Tokens

ORDER, UNK, BOS, EOS = 5, 0, 1, 2
THREADS = os.cpu_count() or 1


def read(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").replace("<unk>", "<UNK>").splitlines()


def numbered(text: str) -> tuple[dict[str, int], PackedItems]:
    """Number the words of a text, and lay its lines out as documents."""
    words = ["<unk>", "<s>", "</s>", *dict.fromkeys(text.split())]
    vocab = {word: id for id, word in enumerate(words)}
    numbers, sizes = spaces(vocab).flat(text.splitlines())
    ids, starts = begun(numbers, sizes)
    return vocab, PackedItems(ids.astype(np.int32), starts, np.arange(len(starts)), "")


def spaces(vocab: dict[str, int]) -> WordTable:
    return WordTable({word: id for word, id in vocab.items() if id not in (BOS, EOS)}, UNK)


def begun(numbers: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Put a sign of beginning before each line, given the words of all and how many each has."""
    starts = np.concatenate([[0], np.cumsum(sizes + 1)])
    ids = np.full(starts[-1], BOS)
    inside = np.ones(len(ids), bool)
    inside[starts[:-1]] = False
    ids[inside] = numbers
    return ids, starts


def estimated(data: PackedItems, vocab: int) -> NGram:
    model = NGram(NGramConfig(name="ngram", order=ORDER), vocab)
    for _ in model.fit(data, FitBudget(1, None, 1.0, 1, threads=THREADS, eos=EOS)):
        pass
    return model


def saved(model: NGram, path: Path) -> None:
    save_file(dict(model.named_buffers()), path)


def scored(model: NGram, numbers: np.ndarray, sizes: np.ndarray) -> torch.Tensor:
    """Score lines."""
    ids, _ = begun(numbers, sizes)
    targets = np.append(ids[1:], EOS)
    targets[targets == BOS] = EOS
    return model.log_prob(Tokens.flat(torch.from_numpy(ids), torch.from_numpy(sizes + 1)), torch.from_numpy(targets))


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def run(*command: object) -> None:
    subprocess.run([str(one) for one in command], check=True, capture_output=True)


class Table:
    """Times of both sides, taken in turns."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def take(self, work: dict[str, Callable[[], object]]) -> dict[str, float]:
        taken: dict[str, list[float]] = {name: [] for name in work}
        for _ in range(self.rounds):
            for name, one in work.items():
                taken[name].append(seconds(one))
        return {name: statistics.median(times) for name, times in taken.items()}


def estimation(args: argparse.Namespace, folder: Path, text: Path) -> tuple[dict[str, int], NGram]:
    vocab, data = numbered(text.read_text(encoding="utf-8"))
    estimated(data, len(vocab))  # compiles

    def ours() -> None:
        words, own = numbered(text.read_text(encoding="utf-8"))
        saved(estimated(own, len(words)), folder / "model.safetensors")

    lmplz = [args.kenlm / "lmplz", "-o", ORDER, "-S", "2G", "-T", folder / "tmp", "--text", text, "--arpa"]
    times = Table(args.rounds).take({
        "lmplz": lambda: run(*lmplz, folder / "kenlm.arpa"),
        "build_binary trie": lambda: run(args.kenlm / "build_binary", "trie", folder / "kenlm.arpa", folder / "trie"),
        "weft": ours,
        "of it the n-grams": lambda: estimated(data, len(vocab)),
    })  # fmt: skip
    for kind, more in (("probing", []), ("trie", ["-a", 22])):
        out = folder / ("probing" if kind == "probing" else "trie-a22")
        run(args.kenlm / "build_binary", *more, kind, folder / "kenlm.arpa", out)
    print(f"estimation, {len(data.ids) - len(data):,} words, {len(data):,} lines:")
    for name, taken in times.items():
        print(f"  {name:20} {taken:7.2f} s")
    whole = times["lmplz"] + times["build_binary trie"]
    print(f"  to a file {times['lmplz'] / times['weft']:.2f}x, to one that can be asked {whole / times['weft']:.2f}x")
    print(f"  the n-grams alone, from numbered words to tables: {times['lmplz'] / times['of it the n-grams']:.2f}x")
    model = NGram(NGramConfig(name="ngram", order=ORDER), len(vocab))
    for name, value in load_file(folder / "model.safetensors").items():
        setattr(model, name, value)
    return vocab, model


def by_text(pool: ThreadPoolExecutor, model: NGram, reader: WordTable, lines: list[str]) -> list[torch.Tensor]:
    """Score lines, an equal part of them in each thread."""
    cuts = [len(lines) * part // THREADS for part in range(THREADS + 1)]
    parts = [lines[a:b] for a, b in pairwise(cuts)]
    return list(pool.map(lambda part: scored(model, *reader.flat(part)), parts))


def by_line(peer: kenlm.Model, lines: list[str]) -> list[float]:
    return [peer.score(line) for line in lines]


def queries(args: argparse.Namespace, folder: Path, lines: list[str], vocab: dict[str, int], model: NGram) -> None:
    trie, probing = (kenlm.Model(str(folder / kind)) for kind in ("trie", "probing"))
    reader = spaces(vocab)
    read = reader.flat(lines)
    scored(model, *read)  # compiles
    pool = ThreadPoolExecutor(THREADS)
    by_text(pool, model, reader, lines)
    times = Table(5 * args.rounds).take({
        "kenlm trie": lambda: by_line(trie, lines),
        "kenlm probing": lambda: by_line(probing, lines),
        "weft": lambda: by_text(pool, model, reader, lines),
        "weft, one thread": lambda: scored(model, *reader.flat(lines)),
        "of it the look-up": lambda: scored(model, *read),
    })  # fmt: skip
    size = int(read[1].sum()) + len(lines)
    print(f"query, {size:,} words and ends, {len(lines):,} lines:")
    for name, taken in times.items():
        print(f"  {name:20} {1e3 * taken:7.1f} ms  {size / taken / 1e6:6.2f} M/s")
    ratios = [f"{times[f'kenlm {kind}'] / times['weft']:.2f}x of its {kind}" for kind in ("trie", "probing")]
    print(f"  {', '.join(ratios)}")
    own, total = scored(model, *read).double(), sum(by_line(trie, lines)) * math.log(10)
    print(f"perplexity: weft {math.exp(-own.mean()):.4f}, kenlm {math.exp(-total / size):.4f}")


def sizes(folder: Path) -> None:
    known = {"weft": "model.safetensors", "kenlm trie": "trie", "kenlm trie -a 22": "trie-a22", "probing": "probing"}
    print("size:", ", ".join(f"{name} {(folder / file).stat().st_size / 1e6:.1f} MB" for name, file in known.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="a folder with train.txt and test.txt")
    parser.add_argument("--kenlm", type=Path, required=True, help="a folder with lmplz and build_binary")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.txt").write_text("".join(f"{line}\n" for line in read(args.data / "train.txt")))
        vocab, model = estimation(args, folder, folder / "train.txt")
        queries(args, folder, read(args.data / "test.txt"), vocab, model)
        sizes(folder)


if __name__ == "__main__":
    main()
