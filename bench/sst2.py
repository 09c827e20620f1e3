"""SST-2 fine-tuned from the files to the last evaluation: weft beside the Trainer of transformers; seconds, accuracy.

    pip install --no-deps --target .cache/trainer accelerate psutil      # what the Trainer needs; no dependency
    PYTHONPATH=.cache/trainer python bench/sst2.py DATA                  # one GPU, bf16, BERT-base, 3 epochs
    PYTHONPATH=.cache/trainer python bench/sst2.py DATA --weights DIR    # a run, or a Hugging Face directory
    PYTHONPATH=.cache/trainer python bench/sst2.py DATA --device cpu --preset bert-tiny --limit 500 --epochs 1

DATA has train.tsv and dev.tsv as GLUE has them. Both sides begin with the same Hugging Face directory. Without
--weights it has random weights (also the scores of the labels, the same for both), and the word pieces of the training
sentences, about 20,000: what is learnt then is no measure of BERT. Making it is not counted, nor are imports; counted
is all else: reading, cutting into tokens, loading weights, compiling (nothing is compiled beforehand; --warm keeps
what an earlier run compiled), training, and evaluating after each epoch. weft writes its checkpoints, which counts;
the Trainer is asked to write none.

Both have AdamW (fused), the same rate, 10 % warm-up and linear fall, weight decay 0.01, clipping at 1, dropout 0.1 but
none on attention, bf16 autocast on a GPU. The Trainer takes 32 sentences of like length at a time, padded to their
longest; weft as many tokens as give 32 sentences in the mean. Each side has a process of its own.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, fields
from importlib.metadata import version
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import Dataset

import weft
from weft.config.recipes import preset_names
from weft.config.run import Run
from weft.conversion.convert import convert
from weft.data.batching.loader import Loader
from weft.data.batching.static_shape import StaticShape
from weft.formats.huggingface.folder import is_hf, save_hf
from weft.formats.pretrained import read_run
from weft.tasks.batch import Batch
from weft.tasks.capabilities import StaticBatches
from weft.tasks.factory import build, make_task, resolve_run
from weft.tasks.prepare import fit_tokenizer, pack_split
from weft.training.reporting import CheckpointSaved, Eval, Notice, Record, Step
from weft.training.run import make_tokenizer

BATCH, WARMUP, DECAY, LONGEST = 32, 0.1, 0.01, 128
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")  # where what was compiled is kept
T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """What both sides are given."""

    data: Path
    weights: Path
    out: Path
    epochs: int
    device: str
    rate: float
    workers: int
    compiled: bool  # the Trainer
    seed: int
    examples: int
    tokens: int = 0  # a batch of weft
    batches: int = 0  # an epoch of weft

    @property
    def half(self) -> bool:
        return self.device == "cuda"


@dataclass(frozen=True)
class Result:
    """The seconds of all and of each part, the updates, and the accuracy after each epoch."""

    seconds: float
    parts: dict[str, float]
    updates: int
    accuracy: list[float]


# --- what both begin with ---------------------------------------------------------------------------------------------


def take(data: Path, folder: Path, limit: int | None) -> int:
    """Copy the first rows of the files, or all; say how many there are to learn from."""
    counts = {}
    folder.mkdir()
    for name in ("train.tsv", "dev.tsv"):
        with (data / name).open(encoding="utf-8") as lines:
            kept = list(islice(lines, None if limit is None else limit + 1))  # and the header
        (folder / name).write_text("".join(kept), encoding="utf-8")
        counts[name] = len(kept) - 1
    return counts["train.tsv"]


def recipe(data: Path, start: list[str]) -> Run:
    """Read weft's recipe, with other files."""
    files = [f"data.train={data / 'train.tsv'}", f"data.valid={data / 'dev.tsv'}"]
    return read_run("sst2-bert", [*files, f"data.max_length={LONGEST}", *start])


def make_weights(data: Path, preset: str, folder: Path, seed: int) -> None:
    """Write a Hugging Face directory with random weights and the words of the data."""
    run = recipe(data, [f"model={{preset: {preset}}}", "tokenizer={name: wordpiece, size: 30522, lowercase: true}"])
    run = resolve_run(run, make_task(run))
    tokenizer = fit_tokenizer(run.tokenizer, run.data, make_task(run))
    torch.manual_seed(seed)
    save_hf(folder, run, tokenizer, build(run, tokenizer)[1])


def find_weights(given: argparse.Namespace, data: Path, folder: Path) -> Path:
    """Return the Hugging Face directory that both begin with."""
    if given.weights is None:
        make_weights(data, given.preset, folder, given.seed)
    elif is_hf(given.weights):
        return Path(given.weights).resolve()
    else:
        convert(given.weights, folder)
    return folder


