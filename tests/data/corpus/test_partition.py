"""Partition of files: for every part size, the rows and line numbers are those of the whole file."""

import gzip
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.config.sections import Data
from weft.data.corpus import partition
from weft.data.corpus.partition import CorpusPart, SourceFile, part_size, partition_source, source_files, split_file
from weft.data.readers.examples import Skipped, read_rows
from weft.errors import DataError

PIECES = ["", " ", "\t", "\r", "a", "ab c", "é", "東京", "\u2028", "\x1c", "x" * 40, "word " * 9, "\0", "\ufeff"]
texts = st.lists(st.sampled_from(PIECES), max_size=14).map("\n".join)
endings = st.sampled_from(["", "\n", "\r\n", "\n\n"])


def rows(source, data, skipped=None):
    return [(place.line, row["text"]) for place, row in read_rows(source, data, ["text"], skipped)]


def read_parts(parts, data, skipped):
    return [row for part in parts for piece in part.pieces for row in rows(piece.file_slice, data, skipped)]


def as_whole(path, data):
    """Return the rows of the whole file and the errors of bad rows; nothing for a file without valid rows."""
    skipped = Skipped()
    try:
        return rows(str(path), data, skipped), skipped
    except DataError:
        return [], skipped


@settings(max_examples=50, deadline=None)
@given(texts, endings, st.booleans(), st.sampled_from(["lines", "every-line", "blank"]), st.integers(1, 60))
def test_a_row_is_never_torn_at_any_cut(tmp_path_factory, text, ending, mark, documents, limit):
    path = tmp_path_factory.mktemp("cut") / "text.txt"
    path.write_bytes(b"\xef\xbb\xbf" * mark + (text + ending).encode())
    data = Data(train=str(path), documents=documents, on_bad_rows="skip", max_line_bytes=limit)
    want, bad = as_whole(path, data)
    for size in range(1, path.stat().st_size + 2):  # so that a cut falls at every byte
        skipped = Skipped()
        pieces = [piece for piece, _ in split_file(str(path), size, documents == "blank", limit)]
        parts = [CorpusPart(pieces=(piece,), size=0) for piece in pieces]
        assert read_parts(parts, data, skipped) == want
        assert (skipped.count, skipped.reasons) == (bad.count, bad.reasons)
        assert [piece.start for piece in pieces[1:]] == [piece.stop for piece in pieces[:-1]]
        assert not pieces or (pieces[0].start, pieces[-1].stop) == (0, path.stat().st_size)


def test_documents_cut_at_any_line_end_would_be_torn(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("one\ntwo\nthree\n\nfour\n")
    data = Data(train=str(path), documents="blank")
    want = rows(str(path), data)
    assert want == [(1, "one\ntwo\nthree"), (5, "four")]
    torn = [CorpusPart(pieces=(piece,), size=0) for piece, _ in split_file(str(path), 4, False, 100)]
    assert read_parts(torn, data, Skipped()) != want


def test_jsonl_is_cut_and_a_bad_row_keeps_its_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": f"row {n}"}) + "\n" for n in range(99)) + "broken\n")
    data = Data(train=str(path), on_bad_rows="skip")
    parts = partition_source(str(path), data, 200)
    skipped = Skipped()
    assert len(parts) > 5
    assert read_parts(parts, data, skipped) == [(n + 1, f"row {n}") for n in range(99)]
    assert skipped.reasons[0].startswith(f"{path}:100: broken JSON")


def test_what_cannot_be_cut_is_whole_and_small_files_share_a_part(tmp_path):
    names = ["a.txt", "b.txt", "c.txt", "d.txt.gz"]
    for name in names:
        data = f"{name}\n".encode() * 100
        (tmp_path / name).write_bytes(gzip.compress(data, 0) if name.endswith(".gz") else data)
    data = Data(train=str(tmp_path / "*.txt*"))
    parts = partition_source(data.train, data, 1300)
    assert [[piece.path.rpartition("/")[2] for piece in part.pieces] for part in parts] == [["a.txt", "b.txt", "c.txt"],
                                                                                            ["d.txt.gz"]]  # fmt: skip
    assert all(piece.stop is None for part in parts for piece in part.pieces)
    whole = [(place.line, row) for place, row in read_rows(data.train, data, ["text"])]
    assert read_parts(parts, data, Skipped()) == [(line, row["text"]) for line, row in whole]
    (tmp_path / "t.tsv").write_text("one\n" * 500)
    assert [part.pieces[0].stop for part in partition_source(str(tmp_path / "t.tsv"), Data(train="x"), 10)] == [None]
    files = Data(train=str(tmp_path / "a.txt"), documents="file")
    assert [part.pieces[0].stop for part in partition_source(files.train, files, 10)] == [None]


def test_parallel_files_and_a_sample_are_one_part(tmp_path):
    paths = [str(tmp_path / name) for name in ("a.txt", "b.txt")]
    for path in paths:
        (tmp_path / path).write_text("line\n" * 100)
    assert partition_source(paths, Data(train=paths), 10) == (CorpusPart(size=1000),)
    assert [origin.path for origin in source_files(paths, Data(train=paths))] == paths
    assert partition_source(None, Data(sample="dates"), 10) == (CorpusPart(size=0),)
    assert source_files(None, Data(sample="dates")) == ()
    with pytest.raises(DataError, match="gone.txt: there is no such file"):
        source_files(["gone.txt"], Data(train=["gone.txt"]))


def test_a_changed_file_is_another_origin(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one")
    before = SourceFile.of(str(path))
    assert before == SourceFile.of(str(path))
    path.write_text("two")
    assert before != SourceFile.of(str(path))


def test_parts_are_large_enough_and_enough():
    assert part_size(10, 2) == partition.SMALLEST
    assert part_size(1 << 40, 2) == partition.LARGEST
    assert part_size(1 << 28, 2) == 1 << 24


def test_an_empty_stretch_is_no_error_but_an_empty_file_is(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("one\n\n\n\ntwo\n")
    data = Data(train=str(path))
    parts = partition_source(data.train, data, 4)
    assert read_parts(parts, data, Skipped()) == [(1, "one"), (5, "two")]
    path.write_text("\n\n")
    with pytest.raises(DataError, match="no rows in it"):
        read_parts([CorpusPart(pieces=(partition.FileRange(path=str(path)),), size=0)], data, Skipped())
