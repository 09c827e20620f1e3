"""Change valid inputs of five doors (recipe, data file, checkpoint, Hugging Face folder, options) and run weft on them.

    python bench/fuzz.py                                   20,000 inputs
    python bench/fuzz.py --inputs 2000 --doors data        400 for each door that is named … of one door 2,000
    python bench/fuzz.py --repeat data:17                  one input again, with what it printed
    python bench/fuzz.py --repeat data:17 --keep 0         only the first of its mutations

A command must end with 0 or 2. An exception that is no `WeftError`, a process that dies, 20 seconds of CPU, two
gigabytes, an error of more than 5,000 characters, or NaN in JSON is a failure. A failure is minimised, by leaving out
mutations, and printed with the command that repeats it; alike failures are printed once. The exit code is then 1.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import combinations
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "COLUMNS": "200"}

from fuzz_doors import DOORS, Input, Seeds, make_input, make_seeds, mutations
from fuzz_runner import Failure, Limits, run_all, write_input

Key = tuple[str, int, tuple[int, ...] | None]  # door, number, and the mutations that are kept; None: all


def fuzz(
    seeds: Seeds, keys: Sequence[Key], seed: int, workers: int, limits: Limits
) -> Iterator[tuple[Key, Failure | None]]:
    """Yield each input with how it fails, or None."""
    return run_all(keys, lambda key: named_input(seeds, key, seed), seeds.folder / "inputs", limits, workers)


def named_input(seeds: Seeds, key: Key, seed: int) -> Input:
    """Return the input of a key."""
    door, number, keep = key
    return make_input(seeds, door, number, seed, keep)


def minimise(seeds: Seeds, key: Key, failure: Failure, seed: int, limits: Limits) -> Key:
    """Return the input with the fewest mutations that fails alike."""
    door, number, _ = key
    count = mutations(door, number, seed, seeds)
    smaller: list[Key] = [(door, number, kept) for size in range(count) for kept in combinations(range(count), size)]
    for other, result in fuzz(seeds, smaller, seed, 1, limits):
        if result is not None and result.kind == failure.kind:
            return other
    return key


def repeat_command(key: Key, seed: int) -> str:
    """Return the command that repeats an input."""
    kept = "" if key[2] is None else " --keep " + " ".join(map(str, key[2]))
    return f"python bench/fuzz.py --seed {seed} --repeat {key[0]}:{key[1]}{kept}"


def repeat(seeds: Seeds, key: Key, seed: int, limits: Limits, folder: Path) -> None:
    """Run one input, and print its command, what it printed and how it failed; its files are kept."""
    made = named_input(seeds, key, seed)
    for _, failure in fuzz(seeds, [key], seed, 1, limits):
        with suppress(OSError):
            print((seeds.folder / "inputs" / "worker-0" / ".log").read_bytes().decode("utf-8", "replace")[-3000:])
        print("passes" if failure is None else f"{failure.kind} at {failure.place}\n{failure.details}")
    write_input(made, folder)
    print(f"cd {folder} && {made.command()[:2000]}")


def print_failure(key: Key, failure: Failure, count: int, seed: int) -> None:
    """Print a failure with the command that repeats it."""
    print(f"\n{failure.kind} at {failure.place}, {count} times; {repeat_command(key, seed)}")
    print("    " + failure.details.strip()[-1200:].replace("\n", "\n    "))


def main() -> None:
    """Run the inputs that are asked for; print a line for each kind of failure, and a summary as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=20_000, help="in all, shared among the doors")
    parser.add_argument("--doors", nargs="*", default=DOORS, choices=DOORS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--few", action="store_true", help="change fewer models, which are trained in seconds")
    parser.add_argument("--repeat", metavar="DOOR:NUMBER", help="run one input alone")
    parser.add_argument("--keep", nargs="*", type=int, help="with --repeat: the mutations to keep")
    chosen = parser.parse_args()
    began, limits = time.monotonic(), Limits()
    with tempfile.TemporaryDirectory() as place:
        seeds = make_seeds(Path(place), chosen.few)
        if chosen.repeat:
            door, _, number = chosen.repeat.partition(":")
            kept = None if chosen.keep is None else tuple(chosen.keep)
            repeat(seeds, (door, int(number), kept), chosen.seed, limits, Path(tempfile.mkdtemp(prefix="weft-fuzz-")))
            return
        share = chosen.inputs // len(chosen.doors)
        keys = [(door, number, None) for number in range(share) for door in chosen.doors]
        failures: dict[tuple[str, str, str], tuple[Key, Failure]] = {}
        counts: Counter[tuple[str, str, str]] = Counter()
        for done, (key, failure) in enumerate(fuzz(seeds, keys, chosen.seed, chosen.workers, limits), 1):
            if failure is not None:
                sort = (key[0], failure.kind, failure.place)
                failures.setdefault(sort, (key, failure))
                counts[sort] += 1
            if done % 1000 == 0:
                print(f"{done:,} of {len(keys):,}, {sum(counts.values())} failed", file=sys.stderr)
        for sort, (key, failure) in failures.items():
            print_failure(minimise(seeds, key, failure, chosen.seed, limits), failure, counts[sort], chosen.seed)
    doors = dict.fromkeys(chosen.doors, share)
    seconds = round(time.monotonic() - began)
    print(json.dumps({"inputs": len(keys), **doors, "failed": sum(counts.values()), "seconds": seconds}))
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
