"""The command line: every command in this process, and what only a real process can show in one of its own."""

import csv
import json
import os
import signal
import subprocess
import sys
import threading
import time
from itertools import pairwise

import pytest
import typer
from tests.conftest import recipe_for, reversed_pairs

import weft
from weft.checkpoint.store import Store
from weft.cli import inputs
from weft.cli import main as cli
from weft.config.schema import read_preset
from weft.training.reporting import read_metrics

WORDS = [word for word, _ in reversed_pairs()]


class Done:
    def __init__(self, code, out, err):
        self.code, self.out, self.err = code, out, err
        self.lines = out.splitlines()


@pytest.fixture
def run(monkeypatch, capsys):
    """Return what runs one command in this process."""
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)

    def command(*arguments):
        monkeypatch.setattr(sys, "argv", ["weft", *map(str, arguments)])
        monkeypatch.setattr(sys, "path", list(sys.path))
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            cli.main()
        return Done(end.value.code or 0, *capsys.readouterr())

    return command


def good(done):
    assert done.code == 0, done.err
    return done


def refused(done, *message):
    """See that a mistake gives one line on stderr, nothing on stdout, and the exit code 2."""
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1
    assert "Traceback" not in done.err
    for part in message:
        assert part in done.err
    return done


def process(*arguments, **settings):
    command = [sys.executable, "-m", "weft", *map(str, arguments)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, **{**pipes, **settings})


def finished(running, data=None):
    out, err = running.communicate(data, timeout=120)
    return Done(running.returncode, out.decode(), err.decode())


# What commands there are.


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


# train


def test_train_ends_with_the_evaluation(run, recipe_file, tmp_path):
    done = good(run("train", recipe_file, "train.steps=4", "--out", tmp_path / "run"))
    assert [line.split()[0] for line in done.lines if line.split()] == [
        "metric", "────────────────────", "loss", "exact_match", "bleu",
    ]  # fmt: skip
    *progress, split, last = done.err.splitlines()
    assert split == "evaluated on the validation data: the recipe has no data.test"
    assert last == f"the best model is in {tmp_path / 'run' / 'best'}: weft predict {tmp_path / 'run'}"
    assert [line.partition(",")[0] for line in progress] == ["recipe: step 2 (50%)", "recipe: step 4 (100%)"]
    assert "tokens/s, valid loss " in progress[-1]
    assert weft.load(tmp_path / "run").run.train.steps == 4
    refused(run("train", recipe_file, "--out", tmp_path / "run"), "holds a run already; go on with it by --resume")
    good(run("train", recipe_file, "train.steps=6", "--out", tmp_path / "run", "--resume"))
    assert Store(tmp_path / "run").steps()[-1] == 6


