"""Text to token arrays: `weft data prepare` against Hugging Face datasets, and against the tokenizer alone.

    python bench/prepare.py [TEXT] [--megabytes 20] [--rounds 3] [--tokenizer {name: bpe, size: 8000}]

Each with two processes, the same tokenizer and the same lines; the three take turns. The time is from text in a file to
token arrays on the disk, the training of the tokenizer left out:

1. weft: `prepare`, as `weft data prepare` calls it: read, check, encode, write parts, join, digest.
2. datasets: `load_dataset("text")`, then `map(batched=True, num_proc=2)` to Arrow.
3. The tokenizer alone: `encode_batch_fast` of lines that are in memory, in two forked processes; nothing is written.

Without TEXT the manual that ships with Python is repeated. Beside the rates there is what they took of the processors.
"""

import argparse
import os
import resource
import shutil
import statistics
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path

from weft.config.run import Run
from weft.config.yaml import read_yaml
from weft.data.samples.datasets import read_sample
from weft.tasks.corpus.build import prepare
from weft.tokenization.trainable import load_tokenizer

WORKERS, CHUNK_SIZE = 2, 1024


def write_text(args: argparse.Namespace, path: Path) -> None:
    """Write so many megabytes of whole lines."""
    if args.text:
        with open(args.text, "rb") as file:
            raw = file.read(args.megabytes * 1_000_000)
    else:
        manual = "".join(row["text"] + "\n" for _, row in read_sample("pydoc", "train")).encode()
        raw = (manual * (1 + args.megabytes * 1_000_000 // len(manual)))[: args.megabytes * 1_000_000]
    path.write_bytes(raw.rpartition(b"\n")[0] + b"\n")


def recipe(path: Path, tokenizer: str) -> Run:
    return Run.parse(
        {
            "task": {"name": "lm"},
            "data": {"train": str(path)},
            "tokenizer": read_yaml(tokenizer, "--tokenizer"),
            "model": {"name": "rnn", "width": 16},
            "train": {"steps": 1},
        }
    )


Spent = tuple[float, float]  # seconds, and seconds of processors


def now() -> Spent:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return time.perf_counter(), sum(one.ru_utime + one.ru_stime for one in used)


def since(began: Spent) -> Spent:
    return now()[0] - began[0], now()[1] - began[1]


def by_weft(run: Run, out: Path) -> tuple[Spent, int]:
    """Return what was spent from the first look at the text on, and the tokens."""
    began: list[Spent] = []
    shutil.rmtree(out, ignore_errors=True)
    made = prepare(run, out, workers=WORKERS, report=lambda stage: began.append(now()))
    return since(began[0]), made.splits["train"].tokens


def by_datasets(path: Path, engine, folder: Path) -> Spent:
    import datasets

    datasets.disable_progress_bars()

    def encode(batch):
        return {"ids": [one.ids for one in engine.encode_batch_fast(batch["text"], add_special_tokens=False)]}

    began = now()
    rows = datasets.load_dataset("text", data_files=str(path), split="train", cache_dir=str(folder))
    rows.map(encode, batched=True, num_proc=WORKERS, remove_columns=["text"], load_from_cache_file=False)
    took = since(began)
    shutil.rmtree(folder, ignore_errors=True)
    return took


def by_tokenizer(lines: list[str], engine) -> Spent:
    def encode(which: int) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        for start in range(which * CHUNK_SIZE, len(lines), WORKERS * CHUNK_SIZE):
            engine.encode_batch_fast(lines[start : start + CHUNK_SIZE], add_special_tokens=False)

    processes = [get_context("fork").Process(target=encode, args=(which,)) for which in range(WORKERS)]
    began = now()
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return since(began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", nargs="?")
    parser.add_argument("--megabytes", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokenizer", default="{name: bpe, size: 8000}")
    args = parser.parse_args()
    times: dict[str, list[Spent]] = {"weft data prepare": [], "datasets.map": [], "the tokenizer alone": []}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        path = folder / "text.txt"
        write_text(args, path)
        run = recipe(path, args.tokenizer)
        tokens = by_weft(run, folder / "corpus")[1]
        engine = load_tokenizer(run.tokenizer, folder / "corpus").engine
        lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line]
        for _ in range(args.rounds):
            times["weft data prepare"].append(by_weft(run, folder / "corpus")[0])
            times["datasets.map"].append(by_datasets(path, engine, folder / "cache"))
            times["the tokenizer alone"].append(by_tokenizer(lines, engine))
        size = path.stat().st_size
    middle = {name: [statistics.median(one) for one in zip(*took, strict=True)] for name, took in times.items()}
    for name, (took, used) in middle.items():
        print(
            f"{name:22} {size / took / 1e6:8.2f} MB/s {tokens / took:12,.0f} tokens/s {used / size * 1e6:6.2f} CPU s/MB"
        )
    ours = middle.pop("weft data prepare")
    for name, (took, used) in middle.items():
        print(f"weft / {name}: {took / ours[0]:.2f} times as fast, {used / ours[1]:.2f} by processors")


if __name__ == "__main__":
    main()
