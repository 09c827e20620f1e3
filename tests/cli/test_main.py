"""The command line as a whole: every command and its help, a user's mistakes, and what is imported."""

import subprocess
import sys

import pytest
import typer
from tests.cli.conftest import good, refused

import weft
from weft.cli import main as cli

COMMANDS = {
    "train": [
        *("RECIPE", "KEY=VALUE", "--out", "--resume", "--plan", "--verify-resume", "--nproc", "--max-restarts"),
        "--quiet",
    ],
    "evaluate": [
        *("MODEL", "DATA", "--set", "--blimp", "--report", "--errors", "--columns", "--json", "--quiet"),
        *("--task", "--trust", "--device", "--precision"),
    ],
    "predict": [
        *("MODEL", "TEXT", "--file", "--out", "--columns", "--set", "--json", "--stream", "--truncation", "--strict"),
        *("--task", "--quiet", "--trust", "--device", "--precision", "--engine"),
    ],
    "compare": [
        "RECIPE",
        "--engine",
        "--budget",
        "--out",
        "--set",
        "--seeds",
        "--baselines",
        "--resume",
        "--add",
        "--report-only",
        "--quiet",
    ],
    "embed": [
        *("MODEL", "TEXT", "--file", "--columns", "--out", "--pool", "--layers", "--combine", "--normalize"),
        *("--truncate", "--split-special-tokens", "--strict", "--task", "--quiet", "--trust", "--device"),
        *("--precision", "--engine"),
    ],
    "layers": [
        *("MODEL", "DATA", "KEY=VALUE", "--columns", "--layers", "--combine", "--pool"),
        *("--task", "--json", "--trust", "--device", "--precision"),
    ],
    "look attention": ["MODEL", "TEXT", "--out", "--layers", "--heads", "--task", "--trust", "--device"],
    "look gradients": ["MODEL", "TEXT", "--beside", "--out", "--task", "--trust", "--device"],
    "look positions": ["MODEL", "--out", "--trust", "--device"],
    "look neighbours": [
        "MODEL",
        "TEXT",
        "FILE",
        "--word",
        "--top",
        "--columns",
        "--layers",
        "--out",
        "--task",
        "--trust",
        "--device",
    ],
    "models": ["NAME", "--json", "--kernels", "--copy"],
    "serve": [
        *("MODEL", "--host", "--port", "--allow-host", "--origin", "--queue", "--batch-tokens", "--running"),
        *("--time-limit", "--access-log", "--trust", "--device", "--precision"),
    ],
    "convert": ["FROM", "TO", "--task"],
    "average": ["RUN|CHECKPOINT", "--out", "--last"],
    "data list": ["--json"],
    "init": ["FILE", "KEY=VALUE", "--task", "--out"],
    "data check": ["FILE|RECIPE", "KEY=VALUE", "--json"],
    "data show": ["SAMPLE|RECIPE", "KEY=VALUE", "--split", "--rows"],
    "data prepare": ["RECIPE", "KEY=VALUE", "--out", "--workers", "--split", "--engine"],
    "tokenizer train": ["RECIPE", "KEY=VALUE", "--out"],
    "tokenizer show": ["MODEL", "TEXT", "--json", "--trust"],
    "vectors neighbours": ["MODEL", "WORD", "--count", "--json", "--trust"],
    "vectors analogies": ["MODEL", "FILE | A B C", "--count", "--most", "--case", "--json", "--trust"],
    "vectors similarity": ["MODEL", "FILE... | A B", "--most", "--case", "--json", "--trust"],
    "vectors export": ["MODEL", "OUT", "--format", "--json", "--trust"],
}


def commands(group, path=""):
    """Return what every command of a click group takes, the commands of its groups included."""
    parameters = {}
    for name, command in group.commands.items():
        place = f"{path} {name}".strip()
        inner = isinstance(command, typer.core.TyperGroup)
        parameters |= commands(command, place) if inner else {place: set(map(shown_name, command.params))}
    return parameters


def shown_name(parameter):
    return parameter.opts[0] if parameter.opts[0].startswith("-") else parameter.metavar.strip("[].")


def table_of_commands():
    return {name: set(arguments) for name, arguments in COMMANDS.items()}


def test_no_command_and_no_argument_is_missing_above():
    assert commands(typer.main.get_command(cli.app)) == table_of_commands()


def test_a_command_or_an_argument_that_is_missing_above_is_caught():
    group = typer.main.get_command(cli.app)
    group.commands["data"].commands["shuffle"] = group.commands["convert"]
    assert commands(group) == {**table_of_commands(), "data shuffle": {"FROM", "TO", "--task"}}
    group = typer.main.get_command(cli.app)
    group.commands["models"].params.append(group.commands["compare"].params[1])
    assert commands(group) == {**table_of_commands(), "models": {"NAME", "--json", "--kernels", "--copy", "--budget"}}


@pytest.mark.parametrize("command", COMMANDS)
def test_help_names_every_argument(run, command):
    done = good(run(*command.split(), "--help"))
    for name in COMMANDS[command]:
        assert name in done.out


