"""What README.md and docs/*.md show is run, block by block, in an empty folder a page.

`python` blocks share one namespace. Of `console` blocks the lines that begin with "$ " are run, weft's own commands in
this process. A `yaml` block is a recipe, or sections that take the place of those of `dates`. A comment right before a
block, which readers do not see, says more:

    <!-- run: no, because ... -->  it is not run; the reason must be given
    <!-- run: quick -->            what it trains gets a tiny budget, as what ships with weft always does
    <!-- exit: 2 -->               its commands end with this code, not with 0
    <!-- output: exact -->         what stands below a command is what it prints; a `text` block is what the `python`
                                   block before it prints; a line "..." stands for any lines
    <!-- file: small.yaml -->      it is saved under this name, where the blocks after it find it
    <!-- table: module:Class -->   before a table: its first two columns are the keys and the defaults of the class

Here a recipe that ships with weft is trained for a few steps, and a sample has only its first rows.
"""

import ast
import contextlib
import importlib
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import pytest

import weft
from tests.test_layering import LAYERS, SOURCE
from weft.cli import main as cli
from weft.config.recipes import read_recipe, recipe_names
from weft.config.run import Run
from weft.config.yaml import read_yaml, write_yaml
from weft.data.samples import datasets as samples

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LANGUAGES = {"python", "console", "yaml", "text", "json"}
ROWS = {"train": 300, "valid": 20, "test": 20}
FEWER = {  # of tagged words and of long texts there is soon enough
    "dateparts": {**ROWS, "train": 60},
    "pydoc": {"train": 150, "valid": 5, "test": 5},
}
QUICK = ["train.steps=3", "train.time=null", "train.eval_every=null"]
GENERATE = {"translate", "lm"}
SHORT = "task.decode.max_length=8"  # for these tasks

_BLOCK = re.compile(r"((?:^<!--[^\n]*-->\n)*)^```([^\n]*)\n(.*?)^```$", re.M | re.S)
_MARK = re.compile(r"<!-- (\w+): (.*?) -->")
_PLAIN = re.compile(r"weft [^;&<`$]*")  # nothing that needs a shell
_TABLE = re.compile(r"<!-- table: (\S+) -->\n((?:^\|[^\n]*\n)+)", re.M)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """A fenced block, the marks before it, and the line where its text starts."""

    language: str
    text: str
    marks: dict[str, str]
    line: int

    @property
    def quick(self):
        return self.marks.get("run") == "quick"

    @property
    def skipped(self):
        return self.marks.get("run", "").startswith("no")


@dataclass(frozen=True)
class Ended:
    """How a command ended, and what it printed."""

    code: int
    out: str
    err: str


def read_blocks(text):
    found = []
    for match in _BLOCK.finditer(text):
        comments, language, body = match.groups()
        found.append(Block(language, body, dict(_MARK.findall(comments)), text[: match.start(3)].count("\n") + 1))
    fences = len(re.findall(r"^```", text, re.M))
    assert fences == 2 * len(found), f"{fences} fences for {len(found)} blocks: one is open, or in another block"
    return found


def check_marks(block):
    assert block.language in LANGUAGES, f"line {block.line}: a block of {block.language!r} is not run; use {LANGUAGES}"
    unknown = set(block.marks) - {"run", "exit", "output", "file"}
    assert not unknown, f"line {block.line}: unknown marks {unknown}"
    run = block.marks.get("run", "quick")
    assert run == "quick" or re.fullmatch(r"no, because .{10,}", run), f"line {block.line}: run: {run}: give a reason"