def test_a_plan_is_printed_and_nothing_else_is_done(run, recipe_file, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    done = good(run("train", recipe_file, "train.steps=4", "--plan"))
    assert done.lines[0].strip() == f"{recipe_file} on cpu"
    for name in ("parameters", "operations in all", "MFU", "memory", "in all", "checkpoints"):
        assert any(line.strip().startswith(name) for line in done.lines)
    assert done.err == ""
    refused(run("train", recipe_file, "--plan", "--resume"), "--plan: estimates a run from its first step")
    refused(run("train", recipe_file, "data.train=gone.tsv", "--plan"), "gone.tsv: there is no such file")
    assert not list((tmp_path / "empty").iterdir())


def test_a_run_goes_to_runs_and_its_recipes_name(run, recipe_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    good(run("train", "recipe.yaml", "train.steps=1"))
    assert (tmp_path / "runs" / "recipe" / "best" / "model.safetensors").is_file()


def test_without_data_to_evaluate_on_training_is_still_good(run, recipe_file, tmp_path):
    done = good(run("train", recipe_file, "data.valid=null", "train.steps=2", "--out", tmp_path / "run"))
    assert done.out == ""
    assert "the best model is in" in done.err


def test_notices_go_to_stderr(run, recipe_file, tmp_path, pairs_file):
    with pairs_file.open("a") as file:
        file.write("one column\n")
    done = good(run("train", recipe_file, "train.steps=1", "data.on_bad_rows=skip", "--out", tmp_path / "run"))
    assert "data.train: skipped 1 row" in done.err
    assert "skipped" not in done.out


def test_a_file_beside_may_be_named(run, recipe_file, tmp_path, monkeypatch):
    (tmp_path / "beside_me.py").write_text(
        "from weft.models.seq2seq.model import Seq2Seq\n\n\nclass MyModel(Seq2Seq):\n    pass\n"
    )
    monkeypatch.chdir(tmp_path)
    good(run("train", recipe_file, "model.name=beside_me:MyModel", "train.steps=1", "--out", "run"))
    refused(run("predict", "run", "abc"), "beside_me:MyModel", "--trust")
    refused(run("evaluate", "run"), "--trust")
    assert len(good(run("predict", "run", "abc", "--trust")).lines) == 1
    del sys.modules["beside_me"]


# evaluate


def test_evaluate(run, trained_run, tmp_path):
    table = good(run("evaluate", trained_run))
    assert "exact_match   1.0000" in table.out
    done = good(run("evaluate", trained_run, "--json"))
    assert set(json.loads(done.out)) == {"loss", "exact_match", "bleu"}
    assert (len(done.lines), done.err) == (1, "evaluated on the validation data: the recipe has no data.test\n")
    (tmp_path / "one.tsv").write_text("abc\tabc\n")
    done = good(run("evaluate", trained_run / "best", tmp_path / "one.tsv", "--json"))
    assert json.loads(done.out)["loss"] > 1
    assert done.err == ""
    refused(run("evaluate", trained_run, tmp_path / "gone.tsv"), "gone.tsv: there is no such file")
    refused(run("evaluate", trained_run, "langid"), "a row of langid has text, label")
    refused(run("evaluate", trained_run, "--device", "gpu"), "'gpu' cannot be used here")


@pytest.fixture(scope="module")
def labelled_run(tmp_path_factory):
    """Return the directory of a classifier of two labels that is wrong twice: equal texts have other labels."""
    folder = tmp_path_factory.mktemp("labelled")
    rows = [("a b", "no")] * 3 + [("c d", "yes")] * 4 + [("a b", "yes"), ("c d", "no")]
    (folder / "rows.tsv").write_text("".join(f"{text}\t{label}\n" for text, label in rows))
    recipe = recipe_for(folder / "rows.tsv") | {
        "task": {"name": "classify"},
        "tokenizer": {"name": "words"},
        "model": {"name": "rnn", "width": 8},
    }
    recipe["data"] = {"train": str(folder / "rows.tsv"), "valid": str(folder / "rows.tsv")}
    weft.train(recipe, ["train.steps=60", "train.lr=0.05"], folder / "run")
    return folder / "run"


def test_evaluate_reports_on_each_label(run, labelled_run):
    done = good(run("evaluate", labelled_run, "--report"))
    cells = [line.split() for line in done.lines if line.strip()]
    assert "classification report, by label" in done.out
    assert ["label", "precision", "recall", "f1", "support"] in cells
    assert ["no", "0.7500", "0.7500", "0.7500", "4"] in cells
    assert ["yes", "0.8000", "0.8000", "0.8000", "5"] in cells
    assert ["macro", "avg", "0.7750", "0.7750", "0.7750", "9"] in cells
    assert ["f1", "(yes)", "0.8000"] in cells, "a binary F1 says which label it is of"
    assert "classification report" not in good(run("evaluate", labelled_run)).out
    told = json.loads(good(run("evaluate", labelled_run, "--json")).out)
    assert told["report"]["classes"]["yes"]["f1"] == told["f1"] == pytest.approx(0.8)
    assert told["positive_label"] == "yes"


def test_evaluate_writes_the_wrong_answers_the_most_confident_first(run, labelled_run, tmp_path):
    path = tmp_path / "errors.jsonl"
    done = good(run("evaluate", labelled_run, "--errors", path, "--json"))
    assert f"{path}: 2 wrong answers" in done.err
    errors = [json.loads(line) for line in path.read_text().splitlines()]
    assert {(error["text"], error["gold"], error["predicted"]) for error in errors} == {
        ("a b", "yes", "no"),
        ("c d", "no", "yes"),
    }
    assert 1 > errors[0]["score"] >= errors[1]["score"] > 0.5
    assert set(errors[0]) == {"text", "gold", "predicted", "score"}
    answer = json.loads(good(run("predict", labelled_run, errors[0]["text"], "--json")).out)
    assert (answer["label"], answer["scores"][answer["label"]]) == (errors[0]["predicted"], errors[0]["score"])


def test_a_report_or_errors_that_cannot_be_are_refused_before_the_work(run, trained_run, labelled_run, tmp_path):
    refused(run("evaluate", labelled_run, "--errors", tmp_path / "errors.csv"), "--errors: must end in .jsonl, but is")
    refused(run("evaluate", labelled_run, "--errors", tmp_path / "no" / "x.jsonl"), "--errors: must be a file in a")
    (tmp_path / "folder.jsonl").mkdir()
    refused(run("evaluate", labelled_run, "--errors", tmp_path / "folder.jsonl"), "--errors: must be a file in a")
    refused(run("evaluate", trained_run, "--blimp", tmp_path, "--report"), "--blimp: compares pairs of sentences, and")
    refused(run("evaluate", trained_run, "--blimp", tmp_path, "--errors", "x.jsonl"), "--errors is of answers")
    assert [path.name for path in tmp_path.iterdir()] == ["folder.jsonl"]


def test_a_report_on_answers_that_are_no_labels_is_by_the_length_of_the_input(run, trained_run, labelled_run):
    assert "by the length of the input" in good(run("evaluate", trained_run, "--report")).out
    groups = json.loads(good(run("evaluate", trained_run, "--report", "--json")).out)["by_length"]["groups"]
    assert groups[0]["shortest"] <= groups[-1]["longest"]
    assert "by_length" not in json.loads(good(run("evaluate", trained_run, "--json")).out)
    assert "length" not in good(run("evaluate", labelled_run, "--report")).out


def test_labels_that_look_like_markup_are_shown_as_they_are(run, recipe, tmp_path):
    rows = tmp_path / "rows.tsv"
    rows.write_text("ab\t[/b]\ncd\t[red]\n")
    recipe |= {"task": {"name": "classify"}, "model": {"name": "rnn", "width": 4}}
    recipe["data"] = {"train": str(rows), "valid": str(rows)}
    weft.train(recipe, ["train.steps=1"], tmp_path / "run")
    done = good(run("evaluate", tmp_path / "run"))
    (header,) = [line.split() for line in done.lines if "predicted" in line]
    assert header == ["true", "\\", "predicted", "[/b]", "[red]"]
    refused(run("evaluate", tmp_path / "run", "langid"), "langid:test:1: the label ", " is not in task.labels")
    refused(
        run("predict", tmp_path / "run", "a", "--set", "threshold=0.3"), "options.threshold: the task 'classify', as"
    )


# predict


def test_predict_answers_texts_and_nothing_else_is_on_stdout(run, trained_run):
    done = good(run("predict", trained_run, *WORDS[:3]))
    assert done.lines == [word[::-1] for word in WORDS[:3]]
    assert done.err == ""
    done = good(run("predict", trained_run, *WORDS[:3], "--json"))
    answers = [json.loads(line) for line in done.lines]
    assert [answer["text"] for answer in answers] == [word[::-1] for word in WORDS[:3]]


def test_predict_keeps_the_order_and_the_blank_lines_of_a_file(run, trained_run, reverser, tmp_path):
    inputs = [WORDS[index % len(WORDS)] if index % 7 else "" for index in range(3000)]
    (tmp_path / "in.txt").write_text("\n".join(inputs) + "\n")
    done = good(run("predict", trained_run, "--file", tmp_path / "in.txt"))
    blank = reverser("")[0]["text"]
    assert done.out.split("\n") == [word[::-1] or blank for word in inputs] + [""]


def test_predict_reads_objects(run, trained_run, tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"text": word}) + "\n" for word in WORDS[:3]))
    assert good(run("predict", trained_run, "-f", path)).lines == [word[::-1] for word in WORDS[:3]]
    with path.open("a") as file:
        file.write('{"txt": "abc"}\n')
    done = good(run("predict", trained_run, "-f", path))
    assert done.lines == [word[::-1] for word in WORDS[:3]] + [""]
    assert f"{path}:4: no 'text'; did you mean 'txt'?" in done.err


