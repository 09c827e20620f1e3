"""Text to a prepared corpus (`weft.data.corpus.format`): in parallel, in bounded memory, from where it was left off.

Each split is cut into parts (`weft.data.corpus.partition`), which worker processes encode (`weft.tasks.corpus.workers`)
and which are then joined (`weft.data.corpus.merge`). What a kill leaves is whole parts: the next run makes the others.
It must have the same recipe, the same files and the same tokenizer; what has changed is named.
"""

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from weft.config.schema import Run, Source, read_section
from weft.data.corpus.format import (
    FORMAT,
    MANIFEST,
    Manifest,
    Probe,
    Split,
    find_corpus,
    read_manifest,
    verify,
    write_json,
)
from weft.data.corpus.merge import Made, Plan, join_parts, read_made
from weft.data.corpus.partition import Origin, Part, cut_source, origins, part_size
from weft.data.readers.examples import Skipped
from weft.data.truncation import TruncationPolicy
from weft.errors import ConfigError, DataError
from weft.tasks.corpus.reuse import changes, check_probes, load_saved, prepared_folder, probed, vocabulary
from weft.tasks.corpus.workers import Job, working
from weft.tasks.factory import make_task
from weft.tasks.prepare import fit_tokenizer, has_split, read_split, settled, told
from weft.tasks.pretrained_embeddings import check_vectors, learn_words
from weft.tokenization.trainable import Tokenizer

SPLITS = ("train", "valid", "test")
FREE = {"data.train", "data.valid", "data.test", "data.workers"}  # what may change: of the files more is known
# What a run that was killed may leave before it has begun.
OWN = {"lock", "tokenizer.json", "tokenizer.target.json", "tokenizer.spm", "tokenizer.target.spm"}
PROBES, AMONG, SHORT = 4, 256, 1 << 14  # examples kept, of how many, of so many characters at most
PATIENCE = 2.0  # seconds to wait for the workers of a run that was killed


class Stage(NamedTuple):
    """How far a split is: bytes of its files, and tokens."""

    split: str
    done: int
    total: int
    tokens: int


Report = Callable[[Stage], object]


def prepare(
    run: Run,
    out: Path,
    splits: Sequence[str] = SPLITS,
    workers: int | None = None,
    report: Report = lambda stage: None,
    size: int | None = None,
    tokenizer: Tokenizer | None = None,
) -> Manifest:
    """Make those of the splits that the recipe has and that are not there yet; `size` is that of a part, in bytes.

    A `tokenizer` that is given, since it comes with pre-trained weights, is not trained.
    """
    make_task(run)  # a recipe that is wrong leaves no folder behind
    wanted = [split for split in splits if has_split(run.data, split)]
    for split in wanted:
        if found := find_corpus(_source(run, split)):
            raise ConfigError(f"data.{split}: {found} is prepared already; give the text itself")
    with _locked(out):
        making = _begin(run, out, tokenizer)
        for split in wanted:
            _complete(making, split, workers or _cores(), report, size)
    return making.manifest


@dataclass
class _Making:
    """A folder that is being filled."""

    run: Run  # its task settled
    out: Path
    tokenizer: Tokenizer
    manifest: Manifest


def _cores() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _source(run: Run, split: str) -> Source | None:
    """What a split is read from; a sample has no files."""
    source: Source | None = None if run.data.sample else getattr(run.data, split)
    return source


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Hold the folder, and tell of a disk that refuses."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with open(out / "lock", "w") as lock:
            until = time.monotonic() + PATIENCE
            while not _claimed(lock.fileno()):
                if time.monotonic() > until:
                    raise DataError(f"{out}: another process is preparing it; wait for it, or choose another --out")
                time.sleep(0.05)
            yield
    except OSError as error:
        raise DataError(
            f"{out}: cannot be written: {error.strerror or error}; free some room and run it again, what is done is "
            "kept; or choose another --out"
        ) from None


