"""`weft predict` over a file of 10,000 dates: sentences/s greedy and with beam 5, and memory that stays flat.

python bench/predict.py [RUN]      # without a run, `dates` is trained for a minute first
"""

import os
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

from weft.data.samples.datasets import read_sample

COUNT = 10_000


def predict(run: str, file: Path, *options: str) -> tuple[float, float]:
    """Return the seconds that the command took and the megabytes that it held at its peak."""
    before = time.perf_counter()
    command = [sys.executable, "-m", "weft", "predict", run, "--file", str(file)]
    for option in options:
        command += ["--set", option]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0
    return time.perf_counter() - before, usage.ru_maxrss / 1024


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = sys.argv[1] if len(sys.argv) > 1 else f"{folder}/run"
        if len(sys.argv) == 1:
            changes = ["train.steps=null", "train.time=60s"]
            subprocess.run([sys.executable, "-m", "weft", "train", "dates", *changes, "--out", run], check=True)
        texts = [row["text"] for _, row in islice(read_sample("dates", "train"), COUNT)]
        files = {}
        for count in (1, 1000, COUNT):
            files[count] = Path(folder) / f"{count}.txt"
            files[count].write_text("\n".join(texts[:count]) + "\n")
        for name, options in (("greedy", []), ("beam 5", ["beam=5"])):
            startup, _ = predict(run, files[1], *options)
            _, small = predict(run, files[1000], *options)
            seconds, large = predict(run, files[COUNT], *options)
            speed = COUNT / (seconds - startup)
            print(f"{name}: {speed:,.0f} sentences/s after {startup:.1f} s of start; ", end="")
            print(f"peak memory {small:.0f} MB for 1,000 sentences, {large:.0f} MB for {COUNT:,}")


if __name__ == "__main__":
    main()
