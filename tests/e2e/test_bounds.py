"""Inputs that would take all memory or never end, given to the command line: each is answered, or refused in a line."""

import pytest
from tests.limits import run_limited

SCRIPT = """
import contextlib, io, os, tempfile
from pathlib import Path
from weft.cli import main as cli
from weft.data.readers import lines

def weft(*words, stdin=os.devnull):
    sys.argv = ["weft", *map(str, words)]
    with open(stdin, "rb") as file:
        os.dup2(file.fileno(), 0)
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.main()
        except SystemExit as end:
            code = end.code or 0
    return code, "; ".join(err.getvalue().strip().splitlines()[-3:]), len(out.getvalue())

run, folder = Path(argument), tempfile.TemporaryDirectory()
os.chdir(folder.name)
for name, size in (("long.txt", 20_000_000), ("allowed.txt", 16_000_000)):
    Path(name).write_text("ab " * (size // 3) + "\\n")
Path("long.tsv").write_text("abc\\tcba\\n" + "ab " * 5_000_000 + "\\tba\\n")
results["a long line"] = weft("predict", run, stdin="long.txt")
results["a line within the bound"] = weft("predict", run, "--truncation", "cut", stdin="allowed.txt")
results["one too long for the model"] = weft("predict", run, stdin="allowed.txt")
results["a device as stdin"] = weft("predict", run, stdin="/dev/zero")
results["a device as file"] = weft("predict", run, "-f", "/dev/zero")
results["a device as data"] = weft("evaluate", run, "/dev/zero")
results["a device as recipe"] = weft("train", "/dev/zero")
cut = ("data.max_line_bytes=20000000", "data.truncation=cut", "train.steps=1")
results["a long training line"] = weft("train", run / "run.yaml", "data.train=long.tsv", *cut, "--out", "long")
results["a huge model"] = weft("train", run / "run.yaml", "model.width=1000000", "--out", "huge")
lines.MAX_DISCARDED = 1 << 24
results["a line that does not end"] = weft("predict", run, stdin="long.txt")
bomb = "\\n".join(f"  a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 40))
Path("bomb.yaml").write_text("model:\\n  a0: &a0 [x]\\n" + bomb)
results["a bomb"] = weft("train", "bomb.yaml")
results["a bomb as option"] = weft("predict", run, "x", "--set", "beam={a: &a [x], b: [" + "*a, " * 10000 + "]}")
folder.cleanup()
"""


@pytest.fixture(scope="module")
def results(trained_run):
    return run_limited(SCRIPT, trained_run)


EXPECTED = {
    "a long line": "stdin:1: the line has more than 16,777,216 bytes",
    "one too long for the model": "example 1: got 101,024 or more tokens, data.max_length is 1,024",
    "a device as stdin": "error: stdin: is a device, not a file; give a file or a pipe",
    "a device as file": "error: /dev/zero: is a device, not a file; give a file or a pipe",
    "a device as data": "error: /dev/zero: is a device, not a file; give a file or a pipe",
    "a device as recipe": "error: /dev/zero: has more than 32 MB; is it a recipe?",
    "a huge model": "error: model: weights, gradients and optimizer take",
    "a line that does not end": "error: stdin:1: the line has more than 16,777,216 bytes; is this text?",
    "a bomb": "bomb.yaml:13: not valid YAML: its aliases stand for more than 10,000 values",
    "a bomb as option": "not valid YAML: its aliases stand for more than 10,000 values",
}


@pytest.mark.parametrize("case", EXPECTED)
def test_what_takes_too_much_is_refused_in_a_line(results, case):
    code, message, _ = results[case]
    assert (code, EXPECTED[case] in message) == (2, True), message


def test_what_is_within_the_bounds_is_answered(results):
    code, message, output = results["a line within the bound"]
    assert (code, message) == (0, "cut 1 sequence longer than data.max_length=1024")
    assert output
    assert results["a long training line"][0] == 0, results["a long training line"]