def test_help_and_version(run):
    done = good(run("--help"))
    for command in COMMANDS:
        assert command.split()[0] in done.out
    assert good(run("--version")).out == f"weft {weft.__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["trian"],
        ["train"],
        ["train", "r.yaml", "--outt", "x"],
        ["predict"],
        ["data", "lst"],
        ["--nope"],
        ["average", "--out", "x"],
        ["average", "run"],
        ["convert", "run"],
        ["data", "prepare", "dates"],
        ["layers", "run"],
        ["vectors", "export", "run"],
    ],
)
def test_wrong_usage_exits_with_2_and_says_how(run, arguments):
    done = run(*arguments)
    assert (done.code, done.out) == (2, "")
    assert "Usage" in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "gone.yaml"], ["gone.yaml: neither a file nor a recipe", "weft models lists those"]),
        (["train", "date"], ["did you mean 'dates'?"]),
        (["train", "dates", "train.stesp=3"], ["train.stesp: unknown key; did you mean 'steps'?"]),
        (["train", "dates", "train.steps"], ["an override is key=value"]),
        (["evaluate", "gone"], ["gone: does not exist"]),
        (["predict", "gone", "abc"], ["gone: does not exist"]),
        (["compare", "dates", "dates"], ["different names"]),
        (["average", "gone", "--out", "mean"], ["gone: does not exist"]),
        (["average", "gone", "--out", "mean", "--last", 1], ["--last: must be 2 or more, but is 1 instead"]),
        (["data", "show", "dates", "--split", "tset"], ["--split: must be train, valid or test, but is 'tset'"]),
        (["convert", "gone", "out"], ["gone: does not exist"]),
        (["embed", "gone", "abc"], ["gone: does not exist"]),
        (["layers", "gone", "langid"], ["gone: does not exist"]),
        (["look", "gone", "abc"], ["gone: does not exist"]),
        (["data", "show", "gone"], ["gone: neither a file nor"]),
        (["data", "prepare", "gone", "--out", "corpus"], ["gone: neither a file nor"]),
        (["tokenizer", "train", "gone"], ["gone: neither a file nor"]),
        (["tokenizer", "show", "gone", "abc"], ["gone: does not exist"]),
        (["vectors", "neighbours", "gone", "king"], ["gone: there is no such file"]),
        (["vectors", "analogies", "gone", "questions.txt"], ["gone: there is no such file"]),
        (["vectors", "similarity", "gone", "pairs.tsv"], ["gone: there is no such file"]),
        (["vectors", "export", "gone", "out.txt"], ["gone: there is no such file"]),
    ],
)
def test_a_users_mistake_is_one_line_and_exits_with_2(run, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    refused(run(*arguments), *message)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "words",
    [
        ("train", "dates", "--out", ""),
        ("predict", "", "text"),
        ("predict", "run", "--file", ""),
        ("compare", "dates", "--out", ""),
        ("data", "check", ""),
        ("look", "positions", "--out", ""),
    ],
)
def test_an_empty_path_is_not_the_current_folder(run, words, tmp_path):
    refused(run(*words), "a path is empty")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "words",
    [
        ("train", "dates", "--out", "NAME"),
        ("compare", "dates", "--out", "NAME"),
        ("look", "positions", "--out", "NAME.html"),
        ("models", "dates", "--copy", "NAME"),
        ("predict", "NAME", "text"),
        ("convert", "NAME", "out"),
        ("evaluate", "NAME"),
        ("data", "check", "NAME"),
        ("data", "prepare", "dates", "--out", "NAME"),
    ],
)
def test_a_name_that_no_file_can_have_is_an_error_of_a_line(run, words):
    refused(run(*(word.replace("NAME", "x" * 300) for word in words)), "File name too long")


@pytest.mark.parametrize(
    "words",
    [
        ("data", "show", "dates", "-n", "9" * 30),
        ("data", "prepare", "dates", "--out", "corpus", "--workers", "1000000"),
        ("look", "attention", "run", "text", "--layers", "9" * 5000),
        ("predict", "run", "--file", "rows.csv", "--columns", f"text={'9' * 5000}"),
    ],
)
def test_a_number_that_is_too_large_is_refused(run, words):
    assert run(*words).code == 2


def test_a_long_value_does_not_fill_the_screen(run, recipe_file):
    done = run("train", recipe_file, f"task.labels=[{', '.join(['same'] * 1000)}]", "task.name=classify")
    assert done.code == 2
    assert "must have each label once, and has 'same' 1000 times, but is ['same', 'same'" in done.err
    assert len(done.err) < 500
    assert len(run("models", "x" * 100_000).err) < 5000


@pytest.mark.parametrize("words", [("models",), ("models", "--json"), ("data", "show", "dates", "-n", "2000")])
def test_a_full_disk_under_stdout_is_an_error_of_a_line(words):
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "weft", *words]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=100)
    assert (done.returncode, done.stderr) == (2, "error: stdout: No space left on device; free some room\n")


def modules_after(code):
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}\nprint(*sys.modules)"], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


HELP = """
import io, contextlib
sys.argv = ["weft", *sys.argv[1:], "--help"]
from weft.cli.main import main
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    main()
"""


def test_nothing_heavy_is_imported_before_it_is_needed():
    light = modules_after("import weft")
    assert "weft.errors" in light
    assert not light & {"torch", "numpy", "pydantic", "typer", "yaml", "tokenizers", "rich", "sacrebleu"}
    shown = modules_after(HELP)
    assert "typer" in shown
    assert not shown & {"torch", "numpy", "pydantic", "tokenizers", "sacrebleu"}
