"""`weft embed` and `weft layers`: texts to vectors, and which of a model's layers are worth taking."""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from weft.cli.console import Device, Json, Model, Overrides, Precision, Trust, check_source, print_table, tell
from weft.errors import ConfigError, DataError, did_you_mean

if TYPE_CHECKING:
    import numpy as np

    from weft.embedding import Embedder

PoolOption = Annotated[
    str | None, typer.Option("--pool", help="mean, cls, max, last, summary or tokens; mean, or the model's own.")
]
CombineOption = Annotated[str, typer.Option("--combine", help="How several layers become one: sum, mean or concat.")]
_DIGITS = 6


def embed(
    model: Model,
    texts: Annotated[list[str] | None, typer.Argument(metavar="TEXT", help="Read from stdin if none.")] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="A text a line; .jsonl has objects.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help=".npy, .npz, .tsv or .jsonl; JSON lines on stdout if not given.")
    ] = None,
    pool: PoolOption = None,
    layers: Annotated[str, typer.Option("--layers", metavar="-1|1,3|-4:", help="0 is the embeddings.")] = "-1",
    combine: CombineOption = "sum",
    normalize: Annotated[
        bool | None, typer.Option("--normalize/--as-is", help="Vectors of length 1; the model's own way if neither.")
    ] = None,
    truncate: Annotated[bool, typer.Option("--truncate", help="Cut texts that are too long.")] = False,
    trust: Trust = False,
    device: Device = "auto",
    precision: Precision = "fp32",
) -> None:
    """Turn texts, a file or stdin into vectors, one a text, or with --pool tokens one a token."""
    from weft.cli.inputs import read_input
    from weft.data.readers.lines import count
    from weft.pipeline import load

    check_source(texts, file)
    write = None if out is None else _writer(out, pool)
    chosen: Any = pool  # checked where it is used
    how: Any = combine
    pipeline = load(model, device, trust, (), precision)
    embedder = pipeline.embedder(chosen, -1 if layers == "-1" else layers, how, normalize, truncate)
    given = iter(texts) if texts else _texts(read_input(file), "stdin" if file is None else str(file))
    if write is None or out is None:
        _print(embedder, given)
    else:
        _write(out, embedder, given, write)
    if embedder.cut:
        tell(f"cut {count(embedder.cut, 'text')} to {embedder.longest} tokens, the marks among them")


def layers(
    model: Model,
    data: Annotated[
        str, typer.Argument(metavar="DATA", help="A recipe for classify or tag, a sample, or a file of labelled rows.")
    ],
    overrides: Overrides = None,
    given: Annotated[
        list[str] | None, typer.Option("--layers", metavar="1,3|-2:", help="A choice more; may be given again.")
    ] = None,
    combine: CombineOption = "sum",
    pool: Annotated[str, typer.Option("--pool", help="Of a text's tokens: mean, cls or last.")] = "mean",
    as_json: Json = False,
    trust: Trust = False,
    device: Device = "auto",
    precision: Precision = "fp32",
) -> None:
    """Score every choice of a frozen model's layers by logistic regression on labelled data."""
    from weft.pipeline import load

    how: Any = combine  # checked where it is used
    pooled: Any = pool
    pipeline = load(model, device, trust, (), precision)
    found = pipeline.layer_scores(data, overrides or [], [(one, how) for one in given or ()], pooled, tell)
    if as_json:
        typer.echo(json.dumps(found.plain(), ensure_ascii=False))
        return
    rows = "words" if found.task == "tag" else "texts"
    title = f"{found.task}: logistic regression on {found.trained:,} {rows}, scored on {found.scored:,} ({found.split})"
    print_table(*found.table(), title=title)


def _texts(examples: Iterable[Any], name: str) -> Iterator[str]:
    """Take the text of each line: itself, or of an object its field `text`."""
    for number, example in enumerate(examples, 1):
        text = example.get("text") if isinstance(example, dict) else example
        if not isinstance(text, str):
            raise DataError(f"{name}:{number}: must be a text, or an object with one, but is {repr(example)[:60]}")
        yield text