class Reader:
    """Does what a page says, in a folder of its own."""

    def __init__(self, folder):
        self.folder = folder
        self.names = {"__name__": "__main__"}
        self.printed = ""

    def follow(self, block):
        check_marks(block)
        importlib.invalidate_caches()
        if block.skipped:
            return
        if "file" in block.marks:
            (self.folder / block.marks["file"]).write_text(block.text, encoding="utf-8")
        if block.language == "yaml":
            check_recipe(block.text)
        elif block.language == "console":
            self.commands(block)
        elif block.language == "python" and "file" not in block.marks:
            self.python(block)
        elif block.language == "text" and block.marks.get("output") == "exact":
            compare(block.text, self.printed, f"line {block.line}")

    def python(self, block):
        tree = ast.increment_lineno(ast.parse(block.text), block.line - 1)
        tree = ast.fix_missing_locations(Quick().visit(tree))
        self.names |= {"quick_train": partial(train, quick=block.quick), "quick_compare": compare_quickly}
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(tree, str(self.folder), "exec"), self.names)
        self.printed = out.getvalue()

    def commands(self, block):
        expected = int(block.marks.get("exit", "0"))
        for number, (command, shown) in enumerate(read_commands(block.text)):
            ended = run_line(command, self.folder, block.quick)
            told = f"line {block.line}, command {number + 1}: {command}"
            assert ended.code == expected, f"{told}: exit {ended.code}, not {expected}\n{ended.out}{ended.err}"
            if block.marks.get("output") == "exact":
                compare(shown, ended.out + ended.err, told)


class Quick(ast.NodeTransformer):
    """Puts the quick ones in the place of `weft.train` and `weft.compare`."""

    def visit_Attribute(self, node):
        self.generic_visit(node)
        name = ast.unparse(node)
        return ast.Name("quick_" + node.attr, node.ctx) if name in ("weft.train", "weft.compare") else node


def train(recipe, overrides=(), out=None, resume=False, report=None, quick=False):
    return weft.train(recipe, added(overrides, shortened(recipe, quick)), out, resume, report)


def compare_quickly(recipes, budget, out, overrides=(), reporter=None):
    return weft.compare(recipes, "3", out, added(overrides, shortened(recipes[0], True)), reporter)


def added(overrides, more):
    """Give overrides and more of them, as a list or, where they are one, as a mapping."""
    return read_recipe(overrides, more) if isinstance(overrides, Mapping) else [*overrides, *more]


def shortened(recipe, quick):
    """Give the overrides for a small budget, if a recipe is to have one."""
    if not quick and recipe not in recipe_names():
        return []
    raw = read_recipe(recipe)
    if "tasks" in raw:
        tasks = {name: section["task"]["name"] for name, section in raw["tasks"].items()}
        return [*QUICK, *(f"tasks.{name}.{SHORT}" for name, task in tasks.items() if task in GENERATE)]
    return [*QUICK, SHORT] if raw["task"]["name"] in GENERATE else QUICK


def shorten(words, quick):
    """Give a command a small budget."""
    if words[:2] == ["weft", "train"]:
        return [*words, *shortened(words[2], quick)]
    if words[:2] == ["weft", "compare"]:
        changes = shortened(words[2], True)
        return [*words, "--budget", "3", *(word for change in changes for word in ("--set", change))]
    return words


def read_commands(text):
    """Give each command with what is shown below it."""
    parts = re.split(r"^\$ ", text.replace("\\\n", ""), flags=re.M)
    assert not parts[0].strip(), "a console block begins with a command: $ ..."
    return [part.split("\n", 1) for part in parts[1:]]


def run_line(line, folder, quick):
    """Run a line: the parts of its pipe one after another, and at its end `> file`."""
    line, *into = line.split(" > ")
    ended = Ended(0, "", "")
    for command in line.split(" | "):
        if _PLAIN.fullmatch(command):
            words = shlex.split(command)
            ended = run_weft(shorten(words, quick), ended.out)
        else:
            ended = run_shell(command, ended.out, folder)
    if into:
        (folder / into[0]).write_text(ended.out, encoding="utf-8")
        return Ended(ended.code, "", ended.err)
    return ended


def run_weft(words, given):
    """Run a command of weft's in this process."""
    out, err, argv, code = io.StringIO(), io.StringIO(), sys.argv, 0
    sys.argv = words
    try:
        with reading(given), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            cli.main()
    except SystemExit as end:
        code = end.code or 0
    finally:
        sys.argv = argv
    return Ended(code, out.getvalue(), err.getvalue())


@contextlib.contextmanager
def reading(given):
    """Give a text to who reads from stdin."""
    with tempfile.TemporaryFile() as file:
        file.write(given.encode())
        file.seek(0)
        before = os.dup(0)
        os.dup2(file.fileno(), 0)
        try:
            yield
        finally:
            os.dup2(before, 0)
            os.close(before)


