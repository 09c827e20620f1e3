"""`weft embed` writes vectors of texts; `weft layers` scores the layers of a model by probing."""

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from weft.cli.console import (
    ColumnsOption,
    DeviceOption,
    JsonOption,
    ModelArg,
    OverridesArg,
    PrecisionOption,
    QuietOption,
    TrustOption,
    check_source,
    print_table,
    tell,
)
from weft.errors import ConfigError, DataError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np

    from weft.data.readers.column_mapping import ColumnSpec
    from weft.data.readers.records import Record
    from weft.pipeline import Pipeline
    from weft.text_embedding import Embedder

PoolOption = Annotated[
    str | None,
    typer.Option("--pool", help="mean, cls, max, last, pooler or tokens; the model's own, else mean."),
]
CombineOption = Annotated[str, typer.Option("--combine", help="How to combine several layers: sum, mean or concat.")]
_DIGITS = 6


def embed(
    model: ModelArg,
    texts: Annotated[list[str] | None, typer.Argument(metavar="TEXT", help="Read from stdin if none.")] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="Rows like the training data's, or a text a line: .txt.")
    ] = None,
    columns: ColumnsOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help=".npy, .npz, .tsv or .jsonl; JSON lines on stdout if not given.")
    ] = None,
    pool: PoolOption = None,
    layers: Annotated[str, typer.Option("--layers", metavar="-1|1,3|-4:", help="0 is the embeddings.")] = "-1",
    combine: CombineOption = "sum",
    normalize: Annotated[
        bool | None,
        typer.Option("--normalize/--as-is", help="Scale vectors to length 1; by default as the model."),
    ] = None,
    truncate: Annotated[bool, typer.Option("--truncate", help="Truncate texts that are too long.")] = False,
    quiet: QuietOption = False,
    trust: TrustOption = False,
    device: DeviceOption = "auto",
    precision: PrecisionOption = "fp32",
) -> None:
    """Print or write the vectors of texts, a file or stdin: one per text, with --pool tokens one per token."""
    from weft.cli.inputs import parse_columns, read_stdin
    from weft.cli.outputs import atomic_file
    from weft.cli.progress import RowProgress
    from weft.data.readers.lines import plural
    from weft.pipeline import load

    check_source(texts, file)
    write, column_names = None if out is None else _writer_for(out, pool), parse_columns(columns, file)
    pool_mode: Any = pool  # checked by Pipeline.embedder
    combine_mode: Any = combine
    pipeline = load(model, device, trust, (), precision)
    embedder = pipeline.embedder(pool_mode, -1 if layers == "-1" else layers, combine_mode, normalize, truncate)
    records = read_stdin() if file is None else text_rows(file, pipeline, column_names)
    quiet = quiet or file is None or (out is None and sys.stdout.isatty())
    with RowProgress("embed", quiet) as progress:
        inputs = progress.track(iter(texts) if texts else map(text_of, records))
        if write is None or out is None:
            _print_vectors(embedder, inputs)
        else:
            with atomic_file(out) as target:
                write(target, embedder, inputs)
            typer.echo(out)
    if embedder.cut:
        tell(f"truncated {plural(embedder.cut, 'text')} to {embedder.longest} tokens, special tokens included")


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
    as_json: JsonOption = False,
    trust: TrustOption = False,
    device: DeviceOption = "auto",
    precision: PrecisionOption = "fp32",
) -> None:
    """Score every choice of a frozen model's layers by logistic regression on labelled data."""
    from weft.cli.inputs import parse_columns
    from weft.pipeline import load

    combine_mode: Any = combine  # checked by Pipeline.layer_scores
    pool_mode: Any = pool
    pipeline = load(model, device, trust, (), precision)
    layer_choices = [(layers, combine_mode) for layers in choices or ()]
    scores = pipeline.layer_scores(data, overrides or [], layer_choices, pool_mode, tell, parse_columns(columns, data))
    if as_json:
        typer.echo(json.dumps(scores.to_dict(), ensure_ascii=False))
        return
    unit = "words" if scores.task == "tag" else "texts"
    sizes = f"{scores.trained:,} {unit}, scored on {scores.scored:,} ({scores.split})"
    print_table(*scores.table(), title=f"{scores.task}: logistic regression on {sizes}")


