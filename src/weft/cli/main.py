"""The command line. Answers go to stdout, progress and errors to stderr; a user's mistake exits with 2."""

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from weft import __version__
from weft.cli import catalog, compare, embed, init, look, serve, vectors
from weft.cli.console import (
    NEEDS_FILES,
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
    check_errors_file,
    check_source,
    print_confusion,
    print_metrics,
    print_pairs,
    print_report,
    print_table,
    read_path,
    tell,
    write_errors,
)
from weft.config.json import write_json
from weft.errors import ConfigError, RoleError, WeftError, disk_remedy
from weft.training.launch import LOST_PEER, check_new, hand_over, launch, lost_peer, restarted
from weft.training.signals import Interrupted

if TYPE_CHECKING:
    from weft.data.readers.column_mapping import ColumnSpec
    from weft.pipeline import Pipeline
    from weft.tasks.inference import EvaluationResult
    from weft.training.distributed import World

MAX_MESSAGE = 4000  # characters of an error

app = typer.Typer(
    name="weft",
    help="Train, compare, inspect and serve sequence models, from n-grams to BERT.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(catalog.data_app, name="data")
app.add_typer(catalog.tokenizer_app, name="tokenizer")
app.add_typer(vectors.vectors_app, name="vectors")
app.add_typer(look.look_app, name="look")


def main() -> None:
    """Run the command line; print an error that a user can cause as one line, and exit with its code."""
    sys.path.insert(0, "")  # a recipe may name a class in a file beside it: my_model:MyModel
    try:
        try:
            app()
        finally:
            sys.stdout.flush()  # here, where the error of a full disk is still one line
    except WeftError as error:
        _exit_with_error(_shorten(str(error)))
    except BrokenPipeError:
        _end_of_pipe()
    except OSError as error:
        if error.filename is None:
            _discard_stdout()
        place = "stdout" if error.filename is None else _shorten(str(error.filename))
        _exit_with_error(f"{place}: {error.strerror or error}; {disk_remedy(error)}")
    except (MemoryError, RuntimeError) as error:
        if lost_peer(error):
            _exit_without_peer(error)
        if not isinstance(error, MemoryError) and not re.search("alloc|memory", str(error), re.IGNORECASE):
            raise
        reason = str(error).splitlines()[0] if str(error) else "an allocation failed"
        _exit_with_error(f"out of memory: {reason}; try a smaller model, train.batch_tokens or beam")
    except Interrupted as stop:
        sys.stderr.write(f"{stop}\n")
        sys.exit(stop.exit_code)
    except SystemExit as end:
        if not isinstance(end.__context__, BrokenPipeError):  # typer exits with 1 on a broken pipe
            raise
        _end_of_pipe()


def _exit_with_error(message: str) -> NoReturn:
    """Print an error, or leave that to `weft train --nproc` that started this process, and exit with 2."""
    if not hand_over(message):
        with suppress(OSError):  # stderr may be what is full
            sys.stderr.write(f"error: {message}\n")
    sys.exit(2)


def _exit_without_peer(error: BaseException) -> NoReturn:
    """Exit without the clean-up of the process group, which would wait for the other process.

    What ended that one is told by itself, or by what started both; if nothing is, PyTorch's error tells the cause.
    """
    reason = _shorten(str(error).partition("\n")[0])
    message = (
        f"process {os.environ['RANK']}: another process of this training has ended, or cannot be reached: {reason}"
    )
    if not hand_over(message):
        sys.stderr.write(f"error: {message}\n")
        sys.stderr.flush()
    os._exit(LOST_PEER)


def _shorten(message: str) -> str:
    """Leave out the middle of a message that would fill the screen."""
    half = MAX_MESSAGE // 2
    return message if len(message) <= MAX_MESSAGE else f"{message[:half]} … {message[-half:]}"


def _end_of_pipe() -> NoReturn:
    """Exit with 0: the reader of the pipe, such as head, has closed it."""
    _discard_stdout()
    sys.exit(0)


def _discard_stdout() -> None:
    """Let what Python flushes on exit go to the null device."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        typer.echo(f"weft {__version__}")
        raise typer.Exit


@app.command("train")
def train_command(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A file, or the name of a recipe: see weft models.")],
    overrides: OverridesArg = None,
    out: Annotated[
        Path | None, typer.Option("--out", parser=read_path, help="The run's directory; runs/NAME if not given.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the last checkpoint in --out.")] = False,
    plan: Annotated[
        bool,
        typer.Option("--plan", help="Train a few steps, save nothing, and estimate the time and memory of the run."),
    ] = False,
    verify: Annotated[
        bool,
        typer.Option("--verify-resume", help="Train 8 steps unbroken and broken off, compare them, and save nothing."),
    ] = False,
    processes: Annotated[
        int, typer.Option("--nproc", min=1, help="Processes on this machine, by torchrun: one for each GPU.")
    ] = 1,
    max_restarts: Annotated[
        int,
        typer.Option("--max-restarts", min=0, help="How often all go on from the last checkpoint if one ends."),
    ] = 0,
    quiet: QuietOption = False,
) -> None:
    """Train a recipe, and evaluate its best model."""
    from weft.pipeline import run_name

    if verify and (plan or resume):
        raise ConfigError("--verify-resume: makes two short trainings of its own; leave --plan and --resume out")
    folder = out or Path("runs") / run_name(recipe)
    if processes > 1 or max_restarts:
        given = {"--resume": resume, "--plan": plan, "--verify-resume": verify, "--quiet": quiet}
        options = [name for name, is_given in given.items() if is_given]
        _launch(recipe, overrides or [], folder, options, processes, max_restarts)
        return
    if plan:
        _plan(recipe, overrides or [], resume)
        return
    if verify:
        _verify_resume(recipe, overrides or [], folder)
        return
    _train(recipe, overrides or [], folder, resume or restarted(), quiet)


def _launch(
    recipe: str, overrides: list[str], folder: Path, options: list[str], processes: int, max_restarts: int
) -> None:
    """Train as several processes; what is wrong with the recipe is found before they start."""
    import torch

    from weft.checkpoint.store import Store
    from weft.formats.pretrained import read_run
    from weft.tasks.factory import make_task
    from weft.training.distributed import World
    from weft.training.parallel import check_parallel
    from weft.training.run import share_update

    resumed = folder if "--resume" in options else None
    run = read_run(recipe, overrides, resumed)
    make_task(run)
    if processes > 1:
        check_parallel(run.train)
        share_update(run, World(0, processes, torch.device("cpu")), Store(resumed).last() if resumed else None)
    if not {"--resume", "--plan", "--verify-resume"} & set(options):
        check_new(folder)
    launch(["train", recipe, *overrides, "--out", str(folder), *options], processes, max_restarts)


def _verify_resume(recipe: str, overrides: list[str], folder: Path) -> None:
    from weft.formats.pretrained import read_run
    from weft.training.verify_resume import verify_resume

    finding = verify_resume(read_run(recipe, overrides), folder, tell)
    if int(os.environ.get("RANK", "0")) == 0:
        typer.echo(finding)


@contextmanager
def _joined(recipe: str, overrides: list[str], resumed: Path | None) -> "Iterator[World]":
    """Join the processes of `torchrun` for the training and the evaluation after it; a single one has no need."""
    import torch

    from weft.formats.pretrained import read_run
    from weft.training.distributed import World, join_world, leave_world

    if "RANK" not in os.environ:
        yield World(0, 1, torch.device("cpu"))
        return
    train = read_run(recipe, overrides, resumed).train
    world = join_world(train.device, train.rank_timeout)
    try:
        yield world
    finally:
        leave_world(world)


def _train(recipe: str, overrides: list[str], folder: Path, resume: bool, quiet: bool) -> None:
    from weft.pipeline import run_name, train
    from weft.tasks.capabilities import positive_label
    from weft.training.multi_seed import read_seeds
    from weft.training.progress_bar import ProgressBar

    with _joined(recipe, overrides, folder if resume else None) as world:
        if world.main and restarted():
            tell("a process has ended: all go on from the last checkpoint")
        try:
            pipeline = train(recipe, overrides, folder, resume, ProgressBar(run_name(recipe), quiet))
        except Interrupted as stop:
            if world.main:
                sys.stderr.write(f"{stop} in {folder}: continue with --resume\n")
            raise typer.Exit(stop.exit_code) from None
        seeds, result = read_seeds(folder), None
        if not seeds and pipeline.has_data:
            with world.sharing():
                result = pipeline.evaluate_in_detail(tell=tell if world.main else None)
    if not world.main:
        return
    if seeds:
        print_table(*seeds.table(positive_label(pipeline.task)), title=f"{len(seeds.runs)} training runs")
    if result:
        print_metrics(result.metrics, result.positive_label)
    typer.echo(f"the best model is in {folder / 'best'}: weft predict {folder}", err=True)


@app.command("evaluate")
def evaluate_command(
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

    _check_evaluation(data, blimp, report, errors)
    column_names = parse_columns(columns, data)
    pipeline = _load(model, device, trust, changes or [], precision)
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


@app.command("predict")
def predict_command(
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
    from weft.cli.inputs import parse_columns, read_stdin, text_records
    from weft.cli.outputs import AnswerFile
    from weft.cli.predict import RowErrors, answer_chunks, print_answers, question_records, write_answers
    from weft.cli.progress import RowProgress
    from weft.ray_engine import is_ray

    check_source(texts, file)
    if is_ray(engine) and (file is None or out is None):
        raise ConfigError(NEEDS_FILES)
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


app.command()(compare.compare)
app.command()(init.init)
app.command()(embed.embed)
app.command()(embed.layers)
app.command()(catalog.models)
app.command()(serve.serve)


@app.command("convert")
def convert_command(
    source: Annotated[
        Path,
        typer.Argument(
            parser=read_path,
            metavar="FROM",
            help="A run, a checkpoint, a Hugging Face folder or hub name, an ELMo folder, an .arpa file.",
        ),
    ],
    target: Annotated[
        Path, typer.Argument(parser=read_path, metavar="TO", help="A new folder, or a file: .onnx, .arpa or .arpa.gz.")
    ],
) -> None:
    """Convert a Hugging Face directory to a checkpoint, or a run to a directory; compare the two models' outputs.

    An encoder with its head goes to an ONNX model where TO ends in .onnx; its tokenizer lies beside it.
    """
    from weft.conversion.convert import convert

    report = convert(source, target)
    if report.checks:
        print_table(*report.table())
        typer.echo(report.largest())
    report.demand()
    typer.echo(report.path)


@app.command("average")
def average_command(
    paths: Annotated[
        list[Path], typer.Argument(parser=read_path, metavar="RUN|CHECKPOINT", help="A run, or checkpoints one by one.")
    ],
    out: Annotated[Path, typer.Option("--out", parser=read_path, help="A new folder for the checkpoint.")],
    last: Annotated[int | None, typer.Option("--last", help="How many of a run's checkpoints; 5 if not given.")] = None,
) -> None:
    """Average the weights of a run's last checkpoints, or of those named; write a checkpoint."""
    from weft.checkpoint.averaging import average

    folders = average(paths, out, last)
    typer.echo(f"{out}: the mean of {', '.join(folder.name for folder in folders)}")


def _check_evaluation(data: str | None, blimp: Path | None, report: bool, errors: Path | None) -> None:
    """Raise an error for options that contradict each other, before a model is loaded."""
    if blimp is not None and data is not None:
        raise ConfigError(f"--blimp: replaces DATA, but both are given: {blimp} and {data}; leave one out")
    for option, given in (("--report", report), ("--errors", errors is not None)):
        if blimp is not None and given:
            raise ConfigError(f"--blimp: compares pairs of sentences, and {option} is of answers; leave one out")
    if errors is not None:
        check_errors_file(errors)


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


def _plan(recipe: str, overrides: list[str], resume: bool) -> None:
    from weft.formats.pretrained import read_run
    from weft.training.estimate import estimate_run

    if resume:
        raise ConfigError("--plan: estimates a run from its first step; leave --resume out")
    estimate = estimate_run(read_run(recipe, overrides), tell)
    if int(os.environ.get("RANK", "0")) == 0:
        print_table(*estimate.table(), title=f"{recipe} on {estimate.place}")


def _load(model: str, device: str, trust: bool, changes: Iterable[str] = (), precision: str = "fp32") -> "Pipeline":
    from weft.pipeline import load

    return load(model, device, trust, changes, precision)


def _load_for_task(model: str, device: str, trust: bool, precision: str, task: str | None) -> "Pipeline":
    return _load(model, device, trust, (), precision).for_task(task)


def _tell_sampling(pipeline: "Pipeline", given: Mapping[str, Any]) -> None:
    """Print a notice if texts are sampled though the call does not ask for it."""
    from weft.decoding.config import DecodingConfig
    from weft.tasks.requests import read_options

    options = read_options(pipeline.task, given)
    if isinstance(options, DecodingConfig) and options.sample and "sample" not in given:
        others = "--set sample=false takes the most probable tokens"
        tell(f"sampled with {options.describe_sampling()}: another seed gives another text, {others}")


def _parse_options(pairs: Iterable[str]) -> dict[str, Any]:
    from weft.config.schema import apply_override

    options: dict[str, Any] = {}
    for pair in pairs:
        apply_override(options, pair)
    return options
