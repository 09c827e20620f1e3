"""Rows of a file in parts on a Ray cluster, for `weft predict` and `weft embed`; results stay until all are written.

    OUT.parts/plan.json     what the results depend on: a command that goes on must have the same
    OUT.parts/00007.npz     the results of a part: its JSON, and its vectors

A part has the rows that are worked on at once without Ray, so that the results are the same. A command that was stopped
is run again: it reads all rows, and works on the parts that have no results yet.
"""

import hashlib
import io
import json
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from weft.cli.answers import Answered, RowErrors
from weft.cli.embed import TextRows, text_of
from weft.cli.inputs import MAX_CHUNK, cut_rows, row_size
from weft.cli.outputs import atomic_file
from weft.data.corpus.partition import SourceFile
from weft.data.readers.examples import expand_glob
from weft.data.readers.records import Record
from weft.data.truncation import TruncationPolicy
from weft.errors import ConfigError, DataError
from weft.ray_engine import Contents, work_in_parts
from weft.text_embedding import CHUNK_SIZE

if TYPE_CHECKING:
    from weft.pipeline import Pipeline
    from weft.text_embedding import Embedder

Part = tuple[int, list[Record]]  # the number of rows before it, and its rows
Work = Callable[[Part], tuple[Any, dict[str, Any]]]  # returns results: JSON, and arrays
CutRows = Callable[[Iterable[Record]], Iterator[list[Record]]]
ReadRows = Callable[[], Iterable[Record]]


