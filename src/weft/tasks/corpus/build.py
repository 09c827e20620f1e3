"""Preparation of a corpus (`weft.data.corpus.format`): tokenize text in parallel, in bounded memory, resumably.

Each split is split into parts (`weft.data.corpus.partition`), which worker processes encode
(`weft.tasks.corpus.workers`) and which are then merged (`weft.data.corpus.merge`). A run that is killed leaves whole
parts: the next run encodes the others. It must have the same recipe, files and tokenizer; an error names what changed.
"""

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from weft.config.run import Run
from weft.config.schema import read_section
from weft.config.sections import Source
from weft.data.corpus.format import (
    CORPUS_MANIFEST,
    FORMAT,
    CorpusManifest,
    EncodedExample,
    SplitManifest,
    find_corpus,
    read_manifest,
    verify_split,
    write_json_atomically,
)
from weft.data.corpus.merge import PartCounts, PartitionPlan, merge_parts, read_part_counts
from weft.data.corpus.partition import CorpusPart, SourceFile, part_size, partition_source, source_files
from weft.data.readers.examples import Skipped
from weft.data.samples.datasets import SPLITS
from weft.data.truncation import TruncationPolicy
from weft.errors import ConfigError, DataError, disk_remedy
from weft.ray_engine import is_ray
from weft.tasks.base import Task
from weft.tasks.corpus.reuse import (
    changed_keys,
    check_probes,
    load_saved_tokenizer,
    make_probe,
    prepared_folder,
    vocabulary,
)
from weft.tasks.corpus.workers import Job, encode_in_workers, encode_on_ray
from weft.tasks.factory import make_task, resolve_run
from weft.tasks.prepare import fit_tokenizer, has_split, read_split, summarize_skipped
from weft.tasks.pretrained_embeddings import check_vectors, learn_words
from weft.tokenization.trainable import Tokenizer

MUTABLE_KEYS = {
    "data.train",
    "data.valid",
    "data.test",
    "data.workers",
}  # keys that may change: files are compared by `_check_origins`
# Files that a run killed before its first split may leave.
OWN_FILES = {"lock", "tokenizer.json", "tokenizer.target.json", "tokenizer.spm", "tokenizer.target.spm"}
NUM_PROBES, PROBE_CANDIDATES, MAX_PROBE_CHARS = (
    4,
    256,
    1 << 14,
)  # examples kept, of the first so many, and their length limit
MOST_ON_RAY = 256  # workers, where the cluster has room for them
LOCK_TIMEOUT = 2.0  # seconds, for the workers of a killed run to exit


class SplitProgress(NamedTuple):
    """Progress of a split: bytes of its files, and tokens."""

    split: str
    done: int
    total: int
    tokens: int


Report = Callable[[SplitProgress], object]
EncodeParts = Callable[[Job, Sequence[int], int], AbstractContextManager[Iterator[tuple[int, PartCounts]]]]


def prepare(
    run: Run,
    out: Path,
    splits: Sequence[str] = SPLITS,
    workers: int | None = None,
    report: Report = lambda stage: None,
    size: int | None = None,
    tokenizer: Tokenizer | None = None,
    engine: str = "local",
) -> CorpusManifest:
    """Prepare the splits that the recipe has and that are missing; `size` is that of a part, in bytes.

    A `tokenizer` given, since it comes with pre-trained weights, is not trained. With `engine="ray"` parts are encoded
    on a Ray cluster, whose machines must all have the text.
    """
    on_ray = is_ray(engine)
    encode, workers = (
        encode_on_ray if on_ray else encode_in_workers,
        workers or (MOST_ON_RAY if on_ray else num_cpus()),
    )
    make_task(run)  # an invalid recipe must leave no folder behind
    if run.task_names:
        raise ConfigError("tasks: have data of their own; prepare the text of one task, by a recipe of that task alone")
    if run.data.validation_fraction is not None:
        raise ConfigError(
            "data.validation_fraction: a prepared corpus has splits of its own; leave it out, and name the validation "
            "data: data.valid"
        )
    wanted = [split for split in splits if has_split(run.data, split)]
    for split in wanted:
        if folder := find_corpus(_source(run, split)):
            raise ConfigError(f"data.{split}: {folder} is prepared already; give the text itself")
    with _locked(out):
        corpus = _open_corpus(run, out, tokenizer)
        for split in wanted:
            _build_split(corpus, split, workers, report, size, encode)
    return corpus.manifest


@dataclass
class _Corpus:
    """A corpus being built."""

    run: Run  # with the resolved task
    out: Path
    tokenizer: Tokenizer
    manifest: CorpusManifest


