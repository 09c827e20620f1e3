"""Parts of a corpus, each read, checked and encoded by one of several processes, by the way that training goes."""

import gc
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path

from weft.config.schema import Run
from weft.data.corpus.format import write_json
from weft.data.corpus.merge import NARROW, WIDE, Lengths, Made, Plan, TooWide, write_tokens
from weft.data.readers.examples import Skipped
from weft.data.truncation import TruncationPolicy
from weft.errors import DataError
from weft.tasks.base import Item, Task
from weft.tasks.factory import make_task
from weft.tasks.prepare import AT_ONCE, Placed, encode_chunk, read_split
from weft.tokenization.trainable import Tokenizer

BLOCK = 1 << 20  # bytes of text encoded at once: the tokenizer holds a hundred times as much


@dataclass(frozen=True)
class Job:
    """What workers are to do: the parts of one split, each to files that begin with its `stem`."""

    run: Run  # its task settled
    split: str
    folder: Path
    plan: Plan
    tokenizer: Tokenizer

    def stem(self, number: int) -> Path:
        """Name a part's files, but for their endings."""
        return self.folder / f"{number:05d}"


@dataclass
class _Tally:
    """What is found out about a part on the way."""

    skipped: Skipped
    limit: TruncationPolicy
    rows: list[int] = field(default_factory=list)  # of each piece

    @classmethod
    def of(cls, run: Run) -> "_Tally":
        return cls(Skipped(), TruncationPolicy(run.data.longest, run.data.too_long))


def make_part(job: Job, task: Task, number: int) -> Made:
    """Write one part; its ids are of 16 bits where the vocabulary lets hope for it and all that is in them fits."""
    tokenizer, stem = job.tokenizer, job.stem(number)
    fits = max(len(tokenizer), len(tokenizer.target)) < 1 << 16
    for dtype in (NARROW, WIDE) if fits else (WIDE,):
        tally = _Tally.of(job.run)
        try:
            lengths = write_tokens(stem, _documents(job, task, number, tally), dtype)
        except TooWide:
            continue
        break
    lengths.save(stem)
    made = _made(lengths, tally, dtype.str)
    write_json(stem.with_suffix(".json"), made)
    return made


def _made(lengths: Lengths, tally: _Tally, dtype: str) -> Made:
    return Made(
        rows=tuple(tally.rows),
        documents=len(lengths.documents),
        items=len(lengths.items),
        sequences=len(lengths.sequences),
        tokens=sum(lengths.sequences),
        bytes=sum(lengths.bytes),
        dtype=dtype,
        skipped=tally.skipped.count,
        reasons=tuple(tally.skipped.reasons),
        cut=tally.limit.cut,
        dropped=tally.limit.dropped,
        windowed=tally.limit.windowed,
        seen=tally.limit.seen,
        notes=tuple((*note, times) for note, times in tally.limit.notes.items()),
    )


def _documents(job: Job, task: Task, number: int, tally: _Tally) -> Iterator[tuple[int, list[Item]]]:
    skipped = tally.skipped if job.run.data.on_bad_rows == "skip" else None
    for block, sizes in _blocks(_examples(job, task, number, tally), task):
        yield from zip(sizes, encode_chunk(block, task, job.tokenizer, tally.limit, skipped), strict=True)


def _examples(job: Job, task: Task, number: int, tally: _Tally) -> Iterator[Placed]:
    for piece in job.plan.parts[number].pieces or (None,):
        tally.rows.append(0)
        data = job.run.data if piece is None else job.run.data.model_copy(update={job.split: piece.stretch})
        for placed in read_split(data, job.split, task, tally.skipped):
            tally.rows[-1] += 1
            yield placed


def _blocks(placed: Iterable[Placed], task: Task) -> Iterator[tuple[list[Placed], list[int]]]:
    block: list[Placed] = []
    sizes: list[int] = []
    held = 0
    for one in placed:
        block.append(one)
        sizes.append(sum(map(_bytes, chain(*task.texts(one[1])))))
        held += sizes[-1]
        if held >= BLOCK or len(block) == AT_ONCE:
            yield block, sizes
            block, sizes, held = [], [], 0
    if block:
        yield block, sizes


def _bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


@contextmanager
def working(job: Job, numbers: Sequence[int], workers: int) -> Iterator[Iterator[tuple[int, Made]]]:
    """Begin to make parts, in processes of their own if there are several; what is inside gets each that is done."""
    if workers == 1 or len(numbers) < 2:
        task = make_task(job.run)
        yield ((number, make_part(job, task, number)) for number in numbers)
        return
    # Forked, since a fresh process takes seconds to import all it needs. No thread of Python's runs here yet.
    context = get_context("fork" if sys.platform == "linux" else "spawn")
    reader, writer = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(min(workers, len(numbers)), context, _enter, (job, reader, writer))
    try:
        coming = {pool.submit(_work, number): number for number in numbers}
        yield ((coming[one], one.result()) for one in as_completed(coming))
    except BrokenProcessPool:
        raise DataError(
            "a worker process was killed, perhaps for want of memory; run it again, with fewer --workers: what is done "
            "is kept"
        ) from None
    except BaseException:
        writer.close()  # so that nobody goes on to the end of a part
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        writer.close()
        reader.close()


_entered: tuple[Job, Task]  # of a worker process


def _enter(job: Job, reader: Connection, writer: Connection) -> None:
    global _entered
    writer.close()
    gc.freeze()  # what the parent has imported is not garbage: to look for it there would copy all its pages
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all, and the parent says when to stop
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there are as many processes as there are to be threads
    threading.Thread(target=_watch, args=(reader,), daemon=True).start()
    _entered = job, make_task(job.run)


def _watch(reader: Connection) -> None:
    """End the process, in the middle of a part, when the parent closes its end of the pipe or is no more."""
    wait([reader])
    os._exit(1)


def _work(number: int) -> Made:
    return make_part(*_entered, number)