def text_rows(file: Path, pipeline: "Pipeline", columns: "ColumnSpec | None") -> "Iterator[Record]":
    """Yield the rows of a file, with their text; of tagged sentences, with their words."""
    from weft.cli.inputs import read_file

    has_words = "words" in pipeline.task.Example.model_fields
    fields = ["words", "text"] if has_words else ["text"]
    return read_file(file, pipeline.run.data, fields, [] if has_words else fields, columns)


def text_of(record: "Record") -> str:
    """Return the text of a row."""
    if isinstance(record.request, DataError):
        raise record.request
    text: Any = record.request
    if isinstance(text, dict):
        words = text.get("words", ())
        text = " ".join(words) if words and all(isinstance(word, str) for word in words) else text.get("text")
    if not isinstance(text, str):
        raise DataError(f"{record.place}: must be a text, but is {repr(record.columns)[:60]} instead")
    return text


def _print_vectors(embedder: "Embedder", texts: Iterable[str]) -> None:
    """Print one JSON object per text, as the texts arrive."""
    from weft.cli.inputs import read_chunks

    for chunk in read_chunks(texts):
        for text, vectors in zip(chunk, embedder.all(chunk), strict=True):
            typer.echo(_json_line(embedder, text, vectors))


def _json_line(embedder: "Embedder", text: str, vectors: "np.ndarray") -> str:
    """Return a text and its vector, or its tokens and their vectors, as JSON."""
    numbers = vectors.astype("f8").round(_DIGITS).tolist()
    if embedder.choice.pool == "tokens":
        return json.dumps({"text": text, "tokens": embedder.tokens(text), "vectors": numbers}, ensure_ascii=False)
    return json.dumps({"text": text, "vector": numbers}, ensure_ascii=False)


WriteVectors = Callable[[BinaryIO, "Embedder", Iterable[str]], None]


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


def _write_npy(file: BinaryIO, embedder: "Embedder", texts: Iterable[str]) -> None:
    """Write an array (B, D) batch by batch; the number of rows is written to the header at the end."""
    from numpy.lib.format import write_array_header_1_0

    def write_header(rows: int) -> None:
        file.seek(0)
        shape = {"descr": "<f4", "fortran_order": False, "shape": (rows, width)}
        write_array_header_1_0(file, shape)  # of a size that does not depend on the number of rows

    width, rows = embedder.width, 0
    write_header(rows)
    for vectors in embedder.stream(texts):
        file.write(vectors.astype("<f4", copy=False).data)
        rows += len(vectors)
    write_header(rows)


def _write_npz(file: BinaryIO, embedder: "Embedder", texts: Iterable[str]) -> None:
    """Write the array `vectors` (B, D); for tokens, `vectors` (N, D) and the offsets `starts` (B+1,) of the texts."""
    import numpy as np

    vectors = embedder.all(texts)
    if embedder.choice.pool != "tokens":
        np.savez(file, vectors=vectors)
        return
    starts = np.cumsum([0, *map(len, vectors)])
    empty = np.zeros((0, embedder.width), np.float32)
    np.savez(file, vectors=np.concatenate([empty, *vectors]), starts=starts)


def _write_tsv(file: BinaryIO, embedder: "Embedder", texts: Iterable[str]) -> None:
    """Write one line of numbers per text."""
    import numpy as np

    for vectors in embedder.stream(texts):
        np.savetxt(file, vectors, fmt="%.9g", delimiter="\t")


def _write_jsonl(file: BinaryIO, embedder: "Embedder", texts: Iterable[str]) -> None:
    """Write one JSON object per text."""
    from weft.cli.inputs import read_chunks

    for chunk in read_chunks(texts):
        lines = (_json_line(embedder, text, vectors) for text, vectors in zip(chunk, embedder.all(chunk), strict=True))
        file.writelines(f"{line}\n".encode() for line in lines)
