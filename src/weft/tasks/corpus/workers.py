"""Worker processes of a corpus preparation: each reads, checks and encodes parts, as training would."""

import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory

from weft.config.run import Run
from weft.data.corpus.format import write_json_atomically
from weft.data.corpus.merge import (
    NARROW,
    PART_FILES,
    WIDE,
    Lengths,
    PartCounts,
    PartitionPlan,
    TooWide,
    atomic_write,
    write_tokens,
)
from weft.data.readers.examples import Skipped
from weft.data.truncation import TruncationPolicy
from weft.errors import DataError
from weft.ray_engine import Contents, ReadParts, work_in_parts
from weft.tasks.base import Task
from weft.tasks.batch import Item
from weft.tasks.encoding import ENCODE_CHUNK, LocatedExample, encode_chunk
from weft.tasks.factory import make_task
from weft.tasks.prepare import read_split
from weft.tokenization.trainable import Tokenizer

BLOCK = 1 << 20  # bytes of text encoded at once: the tokenizer needs a hundred times as much memory


@dataclass(frozen=True)
class Job:
    """The parts of one split to encode, each to files that begin with its `stem`."""

    run: Run  # with the resolved task
    split: str
    folder: Path
    plan: PartitionPlan
    tokenizer: Tokenizer

    def stem(self, number: int) -> Path:
        """Return the path of a part's files without suffix."""
        return self.folder / f"{number:05d}"


@dataclass
class _PartStats:
    """Statistics of a part, collected while it is encoded."""

    skipped: Skipped
    limit: TruncationPolicy
    rows: list[int] = field(default_factory=list)  # of each piece

    @classmethod
    def of(cls, run: Run) -> "_PartStats":
        return cls(Skipped(), TruncationPolicy(run.data.max_length, run.data.truncation))


def make_part(job: Job, task: Task, number: int) -> PartCounts:
    """Write one part and return its statistics; ids have 16 bits if the vocabulary and all values fit, else 32."""
    tokenizer, stem = job.tokenizer, job.stem(number)
    fits = max(len(tokenizer), len(tokenizer.target)) < 1 << 16
    for dtype in (NARROW, WIDE) if fits else (WIDE,):
        stats = _PartStats.of(job.run)
        try:
            lengths = write_tokens(stem, _documents(job, task, number, stats), dtype)
        except TooWide:
            continue
        break
    lengths.save(stem)
    summary = _part_summary(lengths, stats, dtype.str)
    write_json_atomically(stem.with_suffix(".json"), summary)
    return summary


def _part_summary(lengths: Lengths, stats: _PartStats, dtype: str) -> PartCounts:
    odd = stats.skipped.oddities
    return PartCounts(
        rows=tuple(stats.rows),
        documents=len(lengths.documents),
        items=len(lengths.items),
        sequences=len(lengths.sequences),
        tokens=sum(lengths.sequences),
        bytes=sum(lengths.bytes),
        dtype=dtype,
        skipped=stats.skipped.count,
        reasons=tuple(stats.skipped.reasons),
        oddities=tuple((kind, times, odd.first[kind]) for kind, times in odd.counts.items()),
        cut=stats.limit.cut,
        dropped=stats.limit.dropped,
        windowed=stats.limit.windowed,
        longest_seen=stats.limit.longest_seen,
        notes=tuple((*note, times) for note, times in stats.limit.notes.items()),
    )


def _documents(job: Job, task: Task, number: int, stats: _PartStats) -> Iterator[tuple[int, list[Item]]]:
    skipped = stats.skipped if job.run.data.on_bad_rows == "skip" else None
    for block, sizes in _blocks(_examples(job, task, number, stats), task):
        yield from zip(sizes, encode_chunk(block, task, job.tokenizer, stats.limit, skipped), strict=True)


