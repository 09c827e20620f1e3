"""The command line. Answers go to stdout, progress and errors to stderr; a user's mistake exits with 2."""

import os
import re
import sys
from contextlib import suppress
from typing import Annotated, NoReturn

import typer

from weft import __version__
from weft.cli import catalog, compare, convert, embed, evaluate, init, look, predict, serve, train, vectors
from weft.errors import WeftError, disk_remedy
from weft.training.launch import LOST_PEER, hand_over, lost_peer
from weft.training.signals import Interrupted

MAX_MESSAGE = 4000  # characters of an error

app = typer.Typer(
    name="weft",
    help="Train, compare, inspect and serve sequence models, from n-grams to BERT.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(train.train)
app.command()(evaluate.evaluate)
app.command()(predict.predict)
app.command()(compare.compare)
app.command()(init.init)
app.command()(embed.embed)
app.command()(embed.layers)
app.command()(catalog.models)
app.command()(serve.serve)
app.command()(convert.convert)
app.command()(convert.average)
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
