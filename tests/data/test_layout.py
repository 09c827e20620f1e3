"""Formats, delimiters and header lines are detected as the public data sets have them."""

import gzip

import pytest

from weft.config.sections import Data
from weft.data.layout import detect_layout
from weft.errors import DataError

PAIRS = [f'{n}\tnews\t{n}.5\tA "man, no. {n}, walks.\tA man called {n} goes.' for n in range(1, 9)]
FILES = {
    "tabs in csv, quotes in the text": ("a.csv", "\n".join(PAIRS), ("tsv", "\t", False, (0, 1, 2, 3, 4))),
    "quoted tabs": ("a.csv", 'text\tlabel\n"a\tb"\tA\n"c"\tB\n"d"\tA\n', ("csv", "\t", True, ("text", "label"))),
    "semicolons": ("a.csv", "text;label\nhi, you;A\nho, you;B\nhe;A\n", ("csv", ";", True, ("text", "label"))),
    "commas": ("a.csv", 'Review,Stars\n"good, bad",5\nfair,3\n', ("csv", ",", True, ("Review", "Stars"))),
    "no header": ("a.csv", "good film,1\nbad film,0\nfair film,1\n", ("csv", ",", False, (0, 1))),
    "GLUE": ("a.tsv", "index\tsentence1\tlabel\n0\tA man walks.\tyes\n", ("tsv", "\t", True, None)),
    "tokens in txt": (
        "a.txt",
        "He PRP B-NP\nruns VBZ B-VP\n\nShe PRP B-NP\nsits VBZ B-VP\n\n",
        ("conll", None, False, (0, 1, 2)),
    ),
    "annotated": ("a.annotated", "He\tO\nruns\tO\n\nRome\tB-LOC\nsits\tO\n", ("conll", None, False, (0, 1))),
    "prose with blank lines": (
        "a.txt",
        "One line.\n\nAnother, longer line here.\n\nEnd.\n",
        ("txt", None, False, (0,)),
    ),
    "translations in txt": ("fra.txt", "Go.\tVa !\nRun, now!\tCours !\n", ("tsv", "\t", False, (0, 1))),
    "words and their sounds": (
        "a.tsv",
        "aa\tɑ ɑ\n" + "".join(f"word{'ly' * n}\tw ɝ d {'l i ' * n}\n" for n in range(9)),
        ("tsv", "\t", False, (0, 1)),
    ),
    "short names over texts": (
        "a.tsv",
        "en\tfr\n" + "".join(f"A man, no. {n}.\tUn homme, le {n}.\n" for n in range(9)),
        ("tsv", "\t", True, ("en", "fr")),
    ),
    "labels before texts": (
        "a.all",
        "".join(f"{n % 2} a film no. {n}\n" for n in range(9)),
        ("labelled", None, False, ("label", "text")),
    ),
    "labels of fastText": (
        "a.txt",
        "".join(f"__label__{n % 2} a film no. {n}\n" for n in range(9)),
        ("labelled", None, False, ("label", "text")),
    ),
    "numbered lines": ("a.txt", "".join(f"{n} a film\n" for n in range(9)), ("txt", None, False, (0,))),
    "some lines with a number": ("a.txt", "1 a film\n" * 9 + "a film\n", ("txt", None, False, (0,))),
    "objects in json": ("a.json", '{"text": "a"}\n{"text": "b", "x": 1}\n', ("jsonl", None, False, ("text", "x"))),
    "SQuAD": ("a.json", '{"data": [\n]}', ("squad", None, False, None)),
}


@pytest.mark.parametrize("case", FILES)
def test_what_a_file_is(tmp_path, case):
    name, content, (format, delimiter, header, names) = FILES[case]
    (tmp_path / name).write_text(content)
    layout = detect_layout(str(tmp_path / name), Data(train="x"))
    assert (layout.format, layout.delimiter, layout.header) == (format, delimiter, header)
    assert names is None or layout.names == names


def test_what_is_set_is_not_questioned(tmp_path):
    path = tmp_path / "a.csv.gz"
    path.write_bytes(gzip.compress(b"text;label\na;A\nb;B\n"))
    assert detect_layout(str(path), Data(train="x")).delimiter == ";"
    assert detect_layout(str(path), Data(train="x", delimiter=",")).names == ("text;label",)
    assert detect_layout(str(path), Data(train="x", header=False)).names == (0, 1)
    assert detect_layout(str(path), Data(train="x", format="txt")).format == "txt"


def test_only_what_the_ending_does_not_say_is_a_key(tmp_path):
    (tmp_path / "a.csv").write_text("text,label\na,A\n")
    (tmp_path / "b.csv").write_text("text;label\na;A\n")
    (tmp_path / "c.data").write_text("text\tlabel\na\tA\n")
    keys = [detect_layout(str(path), Data(train="x")).keys(str(path)) for path in sorted(tmp_path.iterdir())]
    assert keys == [{}, {"delimiter": ";"}, {"format": "tsv"}]


@pytest.mark.parametrize(("content", "told"), [(b"", "there are no rows in it"), (b"\x1f\x8b\0", "is a binary file")])
def test_a_file_without_text_is_refused(tmp_path, content, told):
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(DataError, match=told):
        detect_layout(str(tmp_path / "a.csv"), Data(train="x"))
