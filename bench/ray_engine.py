"""`weft data prepare --engine ray` on two workers against the local engine on two processes: MB of text a second.

    python bench/ray_engine.py [TEXT] [--megabytes 60] [--rounds 3] [--tokenizer {name: bpe, size: 8000}]

The two take turns, with one text and one recipe, and must write the same tokens. Rates are of the parts after the
first: the tokenizer is trained and processes are started before. Without TEXT the manual that
ships with Python is repeated.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from prepare import WORKERS, recipe, write_text
from weft.config.run import Run
from weft.ray_engine import cluster
from weft.tasks.corpus.build import prepare


def measure(run: Run, out: Path, engine: str) -> tuple[float, float, str]:
    """Return the seconds in all, the MB/s after the first part, and the digest of the tokens."""
    shutil.rmtree(out, ignore_errors=True)
    stages: list[tuple[float, int]] = []
    began = time.perf_counter()
    corpus = prepare(
        run,
        out,
        workers=WORKERS,
        size=1 << 20,
        engine=engine,
        report=lambda stage: stages.append((time.perf_counter(), stage.done)),
    )
    took = time.perf_counter() - began
    (first, before), (last, after) = stages[1], stages[-1]
    return took, (after - before) / (last - first) / 1e6, corpus.splits["train"].digest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", nargs="?")
    parser.add_argument("--megabytes", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokenizer", default="{name: bpe, size: 8000}")
    args = parser.parse_args()
    rates: dict[str, list[float]] = {"local": [], "ray": []}
    digests = set()
    with tempfile.TemporaryDirectory() as place, cluster():
        path = Path(place) / "text.txt"
        write_text(args, path)
        run = recipe(path, args.tokenizer)
        for _ in range(args.rounds):
            for engine, results in rates.items():
                took, rate, digest = measure(run, Path(place) / "corpus", engine)
                print(f"{engine:5} {took:6.1f} s in all, {rate:6.2f} MB/s")
                results.append(rate)
                digests.add(digest)
    assert len(digests) == 1, "the engines must write the same tokens"
    print(f"ray / local: {statistics.median(rates['ray']) / statistics.median(rates['local']):.2f}")


if __name__ == "__main__":
    main()