def _examples(job: Job, task: Task, number: int, stats: _PartStats) -> Iterator[LocatedExample]:
    for piece in job.plan.parts[number].pieces or (None,):
        stats.rows.append(0)
        data = job.run.data if piece is None else job.run.data.model_copy(update={job.split: piece.file_slice})
        for located in read_split(data, job.split, task, stats.skipped):
            stats.rows[-1] += 1
            yield located


def _blocks(examples: Iterable[LocatedExample], task: Task) -> Iterator[tuple[list[LocatedExample], list[int]]]:
    block: list[LocatedExample] = []
    sizes: list[int] = []
    block_bytes = 0
    for located in examples:
        block.append(located)
        sizes.append(sum(map(_num_bytes, chain(*task.texts(located[1])))))
        block_bytes += sizes[-1]
        if block_bytes >= BLOCK or len(block) == ENCODE_CHUNK:
            yield block, sizes
            block, sizes, block_bytes = [], [], 0
    if block:
        yield block, sizes


def _num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


@contextmanager
def encode_in_workers(job: Job, numbers: Sequence[int], workers: int) -> Iterator[Iterator[tuple[int, PartCounts]]]:
    """Start to encode parts, in worker processes if there are several; the context yields each part as it is done."""
    if workers == 1 or len(numbers) < 2:
        task = make_task(job.run)
        yield ((number, make_part(job, task, number)) for number in numbers)
        return
    # Forked, since a new process takes seconds for its imports. No Python thread runs here yet.
    context = get_context("fork" if sys.platform == "linux" else "spawn")
    reader, writer = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(min(workers, len(numbers)), context, _init_worker, (job, reader, writer))
    try:
        futures = {pool.submit(_worker_make_part, number): number for number in numbers}
        yield ((futures[future], future.result()) for future in as_completed(futures))
    except BrokenProcessPool:
        raise DataError(
            "a worker process was killed, perhaps for want of memory; run it again, with fewer --workers: what is done "
            "is kept"
        ) from None
    except BaseException:
        writer.close()  # so that no worker finishes its part
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        writer.close()
        reader.close()


@contextmanager
def encode_on_ray(job: Job, numbers: Sequence[int], workers: int) -> Iterator[Iterator[tuple[int, PartCounts]]]:
    """Encode parts on a Ray cluster, as `encode_in_workers` does here; their files come to this machine's disk."""
    read_parts: ReadParts[int] = partial(list, [(number, number) for number in numbers])
    made = (
        work_in_parts(read_parts, partial(_part_maker, job), use_gpus=False, workers=workers) if numbers else iter(())
    )
    yield ((number, _write_part(job.stem(number), files)) for number, files in made)


def _part_maker(job: Job) -> Callable[[int], Contents]:
    """Return the function that makes a part and returns its files by their endings."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    task = make_task(job.run)

    def make(number: int) -> Contents:
        with TemporaryDirectory() as folder:
            here = replace(job, folder=Path(folder))
            make_part(here, task, number)
            return {suffix: here.stem(number).with_suffix(suffix).read_bytes() for suffix in PART_FILES}

    return make


def _write_part(stem: Path, files: Contents) -> PartCounts:
    for suffix in PART_FILES:
        with atomic_write(stem.with_suffix(suffix)) as file:
            file.write(files[suffix])
    return PartCounts.model_validate_json(files[PART_FILES[-1]])


_worker_state: tuple[Job, Task]  # of a worker process


def _init_worker(job: Job, reader: Connection, writer: Connection) -> None:
    global _worker_state
    writer.close()
    gc.freeze()  # a collection over the parent's objects would copy all their pages
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the parent stops the workers
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes already use all processors
    threading.Thread(target=_exit_with_parent, args=(reader,), daemon=True).start()
    _worker_state = job, make_task(job.run)


def _exit_with_parent(reader: Connection) -> None:
    """Exit, even within a part, when the parent closes its end of the pipe or dies."""
    wait([reader])
    os._exit(1)


def _worker_make_part(number: int) -> PartCounts:
    return make_part(*_worker_state, number)