def test_predict_and_evaluate_read_one_csv_alike(run, trained_run, tmp_path):
    path = tmp_path / "in.csv"
    rows = [(str(number), word, word[::-1]) for number, word in enumerate(WORDS[:5])]
    path.write_text("".join(",".join(row) + "\n" for row in [("id", "word", "target"), *rows]))
    expected = [word[::-1] for word in WORDS[:5]]
    assert good(run("predict", trained_run, "-f", path, "--columns", "text=word")).lines == expected
    assert good(run("predict", trained_run, "-f", path, "--columns", "text=1")).lines == expected
    metrics = json.loads(good(run("evaluate", trained_run, path, "--columns", "text=word", "--json")).out)
    assert metrics["exact_match"] == 1
    refused(run("predict", trained_run, "-f", path), f"{path}:1: no column 'text'", "--columns FIELD=COLUMN")
    refused(run("evaluate", trained_run, "--columns", "text=word"), "--columns: are those of a file")
    refused(run("predict", trained_run, "a", "--columns", "text=word"), "--columns: are those of a file")
    out = tmp_path / "out.csv"
    assert good(run("predict", trained_run, "-f", path, "--columns", "text=word", "-o", out)).out == f"{out}\n"
    with out.open(newline="") as file:
        written = list(csv.DictReader(file))
    assert [(row["id"], row["word"], row["target"], row["text"]) for row in written] == [(*row, row[2]) for row in rows]


