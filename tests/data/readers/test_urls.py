"""Files named by URLs: the rows, ranges and statuses are those of the same files on the disk."""

import gzip
import json

import fsspec
import pytest

from weft.config.sections import Data
from weft.data.corpus.partition import SourceFile, partition_source
from weft.data.readers.examples import read_rows
from weft.errors import DataError

LINES = [f"line {number} of 東" for number in range(50)]


@pytest.fixture
def memory():
    system = fsspec.filesystem("memory")
    yield system
    system.rm("/corpus", recursive=True)


def write_all(system, place):
    text = "".join(f"{line}\n" for line in LINES).encode()
    rows = "".join(json.dumps({"text": line}) + "\n" for line in LINES).encode()
    for name, content in {"a.txt": text, "b.txt": b"last\n", "c.txt.gz": gzip.compress(text), "d.jsonl": rows}.items():
        system.pipe_file(f"{place}/{name}", content)


def read(source, **data):
    return [row["text"] for _, row in read_rows(source, Data(train=source, **data), ["text"])]


@pytest.mark.parametrize("name", ["a.txt", "c.txt.gz", "d.jsonl"])
def test_rows_of_a_url_are_those_of_the_file(memory, tmp_path, name):
    write_all(memory, "/corpus")
    (tmp_path / name).write_bytes(memory.cat_file(f"/corpus/{name}"))
    assert read(f"memory://corpus/{name}") == read((tmp_path / name).as_uri()) == read(str(tmp_path / name)) == LINES


def test_parquet_and_patterns_are_read_by_url(memory):
    parquet = pytest.importorskip("pyarrow.parquet")
    write_all(memory, "/corpus")
    with memory.open("/corpus/e.parquet", "wb") as file:
        parquet.write_table(parquet.read_table.__globals__["pa"].table({"text": LINES}), file)
    assert read("memory://corpus/e.parquet") == LINES
    assert read("memory://corpus/[ab].txt") == [*LINES, "last"]


def test_parts_of_a_url_are_whole_lines_and_together_the_file(memory):
    write_all(memory, "/corpus")
    parts = partition_source("memory://corpus/a.txt", Data(train="memory://corpus/a.txt"), 100)
    rows = [row for part in parts for piece in part.pieces for row in read(piece.file_slice)]
    assert len(parts) > 3
    assert rows == LINES


def test_a_file_that_changed_has_another_status(memory):
    write_all(memory, "/corpus")
    before = SourceFile.of("memory://corpus/a.txt")
    assert SourceFile.of("memory://corpus/a.txt") == before
    memory.pipe_file("/corpus/a.txt", memory.cat_file("/corpus/a.txt").replace(b"0", b"1"))
    after = SourceFile.of("memory://corpus/a.txt")
    assert after.size == before.size
    assert after != before


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("memory://nowhere/a.txt", "there is no such file"),
        ("memory://nowhere/*.txt", "no file matches"),
        ("nothing://host/a.txt", "cannot be opened: Protocol not known"),
    ],
)
def test_a_url_that_leads_nowhere_is_named(url, reason):
    with pytest.raises(DataError, match=f"(?s){url[:9]}.*{reason}"):
        read(url)
