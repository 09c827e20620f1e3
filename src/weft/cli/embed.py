"""`weft embed` writes vectors of texts; `weft layers` scores the layers of a model by probing."""

import sys
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from weft.cli.console import (
    ColumnsOption,
    DeviceOption,
    EngineOption,
    FileOption,
    JsonOption,
    ModelArg,
    OverridesArg,
    PrecisionOption,
    QuietOption,
    StrictOption,
    TaskOption,
    TextsArg,
    TrustOption,
    check_source,
    print_table,
    read_path,
    tell,
)
from weft.config.json import write_json
from weft.errors import ConfigError, DataError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np

    from weft.cli.answers import RowErrors
    from weft.config.sections import Data
    from weft.data.readers.column_mapping import ColumnSpec
    from weft.data.readers.records import Record
    from weft.pipeline import Pipeline
    from weft.tasks.base import Task
    from weft.text_embedding import Embedder

PoolOption = Annotated[
    str | None,
    typer.Option("--pool", help="mean, cls, max, last, pooler or tokens; the model's own, else mean."),
]
CombineOption = Annotated[str, typer.Option("--combine", help="How to combine several layers: sum, mean or concat.")]
_DIGITS = 6


def embed(
    model: ModelArg,
    texts: TextsArg = None,
    file: FileOption = None,
    columns: ColumnsOption = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", parser=read_path, help=".npy, .npz, .tsv or .jsonl; JSON lines on stdout if not given."
        ),
    ] = None,
    pool: PoolOption = None,
    layers: Annotated[str, typer.Option("--layers", metavar="-1|1,3|-4:", help="0 is the embeddings.")] = "-1",
    combine: CombineOption = "sum",
    normalize: Annotated[
        bool | None,
        typer.Option("--normalize/--as-is", help="Scale vectors to length 1; by default as the model."),
    ] = None,
    truncate: Annotated[
        bool | None,
        typer.Option(
            "--truncate/--no-truncate", help="Whether texts that are too long are cut; by default as the recipe."
        ),
    ] = None,
    strict: StrictOption = False,
    split_special_tokens: Annotated[
        bool,
        typer.Option(
            "--split-special-tokens/--no-split-special-tokens",
            help="Whether [MASK] in a text is text, or the special token, as by default in transformers.",
        ),
    ] = True,
    task: TaskOption = None,
    quiet: QuietOption = False,
    trust: TrustOption = False,
    device: DeviceOption = "auto",
    precision: PrecisionOption = "fp32",
    engine: EngineOption = "local",
) -> None:
    """Print or write the vectors of texts, a file or stdin: one per text, with --pool tokens one per token."""
    from weft.cli.answers import RowErrors
    from weft.cli.inputs import parse_columns, read_stdin, text_records
    from weft.cli.outputs import atomic_file
    from weft.cli.progress import RowProgress
    from weft.data.readers.lines import plural

    check_source(texts, file, out, engine)
    write, column_names = None if out is None else _writer_for(out, pool), parse_columns(columns, file)
    pool_mode: Any = pool  # checked by Pipeline.embedder
    combine_mode: Any = combine
    overrides = () if split_special_tokens else ("tokenizer.split_special_tokens=false",)
    layer_choice = -1 if layers == "-1" else layers
    embedder_options = (pool_mode, layer_choice, combine_mode, normalize, truncate, "nan")
    load_embedder = partial(_load_embedder, (model, device, trust, overrides, precision), task, embedder_options)
    pipeline, embedder = load_embedder()
    records = text_records(texts) if texts else read_stdin(pipeline.run.data.max_line_bytes)
    if file is not None:
        records = text_rows(file, pipeline.task, pipeline.run.data, column_names)
    quiet = quiet or file is None or (out is None and sys.stdout.isatty())
    errors, parts = RowErrors(strict or bool(texts)), None
    with RowProgress("embed", quiet) as progress:
        if engine == "ray" and file is not None and out is not None:
            from weft.cli.ray_rows import StoredTextRows, embed_on_ray

            read = partial(text_rows, file, pipeline.task, pipeline.run.data, column_names)
            settings: dict[str, Any] = {
                "model": model,
                "precision": precision,
                "columns": column_names,
                "options": embedder_options,
            }
            settings |= {"overrides": overrides, "ending": out.suffix, "task": task}
            parts = embed_on_ray(out, file, settings, read, (pipeline, embedder), load_embedder, progress.advance)
            rows: TextRows = StoredTextRows(parts, embedder, errors)
        else:
            rows = TextRows(progress.track(records), embedder, errors)
        if write is None or out is None:
            _print_vectors(rows)
        else:
            with atomic_file(out) as target:
                write(target, rows)
                rows.errors.summarize("be embedded")
            if parts is not None:
                parts.remove()
            typer.echo(out)
    if embedder.cut:
        tell(f"truncated {plural(embedder.cut, 'text')} to {embedder.longest} tokens, special tokens included")