def test_a_bad_row_has_an_error_for_an_answer_and_the_others_theirs(run, trained_run, tmp_path):
    path, long = tmp_path / "in.jsonl", "a" * 2000
    path.write_text("".join(json.dumps({"id": 1, "text": text}) + "\n" for text in (WORDS[0], long, WORDS[1])))
    done = good(run("predict", trained_run, "-f", path))
    assert done.lines == [WORDS[0][::-1], "", WORDS[1][::-1]]
    message = f"{path}:2: got 2,000 tokens, data.max_length is 1,024; shorten it, or set data.truncation: cut"
    assert done.err.startswith(message)
    assert done.err.endswith("\n1 row of 3 could not be answered\n")  # the error itself is there once
    assert done.err.count("got 2,000 tokens") == 1
    answers = [json.loads(line) for line in good(run("predict", trained_run, "-f", path, "--json")).lines]
    assert [answer.get("text") for answer in answers] == [WORDS[0][::-1], None, WORDS[1][::-1]]
    assert answers[1]["error"].startswith(message)
    done = run("predict", trained_run, "-f", path, "--strict")
    assert (done.code, done.lines) == (2, [WORDS[0][::-1]])
    assert done.err.startswith(f"error: {message}")
    done = good(run("predict", trained_run, "-f", path, "--truncation", "cut", "--set", "max_length=5"))
    assert done.lines[::2] == [WORDS[0][::-1][:5], WORDS[1][::-1][:5]]
    assert done.err == "cut 1 sequence longer than data.max_length=1024\n"
    refused(run("predict", trained_run, "-f", path, "--truncation", "window"), "'translate' cannot use 'window'")
    refused(run("predict", trained_run, "-f", path, "--truncation", "ct"), "truncation: must be error, cut, window")


def test_where_no_row_is_answered_that_is_an_error(run, trained_run, tmp_path):
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_text('{"txt": "a"}\n{"txt": "b"}\n')
    done = refused(
        run("predict", trained_run, "-f", path, "-o", out), "not one of 2 rows could be answered; the first: "
    )
    assert f"{path}:1: no 'text'" in done.err
    assert not out.exists()