def cut(data: Path, weights: Path, framed: bool, seed: int) -> tuple[int, int]:
    """Choose the tokens of weft's batches so that they have 32 sentences in the mean; return them, and the batches."""
    run = recipe(data, [f"model.weights={weights}"])
    run = resolve_run(run, make_task(run))
    task = make_task(run)
    task.tokenizer = make_tokenizer(run, task)
    packed, _ = pack_split(run.data, "train", task, task.tokenizer)
    assert isinstance(task, StaticBatches)
    lengths = task.sequence_lengths(packed)
    assert lengths is not None

    def batches(tokens: int) -> int:
        loader: Loader[Batch] = Loader(packed, task.collate, tokens, seed)
        if framed:  # as `weft.training.compile` does
            loader.lengths, loader.static_shape = lengths, StaticShape.of(lengths, tokens)
        return len(loader.epoch(0))

    some = [round(float(lengths.mean()) * rows) for rows in range(BATCH // 2, 3 * BATCH // 2)]
    best = min(some, key=lambda tokens: abs(batches(tokens) - len(packed) / BATCH))
    return best, batches(best)


# --- transformers -----------------------------------------------------------------------------------------------------


class Rows(Dataset[dict[str, Any]]):
    """Sentences as ids, with their labels."""

    def __init__(self, path: Path, tokenizer: Any) -> None:
        with path.open(encoding="utf-8") as lines:
            labels, texts = zip(*(line.rstrip("\n").split("\t") for line in islice(lines, 1, None)), strict=True)
        self.labels = [int(label) for label in labels]
        cut = tokenizer(
            list(texts),
            truncation=True,
            max_length=LONGEST + 2,  # the marks before and after it
            return_token_type_ids=False,
            return_attention_mask=False,
        )
        self.ids: list[list[int]] = cut["input_ids"]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"input_ids": self.ids[row], "labels": self.labels[row]}


def arguments(job: Job) -> Any:
    """Say what the Trainer is to do."""
    from transformers import TrainingArguments

    known = {field.name for field in fields(TrainingArguments)}
    alike = {"train_sampling_strategy": "group_by_length"} if "train_sampling_strategy" in known else {}
    given: dict[str, Any] = alike or {"group_by_length": True}
    updates = job.epochs * -(-job.examples // BATCH)
    return TrainingArguments(
        output_dir=str(job.out),
        num_train_epochs=job.epochs,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=4 * BATCH,
        learning_rate=job.rate,
        lr_scheduler_type="linear",
        warmup_steps=round(WARMUP * updates),
        weight_decay=DECAY,
        optim="adamw_torch_fused",
        bf16=job.half,
        use_cpu=not job.half,
        torch_compile=job.compiled,
        dataloader_num_workers=job.workers,
        dataloader_persistent_workers=job.workers > 0,
        dataloader_pin_memory=job.half,
        eval_strategy="epoch",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=job.seed,
        **given,
    )


def accuracy(found: Any) -> dict[str, float]:
    return {"accuracy": float((np.argmax(found.predictions, -1) == found.label_ids).mean())}


def train_theirs(job: Job) -> Result:
    """Fine-tune with the Trainer."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding, Trainer

    asked = arguments(job)
    began = time.perf_counter()
    tokenizer = AutoTokenizer.from_pretrained(job.weights)
    train, dev = (Rows(job.data / name, tokenizer) for name in ("train.tsv", "dev.tsv"))
    read = time.perf_counter()
    model = AutoModelForSequenceClassification.from_pretrained(
        job.weights, num_labels=2, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.0, dtype=torch.float32
    )
    trainer = Trainer(
        model=model,
        args=asked,
        data_collator=DataCollatorWithPadding(tokenizer),
        train_dataset=train,
        eval_dataset=dev,
        compute_metrics=accuracy,
    )
    ready = time.perf_counter()
    trainer.train()
    ended = time.perf_counter()
    judged = [row for row in trainer.state.log_history if "eval_accuracy" in row]
    evaluating = sum(row["eval_runtime"] for row in judged)
    parts = {"reading": read - began, "the model": ready - read}
    parts |= {"training": ended - ready - evaluating, "evaluating": evaluating}
    return Result(ended - began, parts, trainer.state.global_step, [row["eval_accuracy"] for row in judged])


# --- weft -------------------------------------------------------------------------------------------------------------


class Clock:
    """A reporter that keeps what the trainer says, and when."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.heard: list[tuple[Record, float]] = []

    def __call__(self, record: Record) -> None:
        self.heard.append((record, time.perf_counter() - self.began))
        if isinstance(record, Notice):
            print(f"weft: {record.text}", flush=True)

    def close(self) -> None:
        pass

    def parts(self, seconds: float) -> dict[str, float]:
        """Share out the seconds of the whole."""
        ready = next(at for record, at in self.heard if isinstance(record, CheckpointSaved))  # of step 0
        compiled = [at for record, at in self.heard if isinstance(record, Notice) and "train.compile" in record.text]
        training = max(record.elapsed for record, _ in self.heard if isinstance(record, Step))
        after = zip(self.heard, self.heard[1:], strict=False)
        saving = sum(
            at - before for (_, before), (record, at) in after if isinstance(record, CheckpointSaved) and record.step
        )
        parts = {"reading and the model": ready, "compiling": max([ready, *compiled]) - ready}
        parts |= {"training": training, "saving": saving}
        return parts | {"evaluating and the rest": seconds - sum(parts.values())}


def train_weft(job: Job) -> Result:
    """Fine-tune with weft."""
    clock = Clock()
    train: dict[str, object] = {
        "batch_tokens": job.tokens,
        "steps": job.epochs * job.batches,
        "eval_every": job.batches,
    }
    train |= {"device": job.device, "precision": "bf16" if job.half else "fp32", "seed": job.seed}
    train |= {"lr": job.rate, "warmup": WARMUP, "weight_decay": DECAY, "schedule": "warmup-linear"}
    files = [f"data.train={job.data / 'train.tsv'}", f"data.valid={job.data / 'dev.tsv'}", f"data.max_length={LONGEST}"]
    asked = [*files, f"data.workers={job.workers}", f"model.weights={job.weights}"]
    asked += [f"train.{name}={value}" for name, value in train.items()]
    weft.train("sst2-bert", asked, out=job.out, report=clock)
    seconds = time.perf_counter() - clock.began
    found = [record.metrics["accuracy"] for record, _ in clock.heard if isinstance(record, Eval)]
    return Result(seconds, clock.parts(seconds), job.epochs * job.batches, found)


# --- the comparison ---------------------------------------------------------------------------------------------------

SIDES: dict[str, Callable[[Job], Result]] = {"transformers": train_theirs, "weft": train_weft}


@contextmanager
def cold(warm: bool) -> Iterator[None]:
    """Have what is compiled inside kept in a folder of its own."""
    before = {name: os.environ.get(name) for name in CACHES}
    with tempfile.TemporaryDirectory() as folder:
        if not warm:
            os.environ |= {name: f"{folder}/{name}" for name in CACHES}
        yield
    for name, value in before.items():
        os.environ.pop(name, None)
        os.environ |= {} if value is None else {name: value}


def apart(work: Callable[[Job], T], job: Job) -> T:
    """Do it in a process of its own."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(work, job).result()


def show(name: str, result: Result, job: Job) -> None:
    seen = job.epochs * job.examples
    print(f"{name:12} {result.seconds:8.1f} s {seen / result.seconds:10,.0f} sentences/s", end="")
    print(f"  accuracy {result.accuracy[-1]:.4f} (best {max(result.accuracy):.4f})", end="")
    print(f"  {result.updates:,} updates of {seen / result.updates:.1f} sentences")
    print(" " * 12, ", ".join(f"{part} {seconds:.1f} s" for part, seconds in result.parts.items()), flush=True)


def compare(given: argparse.Namespace, folder: Path) -> None:
    """Train with the sides in turn, and print how long each took."""
    framed = given.device == "cuda"
    examples = take(given.data, folder / "data", given.limit)
    weights = find_weights(given, folder / "data", folder / "weights")
    tokens, batches = cut(folder / "data", weights, framed, given.seed)
    print(f"{examples:,} sentences, {given.epochs} epochs; {tokens} tokens a batch of weft", flush=True)
    times: dict[str, list[float]] = {name: [] for name in given.only or SIDES}
    for number in range(given.rounds):
        for name, seconds in times.items():
            workers = given.workers if framed else 0
            out = folder / f"{name}-{number}"
            job = Job(folder / "data", weights, out, given.epochs, given.device, given.lr, workers, given.compile,
                      given.seed, examples, tokens, batches)  # fmt: skip
            with cold(given.warm):
                result = apart(SIDES[name], job)
            seconds.append(result.seconds)
            show(name, result, job)
    if len(times) == len(SIDES):
        print(f"weft is {statistics.median(times['transformers']) / statistics.median(times['weft']):.2f}x as fast")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="a folder with train.tsv and dev.tsv")
    parser.add_argument("--weights", type=Path, help="a run's directory, or a Hugging Face directory")
    parser.add_argument("--preset", choices=preset_names(), default="bert-base", help="without --weights: the sizes")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--limit", type=int, help="read so many rows of each file")
    parser.add_argument("--lr", type=float, default=3e-5)
    parser.add_argument("--workers", type=int, default=4, help="processes of each side's loader, on a GPU")
    parser.add_argument("--compile", action="store_true", help="have the Trainer compile, too")
    parser.add_argument("--warm", action="store_true", help="keep what is compiled from run to run")
    parser.add_argument("--only", nargs="*", choices=list(SIDES), help="one side alone")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    packages = [f"{name} {version(name)}" for name in ("torch", "transformers", "accelerate", "tokenizers")]
    print(", ".join([*packages, f"weft {weft.__version__}"]), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        compare(given, Path(folder))


if __name__ == "__main__":
    main()
