"""`weft train`: train a recipe in this process or several, plan it, or verify that it resumes exactly."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli.console import OverridesArg, QuietOption, print_metrics, print_table, read_path, tell
from weft.errors import ConfigError
from weft.training.launch import check_new, launch, restarted
from weft.training.signals import Interrupted

if TYPE_CHECKING:
    from weft.training.distributed import World


def train(
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


def _plan(recipe: str, overrides: list[str], resume: bool) -> None:
    """Print an estimate of the time and memory of a run, from a few steps."""
    from weft.formats.pretrained import read_run
    from weft.training.estimate import estimate_run

    if resume:
        raise ConfigError("--plan: estimates a run from its first step; leave --resume out")
    estimate = estimate_run(read_run(recipe, overrides), tell)
    if int(os.environ.get("RANK", "0")) == 0:
        print_table(*estimate.table(), title=f"{recipe} on {estimate.place}")


def _verify_resume(recipe: str, overrides: list[str], folder: Path) -> None:
    """Print whether a run that is broken off and resumed equals an unbroken one; raise an error if not."""
    from weft.formats.pretrained import read_run
    from weft.training.verify_resume import verify_resume

    finding = verify_resume(read_run(recipe, overrides), folder, tell)
    if int(os.environ.get("RANK", "0")) == 0:
        typer.echo(finding)


def _train(recipe: str, overrides: list[str], folder: Path, resume: bool, quiet: bool) -> None:
    """Train in this process, alone or as one of several, and print the evaluation of the best model."""
    from weft.pipeline import run_name
    from weft.pipeline import train as train_recipe
    from weft.tasks.capabilities import positive_label
    from weft.training.multi_seed import read_seeds
    from weft.training.progress_bar import ProgressBar

    with _joined_processes(recipe, overrides, folder if resume else None) as world:
        if world.main and restarted():
            tell("a process has ended: all go on from the last checkpoint")
        try:
            pipeline = train_recipe(recipe, overrides, folder, resume, ProgressBar(run_name(recipe), quiet))
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


@contextmanager
def _joined_processes(recipe: str, overrides: list[str], resumed: Path | None) -> "Iterator[World]":
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
