"""`weft init` writes a recipe that trains, for each task, from files as users have them."""

import csv
import json
from itertools import islice

import pytest

from weft.cli.init import DataSize, propose_recipe
from weft.config.schema import Run
from weft.config.yaml import read_yaml
from weft.data.samples.datasets import read_sample


@pytest.fixture
def weft(run_weft):
    return run_weft


def rows_of(sample, split="train", count=120):
    return [row for _, row in islice(read_sample(sample, split), count)]


def write_csv(name, rows, delimiter=",", header=True):
    with open(name, "w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream, delimiter=delimiter)
        writer.writerows([list(rows[0])] * header + [list(row.values()) for row in rows])


def write_langid():
    write_csv("train.csv", rows_of("langid"), ";")
    write_csv("dev.csv", list(rows_of("langid", "valid", 30)), ";")
    return "train.csv"


def write_pairs():
    rows = rows_of("dates")
    pairs = [{"score": f"{n % 4}.250", "a": row["text"], "b": row["target"]} for n, row in enumerate(rows)]
    write_csv("pairs.csv", pairs, "\t", header=False)
    return "pairs.csv"


def write_dates():
    write_csv("dates.tsv", [{"en": row["text"], "fr": row["target"]} for row in rows_of("dates")], "\t", header=False)
    return "dates.tsv"


def write_dateparts():
    with open("parts.txt", "w", encoding="utf-8") as stream:
        for row in rows_of("dateparts"):
            stream.writelines(f"{word} {tag}\n" for word, tag in zip(row["words"], row["tags"], strict=True))
            stream.write("\n")
    return "parts.txt"


def write_pydoc():
    with open("manual.txt", "w", encoding="utf-8") as stream:
        stream.writelines(" ".join(row["text"].split()) + "\n" for row in rows_of("pydoc", count=20))
    return "manual.txt"


def write_questions():
    with open("questions.jsonl", "w", encoding="utf-8") as stream:
        for n, row in enumerate(rows_of("dates", count=30)):
            answer = row["text"].split()[0]
            stream.write(
                json.dumps({"question": f"When is no. {n}?", "context": row["text"], "answers": [answer]}) + "\n"
            )
    return "questions.jsonl"


FILES = {
    "classify": (write_langid, {"name": "classify", "dropout": 0.2}),
    "pairs": (write_pairs, {"name": "classify", "regression": True, "dropout": 0.5}),
    "translate": (write_dates, {"name": "translate"}),
    "tag": (write_dateparts, {"name": "tag", "crf": True, "dropout": 0.5}),
    "lm": (write_pydoc, {"name": "lm"}),
    "span": (write_questions, {"name": "span"}),
}


@pytest.mark.parametrize("case", FILES)
def test_the_recipe_of_a_file_trains(weft, tmp_path, case):
    write, task = FILES[case]
    file = write()
    code, out, err = weft("init", file)
    assert (code, err) == (0, "")
    assert "weft train mine.yaml" in out
    recipe = read_yaml((tmp_path / "mine.yaml").read_text(), "mine.yaml")
    assert recipe["task"] == task
    assert recipe["data"]["train"] == file
    code, out, err = weft("train", "mine.yaml", "train.steps=2", "train.eval_every=2", "train.device=cpu")
    assert code == 0, err
    assert (tmp_path / "runs" / "mine" / "best").exists()


def test_validation_data_beside_the_file_is_found_and_else_missed_aloud(weft, tmp_path):
    weft("init", write_langid(), "-o", "one.yaml")
    found = read_yaml((tmp_path / "one.yaml").read_text(), "one.yaml")
    assert found["data"]["valid"] == "dev.csv"
    assert found["train"]["eval_every"] > 0
    weft("init", write_dates(), "-o", "two.yaml")
    text = (tmp_path / "two.yaml").read_text()
    assert "# No validation data is given" in text
    assert "valid" not in read_yaml(text, "two.yaml")["data"]


def test_what_is_odd_stands_in_the_recipe_and_rows_that_cannot_be_read_are_skipped(weft, tmp_path):
    (tmp_path / "a.csv").write_text("text,label\n" + "A <b>fine</b> film,1\nA dull one,0\n" * 4 + 'x,"y"z\n')
    assert weft("init", "a.csv")[0] == 0
    text = (tmp_path / "mine.yaml").read_text()
    assert "# Odd: 4 rows with markup such as <br />, the first: a.csv:2 (<b>)" in text
    assert read_yaml(text, "x")["data"]["on_bad_rows"] == "skip"


def test_nothing_is_overwritten(weft, tmp_path):
    (tmp_path / "mine.yaml").write_text("my own")
    code, _, err = weft("init", write_dates())
    assert code == 2
    assert "--out: mine.yaml is there already; give another name with -o, or remove it" in err
    assert (tmp_path / "mine.yaml").read_text() == "my own"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["gone.csv"], "gone.csv: there is no such file"),
        (["dates.tsv", "--task", "tag"], "dates.tsv: tag needs a list of words and a list of tags"),
        (
            ["dates.tsv", "--task", "translat"],
            "--task: nothing can be proposed for 'translat'; did you mean 'translate'?",
        ),
        (["dates.tsv", "-o", "no/such/folder.yaml"], "--out: no/such/folder.yaml cannot be written"),
    ],
)
def test_mistakes_are_told_and_nothing_is_written(weft, tmp_path, words, told):
    write_dates()
    code, _, err = weft("init", *words)
    assert code == 2
    assert told in err
    assert not (tmp_path / "mine.yaml").exists()


def test_a_task_that_is_given_is_taken(weft, tmp_path):
    assert weft("init", write_pairs(), "--task", "translate")[0] == 0
    recipe = read_yaml((tmp_path / "mine.yaml").read_text(), "mine.yaml")
    assert (recipe["task"]["name"], recipe["data"]["columns"]) == ("translate", {"text": 1, "target": 2})


class Check:
    """A check of data with a column of tags, of which there is nothing else to see."""

    def __init__(self, task):
        self.task, self.fields, self.profiles = {"name": task}, {0: "text", 1: "tags"}, {"train": self}

    labels = ("B-LOC", "O")

    def column(self, name):
        return self


@pytest.mark.parametrize("task", ["classify", "tag", "translate", "lm", "span"])
@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("rows", [10, 1500, 10_000, 60_000, 3_000_000])
@pytest.mark.parametrize(("words", "characters"), [(2.0, True), (20.0, False), (400.0, False)])
def test_every_size_of_data_gets_a_valid_recipe(task, gpu, rows, words, characters):
    size = DataSize(rows, words, int(20 * words), int(2 * words), characters, gpu)
    recipe = propose_recipe(Check(task), size)
    sections = {name: getattr(recipe, name) for name in ("task", "tokenizer", "model", "train")}
    run = Run.parse({**sections, "data": {"train": "a.csv", **recipe.data}})
    assert 100 <= run.train.steps <= 20_000
    assert run.train.precision == ("bf16" if gpu else "fp32")


def test_more_data_gets_a_larger_model():
    models = [propose_recipe(Check("classify"), DataSize(n, 20, 40, 30, False, False)).model for n in (500, 50_000)]
    assert models[0]["width"] < models[1]["width"]
