"""`weft predict`: answers to texts, files and pipes, and nothing else on stdout."""

import csv
import json
from itertools import pairwise

from tests.cli.conftest import Done, finished, good, process, refused
from tests.conftest import reversed_pairs

import weft
from weft.cli import inputs

WORDS = [word for word, _ in reversed_pairs()]


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
