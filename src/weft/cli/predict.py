"""`weft predict`: a model's answers to texts, a file or stdin."""

import sys
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli.console import (
    ColumnsOption,
    DeviceOption,
    EngineOption,
    FileOption,
    JsonOption,
    ModelArg,
    PrecisionOption,
    QuietOption,
    StrictOption,
    TaskOption,
    TextsArg,
    TrustOption,
    check_source,
    read_path,
    tell,
)
from weft.errors import ConfigError

if TYPE_CHECKING:
    from weft.pipeline import Pipeline


def predict(
    model: ModelArg,
    texts: TextsArg = None,
    file: FileOption = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            parser=read_path,
            help="Rows with their answers: .csv, .tsv, .jsonl or .parquet; if not, stdout.",
        ),
    ] = None,
    columns: ColumnsOption = None,
    task: TaskOption = None,
    options: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A decoding option, such as beam=5 or sample=true."),
    ] = None,
    as_json: JsonOption = False,
    stream: Annotated[bool, typer.Option("--stream", help="Print each answer while it is generated.")] = False,
    truncation: Annotated[
        str | None,
        typer.Option("--truncation", help="Of texts that are too long: cut, window or error; if not, the recipe's."),
    ] = None,
    strict: StrictOption = False,
    quiet: QuietOption = False,
    trust: TrustOption = False,
    device: DeviceOption = "auto",
    precision: PrecisionOption = "fp32",
    engine: EngineOption = "local",
) -> None:
    """Print or write a model's answers to texts, a file or stdin."""
    from weft.cli.answers import RowErrors, answer_chunks, print_answers, question_records, write_answers
    from weft.cli.inputs import parse_columns, read_stdin, text_records
    from weft.cli.outputs import AnswerFile
    from weft.cli.progress import RowProgress

    check_source(texts, file, out, engine)
    if stream and (as_json or out):
        other = "--json prints" if as_json else "--out writes"
        raise ConfigError(f"--stream: prints text while it is generated, but {other} whole answers; leave one out")
    column_names, answers = parse_columns(columns, file), AnswerFile(out) if out else None
    load = partial(_load_for_task, model, device, trust, precision, task)
    pipeline, decoding = load(), _parse_options(options or [])
    if not as_json:
        _tell_sampling(pipeline, decoding)
    limit = pipeline.truncation_policy(truncation)  # type: ignore[arg-type]  # checked there
    records = text_records(texts) if texts else read_stdin(pipeline.run.data.max_line_bytes)
    if file is not None:
        records = question_records(file, pipeline.task, pipeline.run.data, column_names)
    if stream:
        for number, record in enumerate(records):
            for piece in pipeline.stream(record.request, decoding, number):
                typer.echo(piece, nl=False)
            typer.echo()
        return
    # Answers that scroll by in a terminal are progress enough.
    quiet = quiet or file is None or (out is None and sys.stdout.isatty())
    with RowProgress("predict", quiet) as progress, answers or nullcontext():
        write = print_answers(pipeline, as_json, bool(decoding)) if answers is None else answers.write
        errors = RowErrors(strict or bool(texts), printed=answers is None and not as_json)
        if engine == "ray" and file is not None and out is not None:
            from weft.cli.ray_rows import answer_on_ray, stored_answers

            read = partial(question_records, file, pipeline.task, pipeline.run.data, column_names)
            settings = {"model": model, "precision": precision, "columns": column_names, "task": task}
            parts = answer_on_ray(out, file, settings, read, pipeline, load, decoding, truncation, progress.advance)
            write_answers(stored_answers(parts, limit), limit, write, errors)
        else:
            answered = answer_chunks(pipeline, records, decoding, limit)
            write_answers(answered, limit, write, errors, progress.advance)
    if engine == "ray":
        parts.remove()
    if out is not None:
        typer.echo(out)


def _load_for_task(model: str, device: str, trust: bool, precision: str, task: str | None) -> "Pipeline":
    from weft.pipeline import load

    return load(model, device, trust, (), precision).for_task(task)


def _parse_options(pairs: Iterable[str]) -> dict[str, Any]:
    from weft.config.overrides import apply_override

    options: dict[str, Any] = {}
    for pair in pairs:
        apply_override(options, pair)
    return options


def _tell_sampling(pipeline: "Pipeline", given: Mapping[str, Any]) -> None:
    """Print a notice if texts are sampled though the call does not ask for it."""
    from weft.decoding.config import DecodingConfig
    from weft.tasks.requests import read_options

    options = read_options(pipeline.task, given)
    if isinstance(options, DecodingConfig) and options.sample and "sample" not in given:
        others = "--set sample=false takes the most probable tokens"
        tell(f"sampled with {options.describe_sampling()}: another seed gives another text, {others}")