def test_predict_with_options(run, trained_run):
    done = good(run("predict", trained_run, WORDS[0], "--json", "--set", "beam=3", "--set", "num_return_sequences=3"))
    assert len(json.loads(done.out)["candidates"]) == 3
    hot = ["--set", "sample=true", "--set", "temperature=3"]
    first, again = (good(run("predict", trained_run, *WORDS[:20], *hot)).lines for _ in range(2))
    assert first == again
    assert first != good(run("predict", trained_run, *WORDS[:20], *hot, "--set", "seed=1")).lines
    refused(run("predict", trained_run, "a", "--set", "beem=3"), "options.beem: unknown key; did you mean 'beam'?")
    refused(run("predict", trained_run, "a", "--set", "beam=x"), "options.beam: ")
    refused(run("predict", trained_run, "a", "--set", "beam"), "an override is key=value")


def test_predict_refuses_options_that_have_no_effect(run, trained_run):
    for option in ("temperature=0.5", "top_k=3", "top_p=0.5", "seed=1"):
        key = option.partition("=")[0]
        for how in ([], ["--stream"], ["--json"]):
            done = run("predict", trained_run, "abc", "--set", option, *how)
            refused(done, f"options.{key}: ", "has no effect: sample is false", "set sample: true")
    refused(run("predict", trained_run, "a", "--set", "alpha=1"), "options.alpha: 1.0 has no effect: beam and")
    refused(
        run("predict", trained_run, "a", "--set", "sample=true", "--set", "temperature=1e300"), "less than or equal"
    )
    refused(run("evaluate", trained_run, "--set", "task.decode.top_k=3"), "task.decode.top_k: 3 has no effect")
    refused(run("train", trained_run / "run.yaml", "task.decode.top_p=0.5"), "task.decode.top_p: 0.5 has no effect")


def test_predict_shows_all_that_was_asked_for(run, trained_run):
    several = ["--set", "beam=3", "--set", "num_return_sequences=3"]
    (line,) = good(run("predict", trained_run, WORDS[0], *several)).lines
    candidates = json.loads(good(run("predict", trained_run, WORDS[0], *several, "--json")).out)["candidates"]
    assert line.split("\t") == [candidate["text"] for candidate in candidates]
    assert len(candidates) == 3


def test_predict_avoids_bad_words_and_repetition(run, trained_run):
    (plain,) = good(run("predict", trained_run, WORDS[0])).lines
    (other,) = good(run("predict", trained_run, WORDS[0], "--set", f"bad_words=[{plain[-2:]}]")).lines
    assert plain[-2:] not in other
    doubled = [word for word in WORDS if any(a == b for a, b in pairwise(word))]
    (once,) = good(run("predict", trained_run, doubled[0], "--set", "no_repeat_ngram_size=1")).lines
    assert len(once) == len(set(once))
    assert once != doubled[0][::-1]


def test_predict_says_that_a_language_model_samples(run, tmp_path):
    (tmp_path / "train.txt").write_text("the cat sat on the mat\n" * 20 + "the dog sat on a log\n" * 20)
    recipe = {
        "task": {"name": "lm"},
        "data": {"train": str(tmp_path / "train.txt")},
        "tokenizer": {"name": "characters"},
        "model": {"name": "ngram", "order": 2},
        "train": {"steps": 1},
    }
    weft.train(recipe, out=tmp_path / "run")
    ask = ["predict", tmp_path / "run", "the", "the", "a"]
    done = good(run(*ask))
    assert done.err.startswith("sampled with temperature 0.7, top_p 0.95, seed 0: ")
    assert "--set sample=false" in done.err
    assert done.err.count("\n") == 1
    assert good(run(*ask)).lines == done.lines, "the seed makes it reproducible"
    assert good(run(*ask, "--set", "seed=1")).lines != done.lines
    assert done.lines[0] != done.lines[1], "each example has its own draws"
    for how in (["--json"], ["--set", "sample=true"], ["--set", "sample=false"]):
        assert good(run(*ask, *how)).err == ""
    greedy = good(run(*ask, "--set", "sample=false")).lines
    assert greedy[0] == greedy[1]
    assert good(run("predict", tmp_path / "run", "the", "--stream")).err == done.err
    refused(run("evaluate", tmp_path / "run", tmp_path / "train.txt", "--report"), "--report: is of answers, and the")