def _print(embedder: "Embedder", texts: Iterable[str]) -> None:
    """Print an object a text, as soon as it is there."""
    from weft.cli.inputs import arriving

    for chunk in arriving(texts):
        for text, vectors in zip(chunk, embedder.all(chunk), strict=True):
            typer.echo(_line(embedder, text, vectors))


def _line(embedder: "Embedder", text: str, vectors: "np.ndarray") -> str:
    """Write one text and its vector, or its tokens and theirs, as JSON."""
    numbers = vectors.astype("f8").round(_DIGITS).tolist()
    if embedder.choice.pool == "tokens":
        return json.dumps({"text": text, "tokens": embedder.tokens(text), "vectors": numbers}, ensure_ascii=False)
    return json.dumps({"text": text, "vector": numbers}, ensure_ascii=False)


Write = Callable[[BinaryIO, "Embedder", Iterable[str]], None]


def _writer(out: Path, pool: str | None) -> Write:
    """Return the writer of a file by its ending; called before a model is loaded."""
    known: dict[str, Write] = {".npy": _npy, ".npz": _npz, ".tsv": _tsv, ".jsonl": _jsonl}
    if out.suffix not in known:
        raise ConfigError(f"--out: {str(out)!r} must end in {', '.join(known)}; {did_you_mean(out.suffix, known)}")
    if pool == "tokens" and out.suffix in (".npy", ".tsv"):
        raise ConfigError(f"--out: vectors of tokens are several a text, for .npz or .jsonl, but {str(out)!r} is asked")
    return known[out.suffix]


def _write(out: Path, embedder: "Embedder", texts: Iterable[str], write: Write) -> None:
    """Write the file beside its place, and put it there when it is whole."""
    beside = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with beside.open("wb") as file:
            write(file, embedder, texts)
        os.replace(beside, out)
    except OSError as error:
        raise ConfigError(f"--out: {out} cannot be written: {error.strerror}") from None
    finally:
        beside.unlink(missing_ok=True)
    typer.echo(out)


def _npy(file: BinaryIO, embedder: "Embedder", texts: Iterable[str]) -> None:
    """Write an array (B, D) as it comes; how many rows there are is put in at the end."""
    from numpy.lib.format import write_array_header_1_0

    def head(rows: int) -> None:
        file.seek(0)
        shape = {"descr": "<f4", "fortran_order": False, "shape": (rows, width)}
        write_array_header_1_0(file, shape)  # whatever the number of rows, it has the same size

    width, rows = embedder.width, 0
    head(rows)
    for vectors in embedder.stream(texts):
        file.write(vectors.astype("<f4", copy=False).data)
        rows += len(vectors)
    head(rows)


def _npz(file: BinaryIO, embedder: "Embedder", texts: Iterable[str]) -> None:
    """Write `vectors`; of tokens those of all texts (N, D), and where each text `starts` (B+1,)."""
    import numpy as np

    found = embedder.all(texts)
    if embedder.choice.pool != "tokens":
        np.savez(file, vectors=found)
        return
    starts = np.cumsum([0, *map(len, found)])
    empty = np.zeros((0, embedder.width), np.float32)
    np.savez(file, vectors=np.concatenate([empty, *found]), starts=starts)


def _tsv(file: BinaryIO, embedder: "Embedder", texts: Iterable[str]) -> None:
    """Write a line of numbers a text."""
    import numpy as np

    for vectors in embedder.stream(texts):
        np.savetxt(file, vectors, fmt="%.9g", delimiter="\t")


def _jsonl(file: BinaryIO, embedder: "Embedder", texts: Iterable[str]) -> None:
    """Write an object a text."""
    from weft.cli.inputs import arriving

    for chunk in arriving(texts):
        lines = (_line(embedder, text, vectors) for text, vectors in zip(chunk, embedder.all(chunk), strict=True))
        file.writelines(f"{line}\n".encode() for line in lines)