def _load_embedder(
    model_options: tuple[Any, ...], task: str | None, options: tuple[Any, ...]
) -> "tuple[Pipeline, Embedder]":
    pipeline = _load_for_texts(model_options, task)
    return pipeline, pipeline.embedder(*options)


def _load_for_texts(model_options: tuple[Any, ...], task: str | None) -> "Pipeline":
    """Return a model that reads texts; of several tasks, as the one that is named, else as the first."""
    from weft.pipeline import load

    pipeline = load(*model_options)
    return pipeline.for_task(task or next(iter(pipeline.run.task_names), None))


def layers(
    model: ModelArg,
    data: Annotated[
        str, typer.Argument(metavar="DATA", help="A recipe for classify or tag, a sample, or a file of labelled rows.")
    ],
    overrides: OverridesArg = None,
    columns: ColumnsOption = None,
    choices: Annotated[
        list[str] | None, typer.Option("--layers", metavar="1,3|-2:", help="Another choice of layers; repeatable.")
    ] = None,
    combine: CombineOption = "sum",
    pool: Annotated[str, typer.Option("--pool", help="The pooling of a text's tokens: mean, cls or last.")] = "mean",
    task: TaskOption = None,
    as_json: JsonOption = False,
    trust: TrustOption = False,
    device: DeviceOption = "auto",
    precision: PrecisionOption = "fp32",
) -> None:
    """Score every choice of a frozen model's layers by logistic regression on labelled data."""
    from weft.cli.inputs import parse_columns

    combine_mode: Any = combine  # checked by Pipeline.layer_scores
    pool_mode: Any = pool
    pipeline = _load_for_texts((model, device, trust, (), precision), task)
    layer_choices = [(layers, combine_mode) for layers in choices or ()]
    scores = pipeline.layer_scores(data, overrides or [], layer_choices, pool_mode, tell, parse_columns(columns, data))
    if as_json:
        typer.echo(write_json(scores.to_dict()))
        return
    unit = "words" if scores.task == "tag" else "texts"
    sizes = f"{scores.trained:,} {unit}, scored on {scores.scored:,} ({scores.split})"
    print_table(*scores.table(), title=f"{scores.task}: logistic regression on {sizes}")


def text_rows(file: str, task: "Task", data: "Data", columns: "ColumnSpec | None") -> "Iterator[Record]":
    """Yield the rows of a file, with their text; of tagged sentences, with their words."""
    from weft.cli.inputs import read_file

    has_words = "words" in task.Example.model_fields
    fields = ["words", "text"] if has_words else ["text"]
    return read_file(file, data, fields, [] if has_words else fields, columns)


class TextRows:
    """The texts of rows and their vectors; of a row that has none, the error."""

    def __init__(self, records: "Iterable[Record]", embedder: "Embedder", errors: "RowErrors") -> None:
        self.embedder, self.errors, self._records = embedder, errors, records
        self._places: deque[str] = deque()  # of the rows that are not embedded yet

    def blocks(self) -> "Iterator[Any]":
        """Yield the vectors of some thousands of rows at a time, with NaN where there is an error."""
        done = 0
        for vectors in self.embedder.stream(self._read(self._records)):
            self._take_errors(len(vectors), done)
            done += len(vectors)
            yield vectors

    def json_lines(self) -> "Iterator[list[str]]":
        """Yield the rows that have been read so far, each as a JSON object."""
        from weft.cli.inputs import read_chunks

        for chunk in read_chunks(self._records):
            texts = list(self._read(chunk))
            vectors = self.embedder.all(texts)
            errors = self._take_errors(len(texts), 0)
            yield [
                write_json({"error": errors[number]})
                if number in errors
                else _json_line(self.embedder, str(text), vectors[number])
                for number, text in enumerate(texts)
            ]

    def _read(self, records: "Iterable[Record]") -> "Iterator[str | DataError]":
        for record in records:
            self._places.append(record.place)
            try:
                yield text_of(record)
            except DataError as error:
                yield DataError(str(error).removeprefix(f"{record.place}: "))

    def _take_errors(self, rows: int, done: int) -> dict[int, str]:
        """Return the errors of the next rows, after `done` others in the stream, with their places."""
        located = {}
        for number in range(rows):
            place, error = self._places.popleft(), self.embedder.errors.pop(done + number + 1, None)
            if error is not None:
                located[number] = f"{place}: {error}"
            self.errors.count(located.get(number))
        return located