def run_shell(command, given, folder):
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-c", command],
        input=given,
        cwd=folder,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def compare(shown, printed, place):
    """Compare line by line, without blank lines and the space at the ends of lines."""
    want, got = ([line.rstrip() for line in text.splitlines() if line.strip()] for text in (shown, printed))
    pattern = "".join(r"(.*\n)*" if line.strip() == "..." else re.escape(line + "\n") for line in want)
    same = re.fullmatch(pattern, "".join(line + "\n" for line in got))
    assert same, f"{place}: the page shows {want}, but what is printed is {got}"


def check_recipe(text):
    raw = read_yaml(text, "a block of yaml")
    if "weights" in raw.get("model", {}):  # what they are comes from there: see `weft.formats.pretrained`
        raw["model"] = {"name": "bert", **raw["model"]}
    rest = {
        key: value for key, value in read_recipe("dates").items() if "tasks" not in raw or key not in ("task", "data")
    }
    Run.parse({**rest, **raw})


@pytest.fixture
def reader(tmp_path, monkeypatch):
    """Return a reader in a fresh folder, from which modules can be imported; what they leave behind is removed."""
    whole = samples._cached_rows
    monkeypatch.setattr(samples, "_cached_rows", cache(lambda name: first_rows(name, whole(name))))
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.chdir(tmp_path)
    yield Reader(tmp_path)
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


def first_rows(name, rows):
    most = FEWER.get(name, ROWS)
    seen = Counter()
    kept = []
    for split, row in rows:
        seen[split] += 1
        if seen[split] <= most[split]:
            kept.append((split, row))
    return kept


def name(page):
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_what_a_page_shows_works(page, reader):
    for block in read_blocks(page.read_text(encoding="utf-8")):
        reader.follow(block)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_tables_have_the_keys_and_defaults_of_the_code(page):
    for place, table in _TABLE.findall(page.read_text(encoding="utf-8")):
        check_table(place, table)


def check_table(place, table):
    module, _, attribute = place.partition(":")
    schema = getattr(importlib.import_module(module), attribute)
    rows = [[cell.strip().strip("`") for cell in line.strip("|\n").split("|")] for line in table.splitlines()[2:]]
    shown = {key: read_yaml(default, key) for key, default, *_ in rows}
    true = {key: field.default for key, field in schema.model_fields.items() if key != "name"}
    assert shown == {key: list(value) if isinstance(value, tuple) else value for key, value in true.items()}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    check_links(page.read_text(encoding="utf-8"), page.parent)


def check_links(text, folder):
    for link in _LINK.findall(re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)):
        target, _, anchor = link.partition("#")
        if ":" in target:
            continue
        path = folder / target
        assert path.exists(), f"{link}: there is no such file"
        if anchor and path.is_file():
            assert anchor in anchors(path.read_text(encoding="utf-8")), f"{link}: no such heading"


def anchors(text):
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_index_names_every_page():
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    assert {page.name for page in PAGES if page.parent.name == "docs"} - {"README.md"} <= set(_LINK.findall(index))