def test_samples_do_not_hang_on_how_the_input_comes_in(run, trained_run, tmp_path, monkeypatch):
    (tmp_path / "in.txt").write_text("".join(f"{word}\n" for word in WORDS))
    hot = ["predict", trained_run, "--set", "sample=true", "--set", "temperature=3"]
    whole = good(run(*hot, "--file", tmp_path / "in.txt")).lines
    for at_once in (1, 7):
        monkeypatch.setattr(inputs, "MAX_CHUNK", at_once)
        assert good(run(*hot, "--file", tmp_path / "in.txt")).lines == whole
    assert good(run(*hot, *WORDS)).lines == whole
    assert good(run(*hot, *WORDS[1:])).lines != whole[1:]


def test_predict_streams(run, trained_run):
    assert good(run("predict", trained_run, *WORDS[:2], "--stream")).lines == [word[::-1] for word in WORDS[:2]]
    refused(run("predict", trained_run, "a", "--stream", "--set", "beam=2"), "a stream is one sequence")


def test_predict_refuses_what_it_cannot_read(run, trained_run, tmp_path):
    refused(run("predict", trained_run, "-f", tmp_path / "gone.txt"), "gone.txt: there is no such file")
    refused(run("predict", trained_run, "abc", "-f", tmp_path / "gone.txt"), "--file: replaces TEXT")
    refused(run("predict", trained_run, "a" * 2000), "example 1: got 2,000 tokens, data.max_length is 1,024")
    refused(run("predict", trained_run, "a\udc80b"), "surrogate")


# compare, models, data, tokenizer


def test_compare_prints_tables_and_writes_a_page(run, recipe, recipe_file, tmp_path):
    other = tmp_path / "fixed.yaml"
    other.write_text(json.dumps({**recipe, "model": {"name": "seq2seq", "width": 16, "attention": "none"}}))
    done = good(
        run("compare", other, recipe_file, "--budget", 3, "--out", tmp_path / "out", "--set", "train.lr=0.02", "-q")
    )
    assert done.lines[0].strip() == "3 steps of training each"
    assert "exact match" in done.out
    assert done.lines[-1] == f"what was compared, and how: {tmp_path / 'out' / 'report.html'}"
    assert (tmp_path / "out" / "report.html").read_text().startswith("<!doctype html>")
    assert weft.load(tmp_path / "out" / "fixed").run.train.lr == 0.02
    assert done.err == ""
    again = good(run("compare", "--report-only", "--out", tmp_path / "out"))
    assert again.out == done.out
    assert good(run("compare", "--resume", "--out", tmp_path / "out", "-q")).out == done.out
    refused(run("compare"), "RECIPE: give recipes to compare, or --resume, --add or --report-only")
    refused(run("compare", "--report-only", "--out", tmp_path / "none"), "no comparison was finished")


def test_compare_can_be_stopped(run, recipe_file, tmp_path):
    rows = tmp_path / "out" / "recipe" / "metrics.jsonl"

    def stop():
        while not (rows.exists() and read_metrics(rows)):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=stop, daemon=True)
    thread.start()
    done = run("compare", recipe_file, "--budget", 10**7, "--out", tmp_path / "out", "--quiet")
    thread.join()
    out = tmp_path / "out"
    told = f"stopped by SIGINT; saved in {out}: continue with weft compare --resume --out {out}\n"
    assert (done.code, done.out, done.err) == (130, "", told)


def test_average(run, recipe_file, tmp_path):
    folder = tmp_path / "run"
    changes = ["train.save_every=2", "train.steps=6", "train.average=3", "data.valid=null"]
    done = good(run("train", recipe_file, *changes, "--out", folder))
    assert "the average of the last 3 checkpoints is the best model" in done.err
    done = good(run("average", folder, "--last", 2, "--out", tmp_path / "mean"))
    assert done.out == f"{tmp_path / 'mean'}: the mean of step-00000004, step-00000006\n"
    assert len(good(run("predict", tmp_path / "mean", "abc")).lines) == 1
    refused(run("average", folder, "--last", 2, "--out", tmp_path / "mean"), "mean: exists already")
    refused(run("average", folder, "--out", tmp_path / "five"), "its last 5 checkpoints", "it has step-00000002, ")
    refused(run("average", folder / "last", "--out", tmp_path / "one"), "name two checkpoints or more, or a run")