def text_of(record: "Record") -> str:
    """Return the text of a row."""
    if isinstance(record.request, DataError):
        raise record.request
    text: Any = record.request
    if isinstance(text, dict):
        words = text.get("words", ())
        is_text = words and all(isinstance(word, str) for word in words)  # a list of words, or a line of them
        text = (words if isinstance(words, str) else " ".join(words)) if is_text else text.get("text")
    if not isinstance(text, str):
        raise DataError(f"{record.place}: must be a text, but is {repr(record.columns)[:60]} instead")
    return text


def _print_vectors(rows: TextRows) -> None:
    """Print one JSON object per text, as the texts arrive."""
    for lines in rows.json_lines():
        typer.echo("\n".join(lines))
    rows.errors.summarize("be embedded")


def _json_line(embedder: "Embedder", text: str, vectors: "np.ndarray") -> str:
    """Return a text and its vector, or its tokens and their vectors, as JSON."""
    numbers = vectors.astype("f8").round(_DIGITS).tolist()
    if embedder.choice.pool == "tokens":
        return write_json({"text": text, "tokens": embedder.tokens(text), "vectors": numbers})
    return write_json({"text": text, "vector": numbers})


WriteVectors = Callable[[BinaryIO, TextRows], None]


def _writer_for(out: Path, pool: str | None) -> WriteVectors:
    """Return the writer of a file by its ending; raise an error before a model is loaded."""
    writers: dict[str, WriteVectors] = {
        ".npy": _write_npy,
        ".npz": _write_npz,
        ".tsv": _write_tsv,
        ".jsonl": _write_jsonl,
    }
    if out.suffix not in writers:
        endings = ", ".join(writers)
        raise ConfigError(f"--out: {str(out)!r} must end in {endings}; {did_you_mean(out.suffix, writers)}")
    if pool == "tokens" and out.suffix in (".npy", ".tsv"):
        raise ConfigError(
            f"--out: --pool tokens gives several vectors per text, for .npz or .jsonl, but the file is {str(out)!r}"
        )
    return writers[out.suffix]


def _write_npy(file: BinaryIO, rows: TextRows) -> None:
    """Write an array (B, D) batch by batch; the number of rows is written to the header at the end."""
    from numpy.lib.format import write_array_header_1_0

    def write_header(rows: int) -> None:
        file.seek(0)
        shape = {"descr": "<f4", "fortran_order": False, "shape": (rows, width)}
        write_array_header_1_0(file, shape)  # of a size that does not depend on the number of rows

    width, written = rows.embedder.width, 0
    write_header(written)
    for vectors in rows.blocks():
        file.write(vectors.astype("<f4", copy=False).data)
        written += len(vectors)
    write_header(written)


def _write_npz(file: BinaryIO, rows: TextRows) -> None:
    """Write the array `vectors` (B, D); for tokens, `vectors` (N, D) and the offsets `starts` (B+1,) of the texts."""
    import numpy as np

    empty = np.zeros((0, rows.embedder.width), np.float32)
    if rows.embedder.choice.pool != "tokens":
        np.savez(file, vectors=np.concatenate([empty, *rows.blocks()]))
        return
    vectors = [vectors for block in rows.blocks() for vectors in block]
    starts = np.cumsum([0, *map(len, vectors)])
    np.savez(file, vectors=np.concatenate([empty, *vectors]), starts=starts)


def _write_tsv(file: BinaryIO, rows: TextRows) -> None:
    """Write one line of numbers per text."""
    import numpy as np

    for vectors in rows.blocks():
        np.savetxt(file, vectors, fmt="%.9g", delimiter="\t")


def _write_jsonl(file: BinaryIO, rows: TextRows) -> None:
    """Write one JSON object per text."""
    for lines in rows.json_lines():
        file.writelines(f"{line}\n".encode() for line in lines)
