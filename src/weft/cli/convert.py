"""`weft convert` and `weft average`: a checkpoint from another format, or of the mean weights of several."""

from pathlib import Path
from typing import Annotated

import typer

from weft.cli.console import TaskOption, print_table, read_path


def convert(
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
    task: TaskOption = None,
) -> None:
    """Convert a Hugging Face directory to a checkpoint, or a run to a directory; compare the two models' outputs.

    An encoder with its head goes to an ONNX model where TO ends in .onnx; its tokenizer lies beside it.
    """
    from weft.conversion.convert import convert as convert_model

    report = convert_model(source, target, task)
    if report.checks:
        print_table(*report.table())
        typer.echo(report.largest())
    report.demand()
    typer.echo(report.path)


def average(
    paths: Annotated[
        list[Path], typer.Argument(parser=read_path, metavar="RUN|CHECKPOINT", help="A run, or checkpoints one by one.")
    ],
    out: Annotated[Path, typer.Option("--out", parser=read_path, help="A new folder for the checkpoint.")],
    last: Annotated[int | None, typer.Option("--last", help="How many of a run's checkpoints; 5 if not given.")] = None,
) -> None:
    """Average the weights of a run's last checkpoints, or of those named; write a checkpoint."""
    from weft.checkpoint.averaging import average as average_weights

    folders = average_weights(paths, out, last)
    typer.echo(f"{out}: the mean of {', '.join(folder.name for folder in folders)}")