def test_the_order_of_the_packages_is_the_one_that_is_checked():
    blocks = read_blocks((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"))
    (shown,) = [block.text for block in blocks if block.text.startswith("errors < ")]
    layers = [set(re.findall(r"\w+", part)) for part in shown.split("<")]
    there = {path.stem for path in SOURCE.iterdir()} - {"__main__"}
    assert layers == [both & there for both in LAYERS if both & there]


# From here on: a page that is wrong is caught.


def follow(reader, text):
    for block in read_blocks(text):
        reader.follow(block)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("```console\n$ weft predict nowhere\n```\n", "exit 2, not 0.*nowhere: does not exist"),
        ("```console\n$ weft train dates --budget 3\n```\n", "exit 2, not 0.*No such option"),
        ("```console\n$ false\n```\n", "false: exit 1, not 0"),
        ("```console\n$ true | false\n```\n", "exit 1, not 0"),
        ("<!-- exit: 2 -->\n```console\n$ weft models\n```\n", "exit 0, not 2"),
        ("<!-- output: exact -->\n```console\n$ echo one\ntwo\n```\n", "the page shows ..two.., but"),
        ("<!-- output: exact -->\n```console\n$ weft --version\nweft 9\n```\n", "the page shows ..weft 9"),
        (
            "```python\nprint(1)\n```\n<!-- output: exact -->\n```text\n2\n```\n",
            "shows ..2.., but what is printed is ..1",
        ),
        ("```python\nassert 1 > 2, 'so'\n```\n", "^so$"),
        ("```console\nweft models\n```\n", "begins with a command"),
        ("```bash\nweft models\n```\n", "a block of 'bash' is not run"),
        ("<!-- run: no -->\n```console\n$ false\n```\n", "give a reason"),
        ("<!-- quick: yes -->\n```console\n$ true\n```\n", "unknown marks"),
        ("```console\n$ true\n", "one is open"),
    ],
)
def test_a_page_that_is_wrong_is_caught(reader, text, told):
    with pytest.raises(AssertionError, match=f"(?s){told}"):
        follow(reader, text)


@pytest.mark.parametrize(
    "text",
    [
        "data: {sample: dates, colums: {text: 0}}\n",
        "task: {name: translate}\ndata: {sample: dates}\nmodel: {name: seq2seq, depth: 2}\ntrain: {steps: 3}\n",
        "mode: {name: seq2seq}\n",
    ],
)
def test_a_recipe_that_is_wrong_is_caught(reader, text):
    with pytest.raises(weft.ConfigError, match="did you mean|known:"):
        follow(reader, f"```yaml\n{text}```\n")


def test_a_page_that_is_right_is_not(reader):
    follow(
        reader,
        "<!-- file: own.py -->\n```python\nVALUE = 3\n```\n\n"
        "```python\nimport own\nprint(own.VALUE)\nprint('last')\n```\n"
        "<!-- output: exact -->\n```text\n3\n...\n```\n"
        "<!-- output: exact -->\n```console\n$ weft data show dates -n 2 > two.jsonl\n"
        "$ wc -l two.jsonl | cut -c 1\n2\n```\n"
        "<!-- exit: 2 -->\n```console\n$ weft predict nowhere\nerror: this is not compared\n```\n"
        "<!-- run: no, because nobody should -->\n```console\n$ rm -rf nothing\n```\n",
    )
    assert "own" in sys.modules


def test_what_ships_with_weft_and_quick_blocks_are_trained_a_few_steps(reader):
    follow(reader, "```console\n$ weft train dates\n$ echo 3 May 1999 | weft predict runs/dates\n```\n")
    assert (reader.folder / "runs/dates/last").readlink().name == "step-00000003"
    follow(reader, "```python\nimport weft\ntold = weft.train('dates', out='two').run.train.steps\n```\n")
    assert reader.names["told"] == 3
    (reader.folder / "own.yaml").write_text(write_yaml(read_recipe("dates", ["train.steps=4", SHORT])))
    command = "```console\n$ weft train own.yaml --out own{}\n```\n"
    follow(reader, command.format(4) + "<!-- run: quick -->\n" + command.format(3))
    for steps in (3, 4):
        assert (reader.folder / f"own{steps}/last").readlink().name == f"step-0000000{steps}"


def test_a_table_that_is_wrong_is_caught():
    good = "| key | default |\n|---|---|\n| `label_smoothing` | `0.0` |\n| `decode` | `{}` |\n"
    for table in (
        good.replace("0.0", "0.1"),
        good.replace("label_smoothing", "smoothing"),
        good.replace("`decode`", "`code`"),
    ):
        with pytest.raises(AssertionError):
            check_table("weft.tasks.translate:TranslateConfig", table)


def test_a_link_that_leads_nowhere_is_caught(tmp_path):
    (tmp_path / "page.md").write_text("# One heading, *two*\n")
    check_links("[a](page.md) [b](page.md#one-heading-two) [c](https://example.org/x)", tmp_path)
    for link in ("pages.md", "page.md#other"):
        with pytest.raises(AssertionError, match="no such"):
            check_links(f"[a]({link})", tmp_path)