def test_models(run):
    done = good(run("models"))
    for name in ("dates", "seq2seq", "translate", "wordpiece"):
        assert name in done.out
    raw = json.loads(good(run("models", "--json")).out)
    assert raw["recipes"]["dates"]["model"]["name"] == "seq2seq"
    assert {"cnn", "seq2seq"} <= set(raw["models"])
    assert "unigram" in raw["tokenizers"]
    assert "transformer-base   transformer   width: 512, heads: 8, layers: 6" in done.out
    assert raw["presets"]["transformer-big"] == read_preset("transformer-big")


def test_data_list(run):
    done = good(run("data", "list"))
    names = [row["name"] for row in json.loads(good(run("data", "list", "--json")).out)]
    assert {"dates", "langid", "dateparts", "pydoc", "reviews"} <= set(names)
    assert all(name in done.out for name in names)


def test_data_show(run, recipe_file):
    rows = [json.loads(line) for line in good(run("data", "show", "langid", "-n", 3, "--split", "test")).lines]
    assert len(rows) == 3
    assert set(rows[0]) == {"text", "label"}
    rows = [json.loads(line) for line in good(run("data", "show", recipe_file, "-n", 0)).lines]
    assert [(row["text"], row["target"]) for row in rows] == reversed_pairs()
    assert len(good(run("data", "show", recipe_file)).lines) == 10
    refused(run("data", "show", recipe_file, "--split", "test"), "data.test: required here, but not given")


def test_tokenizer_train_and_show(run, recipe_file, trained_run, tmp_path):
    out = tmp_path / "deep" / "tokenizer"
    done = good(run("tokenizer", "train", recipe_file, "tokenizer.lowercase=true", "--out", out))
    assert done.out == f"9 tokens in {out / 'tokenizer.json'}\n"
    assert json.loads((out / "tokenizer.json").read_text())["normalizer"]
    refused(run("tokenizer", "train", recipe_file, "--out", recipe_file), "--out:", "cannot be written")
    shown = good(run("tokenizer", "show", trained_run, "abz"))
    assert shown.lines[1].split() == ["token", "id", "start", "end", "text"]
    rows = json.loads(good(run("tokenizer", "show", trained_run, "abz", "--json")).out)
    assert [(row["token"], row["start"], row["end"]) for row in rows] == [("a", 0, 1), ("b", 1, 2), ("<unk>", 2, 3)]


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


# What only a real process can show.


@pytest.mark.parametrize("words", [("models",), ("models", "--json"), ("data", "show", "dates", "-n", "2000")])
def test_a_full_disk_under_stdout_is_an_error_of_a_line(words):
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "weft", *words]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=100)
    assert (done.returncode, done.stderr) == (2, "error: stdout: No space left on device; free some room\n")


def test_a_pipe_gets_answers_and_only_answers(trained_run):
    data = "".join(f"{word}\n" for word in WORDS).encode()
    done = finished(process("predict", trained_run, "--json"), data)
    assert (done.code, done.err) == (0, "")
    assert [json.loads(line)["text"] for line in done.lines] == [word[::-1] for word in WORDS]


def test_a_mistake_in_a_pipe_that_stays_open_is_one_line(trained_run):
    running = process("predict", trained_run, "--strict")
    running.stdin.write(WORDS[0].encode() + b"\nab\xff\n")
    running.stdin.flush()  # and is not closed: the reader would wait for more
    running.wait(timeout=120)
    done = Done(running.returncode, running.stdout.read().decode(), running.stderr.read().decode())
    for pipe in (running.stdin, running.stdout, running.stderr):
        pipe.close()
    assert done.code == 2, done.err
    assert done.lines == [WORDS[0][::-1]]
    assert done.err.startswith("error: stdin:2: not UTF-8: byte 0xff at offset 2 of the line; convert it")
    assert done.err.count("\n") == 1