def _claimed(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _begin(run: Run, out: Path, tokenizer: Tokenizer | None) -> _Making:
    """Go on with what is there, or train the tokenizer and begin."""
    if (out / MANIFEST).exists():
        return _go_on(run, out)
    if strange := {path.name for path in out.iterdir()} - OWN:
        raise ConfigError(f"--out: {out} holds other things, such as {min(strange)}; choose another folder")
    check_vectors(run)
    task = make_task(run)
    tokenizer = tokenizer or fit_tokenizer(run.tokenizer, run.data, task)
    learn_words(run, tokenizer)
    known = run.model_copy(update={"task": settled(run.data, task)})
    manifest = Manifest(
        format=FORMAT,
        task=run.task.model_dump(mode="json"),
        data=run.data.model_dump(mode="json"),
        tokenizer=run.tokenizer.model_dump(mode="json"),
        settled=known.task.model_dump(mode="json"),
        vocabulary=vocabulary(tokenizer),
        probes=tuple(_probes(known, tokenizer)),
        splits={},
    )
    tokenizer.save(out)
    write_json(out / MANIFEST, manifest)
    return _Making(known, out, load_saved(run.tokenizer, out, manifest), manifest)  # as any later run will have it


def _probes(run: Run, tokenizer: Tokenizer) -> list[Probe]:
    """Keep a few short examples of the training data, and what is made of them."""
    if folder := prepared_folder(run.data, "train"):
        return list(read_manifest(folder).probes)
    task = make_task(run)
    first = (example.model_dump_json() for _, example in islice(read_split(run.data, "train", task, Skipped()), AMONG))
    short = islice((text for text in first if len(text) <= SHORT), PROBES)
    return [probed(text, run.data, task, tokenizer) for text in short]


def _go_on(run: Run, out: Path) -> _Making:
    found = read_manifest(out)
    _check_recipe(found, run, out)
    tokenizer = load_saved(run.tokenizer, out, found)
    task = read_section(type(run.task), found.settled, f"{out}: task")
    known = run.model_copy(update={"task": task})
    check_probes(out, found, run.data, make_task(known), tokenizer)
    return _Making(known, out, tokenizer, found)


def _check_recipe(found: Manifest, run: Run, out: Path) -> None:
    sections = {"task": (run.task, found.task), "tokenizer": (run.tokenizer, found.tokenizer)}
    for name, (section, then) in {**sections, "data": (run.data, found.data)}.items():
        for key, was, now in changes(section, then, f"{out}: {name}"):
            if f"{name}.{key}" not in FREE:
                raise ConfigError(
                    f"{name}.{key}: was {was!r} when {out} was begun, and is {now!r} now; set it back, or choose "
                    "another --out"
                )


def _complete(making: _Making, split: str, workers: int, report: Report, size: int | None) -> None:
    """Make what is missing of a split, and put it into the manifest; of a whole one see that it is so."""
    run, out, done = making.run, making.out, making.manifest.splits
    parts, now = out / "parts" / split, origins(_source(run, split), run.data)
    if split in done:
        _check_origins(done[split].origins, now, out)
        verify(out, split, done[split], content=True)
    else:
        plan = _plan(run, parts, out, now, size or part_size(sum(one.size for one in now), workers))
        job = Job(run, split, parts, plan, making.tokenizer)
        made = _make(job, workers, report)
        _check_origins(plan.origins, origins(_source(run, split), run.data), out)
        making.manifest = making.manifest.model_copy(update={"splits": {**done, split: _join(job, made, out)}})
        write_json(out / MANIFEST, making.manifest)
    shutil.rmtree(parts, ignore_errors=True)
    if parts.parent.is_dir() and not any(parts.parent.iterdir()):
        parts.parent.rmdir()


def _plan(run: Run, parts: Path, out: Path, now: tuple[Origin, ...], size: int) -> Plan:
    path = parts / "plan.json"
    if path.exists():
        try:
            plan = Plan.model_validate_json(path.read_text(encoding="utf-8"))
        except ValidationError:
            raise DataError(f"{path}: is damaged; delete {parts} and run it again") from None
        _check_origins(plan.origins, now, out)
        return plan
    parts.mkdir(parents=True, exist_ok=True)
    plan = Plan(origins=now, parts=cut_source(_source(run, parts.name), run.data, size))
    write_json(path, plan)
    return plan


def _check_origins(then: Sequence[Origin], now: Sequence[Origin], out: Path) -> None:
    for was, is_now in zip_longest(then, now):
        if was != is_now:
            raise DataError(
                f"{_difference(was, is_now)} since {out} was begun; put it back as it was, choose another --out, or "
                f"delete {out}"
            )


def _difference(was: Origin | None, now: Origin | None) -> str:
    if now and (was is None or was.path != now.path):
        return f"{now.path}: is new among the files"
    assert was is not None
    if now is None:
        return f"{was.path}: is no more among the files"
    sizes = "" if was.size == now.size else f", from {was.size:,} to {now.size:,} bytes,"
    return f"{was.path}: has changed{sizes}"


def _make(job: Job, workers: int, report: Report) -> list[Made]:
    parts = job.plan.parts
    made = {number: found for number in range(len(parts)) if (found := read_made(job.stem(number)))}
    missing, total = [number for number in range(len(parts)) if number not in made], sum(part.size for part in parts)

    def tell() -> None:
        done = sum(parts[number].size for number in made)
        report(Stage(job.split, done, total, sum(one.tokens for one in made.values())))

    with working(job, missing, workers) as coming:
        tell()
        for number, found in coming:
            made[number] = found
            tell()
    return [made[number] for number in range(len(parts))]


def _join(job: Job, made: Sequence[Made], out: Path) -> Split:
    _check_rows(job.plan.parts, made)
    skipped = Skipped(sum(one.skipped for one in made), [reason for one in made for reason in one.reasons][:5])
    limit, data = TruncationPolicy(job.run.data.longest, job.run.data.too_long), job.folder / "joined"
    for one in made:
        limit.add(TruncationPolicy(limit.longest, limit.policy, one.cut, one.dropped, one.windowed, one.seen))
        limit.notes.update({(verb, noun, how): times for verb, noun, how, times in one.notes})
    notice = told(job.split, sum(one.items for one in made), skipped, limit)
    digest, files = join_parts([job.stem(number) for number in range(len(made))], made, data)
    shutil.rmtree(out / job.split, ignore_errors=True)
    os.replace(data, out / job.split)
    return Split(
        documents=sum(one.documents for one in made),
        items=sum(one.items for one in made),
        tokens=sum(one.tokens for one in made),
        bytes=sum(one.bytes for one in made),
        digest=digest,
        files=files,
        origins=job.plan.origins,
        told=notice,
        longest=limit.seen,
    )


def _check_rows(parts: Sequence[Part], made: Sequence[Made]) -> None:
    """A file that was cut may have no row in one piece, but not in all."""
    rows: dict[str, int] = {}
    for part, one in zip(parts, made, strict=True):
        for piece, count in zip(part.pieces, one.rows, strict=False):
            rows[piece.path] = rows.get(piece.path, 0) + count
    for path, count in rows.items():
        if not count:
            raise DataError(f"{path}: there are no good rows in it; is it the right file?")
