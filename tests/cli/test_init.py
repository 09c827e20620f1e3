"""`weft init` writes a recipe that trains, for each task, from files as users have them."""

import csv
import json
from itertools import islice

import pytest

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


def write_choices():
    rows = [
        {"prompt": row["text"], "choice1": row["target"], "choice2": f"no. {n}", "label": n % 2}
        for n, row in enumerate(rows_of("dates"))
    ]
    write_csv("choices.csv", rows)
    return "choices.csv"


def write_sentences():
    with open("books.txt", "w", encoding="utf-8") as stream:
        for n, row in enumerate(rows_of("pydoc", count=25)):
            stream.write(f"No. {n}.\n{' '.join(row['text'].split())[:200]}.\nThe end.\n\n")
    return "books.txt"


FILES = {
    "choice": (write_choices, {"name": "choice", "dropout": 0.3}),
    "mlm": (write_sentences, {"name": "mlm"}),
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
    text = (tmp_path / "mine.yaml").read_text()
    assert [
        line for line in text.splitlines() if line.startswith(" ") and "  # " not in line
    ] == []  # all have comments
    recipe = read_yaml(text, "mine.yaml")
    assert recipe["task"] == task
    assert recipe["data"]["train"] == file
    code, out, err = weft("train", "mine.yaml", "train.steps=2", "train.eval_every=2", "train.device=cpu")
    assert code == 0, err
    assert (tmp_path / "runs" / "mine" / "best").exists()


def test_validation_data_beside_the_file_is_found_and_else_held_out(weft, tmp_path):
    weft("init", write_langid(), "-o", "one.yaml")
    recipe = read_yaml((tmp_path / "one.yaml").read_text(), "one.yaml")
    assert recipe["data"]["valid"] == "dev.csv"
    assert "validation_fraction" not in recipe["data"]
    _, out, _ = weft("init", write_dates(), "-o", "two.yaml")
    recipe = read_yaml((tmp_path / "two.yaml").read_text(), "two.yaml")
    assert recipe["data"]["validation_fraction"] == 0.1
    assert (recipe["train"]["patience"], "steps" in recipe["train"], "eval_every" in recipe["train"]) == (
        3,
        False,
        False,
    )
    assert "weft evaluate runs/two\n" in out
    weft("init", "train.csv", "data.validation_fraction=0.2", "-o", "three.yaml")
    assert read_yaml((tmp_path / "three.yaml").read_text(), "x")["data"]["validation_fraction"] == 0.2


def test_too_few_rows_to_hold_out_are_told(weft, tmp_path):
    (tmp_path / "a.csv").write_text("text,label\n" + "A fine film,1\nA dull one,0\n" * 4)
    _, out, _ = weft("init", "a.csv")
    text = (tmp_path / "mine.yaml").read_text()
    assert "# Too few rows to hold some out for validation" in text
    assert {"valid", "validation_fraction", "patience"}.isdisjoint(read_yaml(text, "x")["data"])
    assert "patience" not in text
    assert "weft evaluate runs/mine FILE" in out


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