def test_a_user_who_types_is_answered_at_once_and_may_leave(trained_run):
    running = process("predict", trained_run, "--set", "max_length=60")
    for word in WORDS[:3]:
        running.stdin.write(f"{word}\n".encode())
        running.stdin.flush()
        assert running.stdout.readline().decode() == word[::-1] + "\n"
    running.stdout.close()  # as head does
    running.stdin.write(b"abcde\n" * 5000)
    done = running.communicate(timeout=120)
    assert (running.returncode, done[1]) == (0, b"")


def test_an_option_that_is_wrong_while_the_pipe_stays_open(trained_run):
    running = process("predict", trained_run, "--set", "beem=2")
    running.stdin.write(b"abc\n")
    running.stdin.flush()
    running.wait(timeout=120)
    assert running.stderr.read() == b"error: options.beem: unknown key; did you mean 'beam'?\n"
    assert running.returncode == 2
    for pipe in (running.stdin, running.stdout, running.stderr):
        pipe.close()


def wait_for(folder, rows, running):
    """Wait until a run in another process has reported so often."""
    until = time.monotonic() + 120
    while time.monotonic() < until:
        path = folder / "metrics.jsonl"
        if path.exists() and len(read_metrics(path)) >= rows:
            return
        assert running.poll() is None, running.stderr.read()
        time.sleep(0.02)
    raise AssertionError("it does not train")


STOPPED = ["train.report_every=1", "model.attention=none", "data.workers=2"]


def test_signals_save_and_resuming_finishes(run, recipe, recipe_file, tmp_path):
    """One signal is sent to the trainer, and one, as a terminal's Ctrl-C, to the workers that collate for it, too."""
    folder = tmp_path / "run"
    command = ["train", recipe_file, "train.steps=10000000", *STOPPED, "--out", folder, "--quiet"]
    first = process(*command)
    wait_for(folder, 5, first)
    with pytest.raises(weft.CheckpointError, match=rf"another run \(process {first.pid}\) is training in .*run; wait"):
        weft.train(recipe, [], folder)
    first.send_signal(signal.SIGTERM)
    done = finished(first)
    assert (done.code, done.out) == (143, "")
    assert done.err == f"stopped by SIGTERM; saved in {folder}: continue with --resume\n"
    step = Store(folder).steps()[-1]
    assert step == read_metrics(folder / "metrics.jsonl")[-1]["step"] > 0

    second = process(*command, "--resume", start_new_session=True)
    wait_for(folder, step + 5, second)
    os.killpg(second.pid, signal.SIGINT)
    done = finished(second)
    assert (done.code, done.out) == (130, "")
    assert done.err == f"stopped by SIGINT; saved in {folder}: continue with --resume\n"
    stopped = Store(folder).steps()[-1]
    assert stopped > step

    good(run(*command[:2], f"train.steps={stopped + 3}", *STOPPED, "--out", folder, "--resume"))
    rows = read_metrics(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, stopped + 4))
    unbroken = tmp_path / "unbroken"
    weft.train(recipe, [f"train.steps={stopped + 3}", *STOPPED], unbroken)
    assert [row["loss"] for row in rows] == [row["loss"] for row in read_metrics(unbroken / "metrics.jsonl")]


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
    assert not shown & {"torch", "numpy", "tokenizers", "sacrebleu"}


def test_a_schedulers_signal_to_the_whole_group_spares_the_workers(recipe_file, tmp_path):
    folder = tmp_path / "run"
    changes = ["train.steps=10000000", *STOPPED, "--out", folder, "--quiet"]
    running = process("train", recipe_file, *changes, start_new_session=True)
    wait_for(folder, 5, running)
    os.killpg(running.pid, signal.SIGTERM)
    done = finished(running)
    assert done.code == 143, done.err
    assert Store(folder).steps()[-1] == read_metrics(folder / "metrics.jsonl")[-1]["step"] > 0
