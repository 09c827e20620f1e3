"""`weft evaluate`: the metrics of a model, reports on its answers, and minimal pairs."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli.console import (
    ColumnsOption,
    DeviceOption,
    JsonOption,
    ModelArg,
    PrecisionOption,
    QuietOption,
    TaskOption,
    TrustOption,
    print_confusion,
    print_metrics,
    print_pairs,
    print_report,
    read_path,
    tell,
)
from weft.config.json import write_json
from weft.errors import ConfigError, RoleError

if TYPE_CHECKING:
    from weft.data.readers.column_mapping import ColumnSpec
    from weft.pipeline import Pipeline
    from weft.tasks.evaluation import EvaluationResult


def evaluate(
    model: ModelArg,
    data: Annotated[str | None, typer.Argument(metavar="DATA", help="A file, or a sample such as dates:valid.")] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A change, such as task.decode.beam=5.")
    ] = None,
    blimp: Annotated[
        Path | None,
        typer.Option(
            "--blimp", parser=read_path, metavar="DIR", help="A folder of minimal pairs, such as BLiMP, to score."
        ),
    ] = None,
    report: Annotated[
        bool, typer.Option("--report", help="Print the scores of each label or entity, or by the length of the input.")
    ] = False,
    errors: Annotated[
        Path | None,
        typer.Option(
            "--errors",
            parser=read_path,
            metavar="FILE",
            help="A .jsonl file for the wrong answers, the most confident first.",
        ),
    ] = None,
    columns: ColumnsOption = None,
    task: TaskOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    trust: TrustOption = False,
    device: DeviceOption = "auto",
    precision: PrecisionOption = "fp32",
) -> None:
    """Evaluate a model on DATA, by default its recipe's test data; for labels, print the confusion matrix."""
    from weft.cli.inputs import parse_columns
    from weft.cli.progress import RowProgress
    from weft.pipeline import load

    _check_evaluation(data, blimp, report, errors)
    column_names = parse_columns(columns, data)
    pipeline = load(model, device, trust, changes or [], precision)
    if task is not None or data is not None or report or errors:  # of several tasks, these are of one
        pipeline = pipeline.for_task(task)
    if blimp is not None:
        print_pairs(pipeline.minimal_pairs(blimp), as_json)
        return
    with RowProgress("evaluate", quiet) as progress:
        result = _evaluate(pipeline, data, report, errors, column_names, progress.advance)
    if as_json:
        typer.echo(write_json(result.to_dict()))
        return
    print_metrics(result.metrics, result.positive_label)
    if report and (detail := result.report or result.by_length) is not None:
        print_report(detail)
    if result.confusion:
        print_confusion(result.confusion)


def _check_evaluation(data: str | None, blimp: Path | None, report: bool, errors: Path | None) -> None:
    """Raise an error for options that contradict each other, before a model is loaded."""
    if blimp is not None and data is not None:
        raise ConfigError(f"--blimp: replaces DATA, but both are given: {blimp} and {data}; leave one out")
    for option, given in (("--report", report), ("--errors", errors is not None)):
        if blimp is not None and given:
            raise ConfigError(f"--blimp: compares pairs of sentences, and {option} is of answers; leave one out")
    if errors is not None:
        _check_errors_file(errors)


def _check_errors_file(path: Path) -> None:
    """Raise an error if the file of wrong answers could not be written; called before any work is done."""
    if path.suffix != ".jsonl":
        raise ConfigError(f"--errors: must end in .jsonl, but is {str(path)!r} instead")
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ConfigError(f"--errors: must be a file in a folder that exists, but is {str(path)!r}; name another")


def _evaluate(
    pipeline: "Pipeline",
    data: str | None,
    report: bool,
    errors: Path | None,
    columns: "ColumnSpec | None",
    advance: Callable[[int], object],
) -> "EvaluationResult":
    """Evaluate a model, and write its wrong answers to a file; raise an error if a report cannot be made."""
    from weft.data.readers.lines import plural
    from weft.tasks.capabilities import CustomEvaluation

    if report and isinstance(pipeline.task, CustomEvaluation):
        name = pipeline.run.task.name
        raise RoleError(f"--report: is of answers, and the task {name!r} is measured without any; leave it out")
    result = pipeline.evaluate_in_detail(data, tell, errors is not None, columns, advance, by_length=report)
    if errors is not None:
        write_errors(errors, result.errors or [])
        tell(f"{errors}: {plural(len(result.errors or []), 'wrong answer')}")
    return result


def write_errors(path: Path, errors: Sequence[Mapping[str, Any]]) -> None:
    """Write wrong answers, one JSON object a line."""
    try:
        path.write_text("".join(write_json(row) + "\n" for row in errors), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--errors: {path} cannot be written: {error.strerror}; name another file") from None
