"""`weft compare`: recipes trained with the same budget, in one table and on one page."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from weft.cli.console import EngineOption, QuietOption, print_table, read_path
from weft.errors import ConfigError
from weft.training.signals import Interrupted


def compare(
    recipes: Annotated[
        list[str] | None,
        typer.Argument(metavar="RECIPE", help="Files or names of recipes; one may list variants."),
    ] = None,
    budget: Annotated[
        str | None, typer.Option("--budget", help="Of each recipe: 60s (the default), 5m, 2000steps or 1e15flops.")
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", parser=read_path, help="The folder for the runs and report.html.")
    ] = Path("compared"),
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A change to every recipe.")
    ] = None,
    seeds: Annotated[int | None, typer.Option("--seeds", help="Trainings of each recipe; 1 if not given.")] = None,
    baselines: Annotated[
        bool,
        typer.Option("--baselines/--no-baselines", help="Classical baselines beside labels and tags."),
    ] = True,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the comparison in --out.")] = False,
    add: Annotated[
        list[str] | None, typer.Option("--add", metavar="RECIPE", help="A further recipe for the comparison in --out.")
    ] = None,
    report_only: Annotated[
        bool, typer.Option("--report-only", help="Write the report of the comparison in --out again; train nothing.")
    ] = False,
    quiet: QuietOption = False,
    engine: EngineOption = "local",
) -> None:
    """Train recipes with the same budget; print a table of results, and write report.html."""
    from weft.comparison import run
    from weft.training.progress_bar import ProgressBar

    if not (recipes or resume or add or report_only):
        raise ConfigError("RECIPE: give recipes to compare, or --resume, --add or --report-only with --out")
    try:
        result = (
            run.read_comparison(out)
            if report_only
            else run.compare(
                recipes or (),
                budget,
                out,
                changes or [],
                lambda name: ProgressBar(name, quiet),
                seeds,
                baselines,
                resume,
                add or (),
                engine,
            )
        )
    except Interrupted as stop:
        sys.stderr.write(f"{stop} in {out}: continue with weft compare --resume --out {out}\n")
        raise typer.Exit(stop.exit_code) from None
    print_table(*result.table(), title=f"{result.trained_for} of training each")
    typer.echo(f"what was compared, and how: {result.report}")