def num_cpus() -> int:
    """Return the number of processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _source(run: Run, split: str) -> Source | None:
    """Return the files of a split; a sample has none."""
    source: Source | None = None if run.data.sample else getattr(run.data, split)
    return source


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Lock the folder; raise a DataError if it cannot be written."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with open(out / "lock", "w") as lock:
            deadline = time.monotonic() + LOCK_TIMEOUT
            while not _try_lock(lock.fileno()):
                if time.monotonic() > deadline:
                    raise DataError(f"{out}: another process is preparing it; wait for it, or choose another --out")
                time.sleep(0.05)
            yield
    except OSError as error:
        raise DataError(
            f"{out}: cannot be written: {error.strerror or error}; {disk_remedy(error)} and run it again, what is done "
            "is kept; or choose another --out"
        ) from None


def _try_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _open_corpus(run: Run, out: Path, tokenizer: Tokenizer | None) -> _Corpus:
    """Resume the corpus in the folder, or train the tokenizer and write a new manifest."""
    if (out / CORPUS_MANIFEST).exists():
        return _resume(run, out)
    if unknown_files := {path.name for path in out.iterdir()} - OWN_FILES:
        raise ConfigError(f"--out: {out} holds other things, such as {min(unknown_files)}; choose another folder")
    check_vectors(run)
    task = make_task(run)
    tokenizer = tokenizer or fit_tokenizer(run.tokenizer, run.data, task)
    learn_words(run, tokenizer)
    resolved = resolve_run(run, task)
    manifest = CorpusManifest(
        format=FORMAT,
        task=run.task.model_dump(mode="json"),
        data=run.data.model_dump(mode="json"),
        tokenizer=run.tokenizer.model_dump(mode="json"),
        resolved_task=resolved.task.model_dump(mode="json"),
        vocabulary=vocabulary(tokenizer),
        probes=tuple(_probes(resolved, task, tokenizer)),
        splits={},
    )
    tokenizer.save(out)
    write_json_atomically(out / CORPUS_MANIFEST, manifest)
    saved = load_saved_tokenizer(run.tokenizer, out, manifest)  # as any later run will load it
    return _Corpus(resolved, out, saved, manifest)


def _probes(run: Run, task: Task, tokenizer: Tokenizer) -> list[EncodedExample]:
    """Return a few short examples of the training data with their items."""
    if folder := prepared_folder(run.data, "train"):
        return list(read_manifest(folder).probes)
    candidates = islice(read_split(run.data, "train", task, Skipped()), PROBE_CANDIDATES)
    texts = (example.model_dump_json() for _, example in candidates)
    short_texts = islice((text for text in texts if len(text) <= MAX_PROBE_CHARS), NUM_PROBES)
    return [make_probe(text, run.data, task, tokenizer) for text in short_texts]


def _resume(run: Run, out: Path) -> _Corpus:
    manifest = read_manifest(out)
    _check_recipe(manifest, run, out)
    tokenizer = load_saved_tokenizer(run.tokenizer, out, manifest)
    task = read_section(type(run.task), manifest.resolved_task, f"{out}: task")
    resolved = run.model_copy(update={"task": task})
    check_probes(out, manifest, run.data, make_task(resolved), tokenizer)
    return _Corpus(resolved, out, tokenizer, manifest)


def _check_recipe(manifest: CorpusManifest, run: Run, out: Path) -> None:
    sections = {"task": (run.task, manifest.task), "tokenizer": (run.tokenizer, manifest.tokenizer)}
    for name, (section, saved) in {**sections, "data": (run.data, manifest.data)}.items():
        for key, was, now in changed_keys(section, saved, f"{out}: {name}"):
            if f"{name}.{key}" not in MUTABLE_KEYS:
                raise ConfigError(
                    f"{name}.{key}: was {was!r} when {out} was begun, and is {now!r} now; set it back, or choose "
                    "another --out"
                )


def _build_split(
    corpus: _Corpus, split: str, workers: int, report: Report, size: int | None, encode: EncodeParts
) -> None:
    """Encode the missing parts of a split and add it to the manifest; verify a split that is complete."""
    run, out, done = corpus.run, corpus.out, corpus.manifest.splits
    parts, current = out / "parts" / split, source_files(_source(run, split), run.data)
    if split in done:
        _check_origins(done[split].origins, current, out)
        verify_split(out, split, done[split], content=True)
    else:
        plan = _load_plan(run, parts, out, current, size or part_size(sum(origin.size for origin in current), workers))
        job = Job(run, split, parts, plan, corpus.tokenizer)
        parts_made = _encode_parts(job, workers, report, encode)
        _check_origins(plan.origins, source_files(_source(run, split), run.data), out)
        merged = _merge_parts(job, parts_made, out)
        corpus.manifest = corpus.manifest.model_copy(update={"splits": {**done, split: merged}})
        write_json_atomically(out / CORPUS_MANIFEST, corpus.manifest)
    shutil.rmtree(parts, ignore_errors=True)
    if parts.parent.is_dir() and not any(parts.parent.iterdir()):
        parts.parent.rmdir()


def _load_plan(run: Run, parts: Path, out: Path, current: tuple[SourceFile, ...], size: int) -> PartitionPlan:
    path = parts / "plan.json"
    if path.exists():
        try:
            plan = PartitionPlan.model_validate_json(path.read_text(encoding="utf-8"))
        except ValidationError:
            raise DataError(f"{path}: is damaged; delete {parts} and run it again") from None
        _check_origins(plan.origins, current, out)
        return plan
    parts.mkdir(parents=True, exist_ok=True)
    plan = PartitionPlan(origins=current, parts=partition_source(_source(run, parts.name), run.data, size))
    write_json_atomically(path, plan)
    return plan


def _check_origins(saved: Sequence[SourceFile], current: Sequence[SourceFile], out: Path) -> None:
    for before, after in zip_longest(saved, current):
        if before != after:
            raise DataError(
                f"{_describe_change(before, after)} since {out} was begun; put it back as it was, choose another "
                f"--out, or delete {out}"
            )


def _describe_change(before: SourceFile | None, after: SourceFile | None) -> str:
    if after and (before is None or before.path != after.path):
        return f"{after.path}: is new among the files"
    assert before is not None
    if after is None:
        return f"{before.path}: is no more among the files"
    sizes = "" if before.size == after.size else f", from {before.size:,} to {after.size:,} bytes,"
    return f"{before.path}: has changed{sizes}"


def _encode_parts(job: Job, workers: int, report: Report, encode: EncodeParts) -> list[PartCounts]:
    parts = job.plan.parts
    done = {number: result for number in range(len(parts)) if (result := read_part_counts(job.stem(number)))}
    missing, total = [number for number in range(len(parts)) if number not in done], sum(part.size for part in parts)

    def report_progress() -> None:
        done_bytes = sum(parts[number].size for number in done)
        report(SplitProgress(job.split, done_bytes, total, sum(result.tokens for result in done.values())))

    with encode(job, missing, workers) as results:
        report_progress()
        for number, result in results:
            done[number] = result
            report_progress()
    return [done[number] for number in range(len(parts))]


def _merge_parts(job: Job, parts: Sequence[PartCounts], out: Path) -> SplitManifest:
    _check_rows(job.plan.parts, parts)
    skipped = Skipped(sum(part.skipped for part in parts), [reason for part in parts for reason in part.reasons][:5])
    limit, folder = TruncationPolicy(job.run.data.max_length, job.run.data.truncation), job.folder / "joined"
    for part in parts:
        for kind, times, place in part.oddities:
            skipped.oddities.add(kind, place, times)
        limit.add(
            TruncationPolicy(limit.max_length, limit.policy, part.cut, part.dropped, part.windowed, part.longest_seen)
        )
        limit.notes.update({(verb, noun, how): times for verb, noun, how, times in part.notes})
    notice = summarize_skipped(job.split, sum(part.items for part in parts), skipped, limit)
    digest, files = merge_parts([job.stem(number) for number in range(len(parts))], parts, folder)
    shutil.rmtree(out / job.split, ignore_errors=True)
    os.replace(folder, out / job.split)
    return SplitManifest(
        documents=sum(part.documents for part in parts),
        items=sum(part.items for part in parts),
        tokens=sum(part.tokens for part in parts),
        bytes=sum(part.bytes for part in parts),
        digest=digest,
        files=files,
        origins=job.plan.origins,
        notice=notice,
        longest=limit.longest_seen,
    )


def _check_rows(parts: Sequence[CorpusPart], results: Sequence[PartCounts]) -> None:
    """Raise if no piece of a file has a row; a single piece may have none."""
    rows: dict[str, int] = {}
    for part, result in zip(parts, results, strict=True):
        for piece, count in zip(part.pieces, result.rows, strict=False):
            rows[piece.path] = rows.get(piece.path, 0) + count
    for path, count in rows.items():
        if not count:
            raise DataError(f"{path}: there are no good rows in it; is it the right file?")