def weights_digest(pipeline: "Pipeline") -> str:
    """Return the SHA-256 of a model's weights."""
    digest = hashlib.sha256()
    for name, tensor in sorted(pipeline.head.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


class StoredParts:
    """The results of the parts of a file, in a folder beside the output."""

    def __init__(self, out: Path, file: str, settings: Mapping[str, Any]) -> None:
        self.folder = out.with_name(f"{out.name}.parts")
        origins = [SourceFile.of(path).model_dump() for path in expand_glob(file)]
        plan = json.loads(json.dumps({**settings, "files": origins}, default=str))
        path = self.folder / "plan.json"
        if path.exists():
            self._check(plan, path)
        else:
            with atomic_file(path) as target:
                target.write(json.dumps(plan, indent=1).encode())

    def _check(self, plan: Mapping[str, Any], path: Path) -> None:
        try:
            begun = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: cannot be read: {error}; delete {self.folder}") from None
        for key, value in plan.items():
            if begun.get(key) != value:
                raise ConfigError(
                    f"{self.folder}: was begun with another {key}: {str(begun.get(key))[:200]}, not "
                    f"{str(value)[:200]}; delete it to begin anew, or set that back to go on"
                )

    def make(
        self,
        rows: ReadRows,
        cut: CutRows,
        worker: Callable[[], Work],
        use_gpus: bool,
        advance: Callable[[int], object],
    ) -> None:
        """Work on the parts that have no results yet."""
        done = {int(path.stem) for path in self.folder.glob("[0-9]*.npz")}
        parts = _MissingParts(rows, cut, done)
        for number, contents in work_in_parts(parts, _PartWorker(worker), use_gpus):
            with atomic_file(self.folder / f"{number:05d}.npz") as file:
                file.write(contents["npz"])
            advance(int(contents["rows"]))

    def read(self) -> Iterator[tuple[Any, Any]]:
        """Yield the results of all parts, in order: JSON and arrays."""
        for path in sorted(self.folder.glob("[0-9]*.npz"), key=lambda path: int(path.stem)):
            with np.load(path) as arrays:
                yield json.loads(arrays["json"].tobytes()), arrays

    def remove(self) -> None:
        """Delete the folder, once what is in it has been written to the output."""
        shutil.rmtree(self.folder, ignore_errors=True)


@dataclass(frozen=True)
class _MissingParts:
    """The reader of the parts of rows that are not done."""

    rows: ReadRows
    cut: CutRows
    done: Collection[int]

    def __call__(self) -> Iterator[tuple[int, Part]]:
        first = 0
        for number, records in enumerate(self.cut(self.rows())):
            if number not in self.done:
                yield number, (first, records)
            first += len(records)


@dataclass(frozen=True)
class _PartWorker:
    worker: Callable[[], Work]

    def __call__(self) -> Callable[[Part], Contents]:
        work = self.worker()

        def to_bytes(part: Part) -> Contents:
            results, arrays = work(part)
            file, text = io.BytesIO(), json.dumps(results, default=str).encode()
            np.savez(file, json=np.frombuffer(text, np.uint8), **arrays)
            return {"npz": file.getvalue(), "rows": str(len(part[1])).encode()}

        return to_bytes


def _num_chars(record: Record) -> int:
    try:
        return len(text_of(record))
    except DataError:
        return 0


def answer_on_ray(
    out: Path,
    file: str,
    settings: Mapping[str, Any],
    read: ReadRows,
    pipeline: "Pipeline",
    load: Callable[[], "Pipeline"],
    options: Mapping[str, Any],
    truncation: str | None,
    advance: Callable[[int], object],
) -> StoredParts:
    """Answer the rows of a file on a Ray cluster, as far as they are not; return the parts with their answers.

    `load` loads the model in each worker; it is in `pipeline` here.
    """
    settings = {**settings, "options": options, "truncation": truncation, "weights": weights_digest(pipeline)}
    parts = StoredParts(out, file, settings)
    use_gpus = pipeline.device.type == "cuda"
    cut = partial(cut_rows, rows=MAX_CHUNK, size=MAX_CHUNK, size_of=row_size)  # as `read_chunks`
    parts.make(read, cut, AnswerWorker(load, options, truncation), use_gpus, advance)
    return parts


@dataclass(frozen=True)
class AnswerWorker:
    """Loads a model and answers the rows of parts."""

    load: Callable[[], "Pipeline"]
    options: Mapping[str, Any]
    truncation: Any

    def __call__(self) -> Work:
        """Return the function that answers a part."""
        pipeline = self.load()

        def answer(part: Part) -> tuple[Any, dict[str, Any]]:
            first, records = part
            limit = pipeline.truncation_policy(self.truncation)
            answers = pipeline.answers([row.request for row in records], self.options, first, "return", limit)
            rows = [[row.place, row.columns, reply] for row, reply in zip(records, answers, strict=True)]
            notes = [[list(note), times] for note, times in limit.notes.items()]
            counts = [limit.cut, limit.dropped, limit.windowed, limit.longest_seen]
            return {"rows": rows, "counts": counts, "notes": notes}, {}

        return answer


def stored_answers(parts: StoredParts, limit: TruncationPolicy) -> Iterator[Answered]:
    """Yield the rows of each part with their answers; `limit` counts what was cut."""
    for results, _ in parts.read():
        notes = Counter({tuple(note): times for note, times in results["notes"]})
        cut, dropped, windowed, longest_seen = results["counts"]
        limit.add(TruncationPolicy(limit.max_length, limit.policy, cut, dropped, windowed, longest_seen, notes))
        records = [Record(place, columns, "") for place, columns, _ in results["rows"]]
        yield records, [answer for _, _, answer in results["rows"]]


def embed_on_ray(
    out: Path,
    file: str,
    settings: Mapping[str, Any],
    read: ReadRows,
    loaded: "tuple[Pipeline, Embedder]",
    load: Callable[[], "tuple[Pipeline, Embedder]"],
    advance: Callable[[int], object],
) -> StoredParts:
    """Embed the rows of a file on a Ray cluster, as far as they are not; return the parts with their vectors.

    `load` loads the model in each worker; it is `loaded` here.
    """
    pipeline, embedder = loaded
    parts = StoredParts(out, file, {**settings, "weights": weights_digest(pipeline)})
    use_gpus = pipeline.device.type == "cuda"
    cut = partial(cut_rows, rows=CHUNK_SIZE, size=embedder.chunk_chars, size_of=_num_chars)  # as the embedder
    parts.make(read, cut, EmbedWorker(load, out.suffix == ".jsonl"), use_gpus, advance)
    return parts


@dataclass(frozen=True)
class EmbedWorker:
    """Loads a model and embeds the texts of parts; `as_lines`, as JSON lines."""

    load: Callable[[], "tuple[Pipeline, Embedder]"]
    as_lines: bool

    def __call__(self) -> Work:
        """Return the function that embeds a part."""
        _, embedder = self.load()

        def embed(part: Part) -> tuple[Any, dict[str, Any]]:
            messages, embedder.cut = _Messages(), 0
            rows = TextRows(part[1], embedder, messages)
            if self.as_lines:
                lines = [line for lines in rows.json_lines() for line in lines]
                return {"messages": messages.all, "cut": embedder.cut, "lines": lines}, {}
            arrays = _packed([vectors for block in rows.blocks() for vectors in block], embedder)
            return {"messages": messages.all, "cut": embedder.cut}, arrays

        return embed


class _Messages(RowErrors):
    """The error of each row, or None."""

    def __init__(self) -> None:
        super().__init__(strict=False)
        self.all: list[str | None] = []

    def count(self, error: str | None) -> None:
        """Add a row."""
        self.all.append(error)


def _packed(vectors: list[np.ndarray], embedder: "Embedder") -> dict[str, np.ndarray]:
    if embedder.choice.pool != "tokens":
        return {"vectors": np.stack(vectors)}
    return {"vectors": np.concatenate(vectors), "starts": np.cumsum([0, *map(len, vectors)])}


class StoredTextRows(TextRows):
    """The texts of rows that a Ray cluster has embedded, and their vectors."""

    def __init__(self, parts: StoredParts, embedder: "Embedder", errors: RowErrors) -> None:
        super().__init__((), embedder, errors)
        self._parts = parts

    def blocks(self) -> Iterator[Any]:
        """Yield the vectors of a part at a time."""
        for _, arrays in self._read_parts():
            vectors = arrays["vectors"]
            yield np.split(vectors, arrays["starts"][1:-1]) if "starts" in arrays else vectors

    def json_lines(self) -> Iterator[list[str]]:
        """Yield the rows of a part at a time, each as a JSON object."""
        yield from (results["lines"] for results, _ in self._read_parts())

    def _read_parts(self) -> Iterator[tuple[Any, Any]]:
        for results, arrays in self._parts.read():
            self.embedder.cut += results["cut"]
            for message in results["messages"]:
                self.errors.count(message)
            yield results, arrays
