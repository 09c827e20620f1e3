"""Lines from a file or a pipe, gathered as they arrive."""

import os
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.cli.inputs import MAX_CHUNK, ROW_SIZE, parse_columns, read_chunks, read_file, read_stdin, text_records
from weft.config.sections import Data
from weft.errors import ConfigError, DataError

LIMIT = Data(train="train.csv").max_line_bytes


@pytest.fixture
def stdin():
    """Return what makes bytes, or an open pipe, this process's standard input for the time of a test."""
    saved_stdin, opened = os.dup(0), []

    def put(data):
        reading, writing = os.pipe()
        os.dup2(reading, 0)
        os.close(reading)
        opened.append(writing)
        os.write(writing, data)
        return writing

    yield put
    for handle in opened:
        with suppress(OSError):  # the test has closed it
            os.close(handle)
    os.dup2(saved_stdin, 0)
    os.close(saved_stdin)


def file_of(tmp_path, data, name="in.txt"):
    path = tmp_path / name
    path.write_bytes(data)
    return path


def rows_of(path, columns=None, **keys):
    return list(read_file(path, Data(train="train.csv", **keys), ["text", "label"], ["text"], columns))


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"", []),
        (b"one\ntwo\n", ["one", "two"]),
        (b"one\n\n  \ntwo", ["one", "", "  ", "two"]),
        (b"one\r\ntwo\r\n", ["one", "two"]),
        (b"\xef\xbb\xbfone\ntwo\n", ["one", "two"]),
        ("a\u2028b\x0cc\x85d\n".encode(), ["a\u2028b\x0cc\x85d"]),
    ],
)
def test_a_line_is_an_example(tmp_path, stdin, data, lines):
    assert [record.request for record in rows_of(file_of(tmp_path, data))] == lines
    os.close(stdin(data))
    records = list(read_stdin(LIMIT))
    assert [record.request for record in records] == lines
    assert [record.columns for record in records] == [{"text": line} for line in lines]
    assert list(text_records(lines)) == records


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("in.txt", b"one\nt\xffo\n", "in.txt:2: not UTF-8: byte 0xff at offset 1 of the line"),
        ("in.jsonl", b'{"text": "one"}\n{"text": \n', "in.jsonl:2: broken JSON at column"),
        ("in.jsonl", b'{"text": "one"}\n"two"\n', "in.jsonl:2: must be a JSON object"),
        ("in.jsonl", b'{"text": "one"}\n{"txt": "two"}\n', "data.columns.text (command line: --columns FIELD=COLUMN)"),
    ],
)
def test_a_bad_line_is_a_row_with_its_error(tmp_path, name, data, message):
    first, second = rows_of(file_of(tmp_path, data, name))
    assert "one" in (first.request, first.columns["text"])
    assert isinstance(second.request, DataError)
    assert message in str(second.request)


def test_a_bad_line_of_stdin_is_a_row_with_its_error(stdin):
    os.close(stdin(b"one\ntwo\n\xc3(\nfour\n"))
    requests = [record.request for record in read_stdin(LIMIT)]
    assert [requests[0], requests[1], requests[3]] == ["one", "two", "four"]
    assert str(requests[2]).startswith("stdin:3: not UTF-8: byte 0xc3 at offset 0 of the line; convert it")
    assert str(requests[2]).endswith("iconv -f LATIN1 -t UTF-8")


def test_a_line_of_stdin_that_is_too_long_is_a_row_with_its_error(stdin):
    os.close(stdin(b"one\n" + b"x" * 101 + b"\nthree\n"))
    first, second, third = (record.request for record in read_stdin(100))
    assert (first, third) == ("one", "three")
    assert "stdin:2: the line has more than 100 bytes" in str(second)


def test_what_is_wrong_with_a_whole_file_is_raised(tmp_path, stdin):
    with pytest.raises(DataError, match=r"gone.txt: there is no such file"):
        rows_of(tmp_path / "gone.txt")
    with pytest.raises(DataError, match=r"is a directory"):
        rows_of(tmp_path)
    with pytest.raises(DataError, match=r"no column 'review'.*\(command line: --columns FIELD=COLUMN\)$"):
        rows_of(file_of(tmp_path, b"text,label\na,b\n", "in.csv"), {"text": "review"})
    stdin(b"")
    os.close(0)
    with pytest.raises(DataError, match=r"stdin: cannot be read: Bad file descriptor"):
        list(read_stdin(LIMIT))


def test_columns_are_parsed():
    assert parse_columns(["text=review,label=2", "choices=a", "choices=b,choices=3"], "file") == {
        "text": "review",
        "label": 2,
        "choices": ["a", "b", 3],
    }
    assert parse_columns(None, None) is None
    for wrong in ("text", "text=", "=a", "text=a,", ""):
        with pytest.raises(ConfigError, match=r"--columns: must be FIELD=COLUMN"):
            parse_columns([wrong], "file")
    with pytest.raises(ConfigError, match=r"--columns: are those of a file, but none is given with text"):
        parse_columns(["text=a"], None)


@given(st.lists(st.one_of(st.none(), st.booleans(), st.text()), max_size=50))
def test_all_examples_come_in_order(examples):
    chunks = list(read_chunks(examples))
    assert [example for chunk in chunks for example in chunk] == examples
    assert all(chunks)


def test_chunks_are_full_where_the_producer_is_faster():
    ahead = threading.Event()

    def fast():
        for number in range(5 * MAX_CHUNK + 7):
            if number == 3 * MAX_CHUNK:  # two full chunks wait in the queue, at the least
                ahead.set()
            yield number

    chunks = read_chunks(fast())
    received = next(chunks)
    assert ahead.wait(30)
    second = next(chunks)
    assert len(second) == MAX_CHUNK
    assert [*received, *second, *(example for chunk in chunks for example in chunk)] == list(range(5 * MAX_CHUNK + 7))


def test_what_is_there_is_not_held_back_for_more():
    asked, gone_on = threading.Event(), threading.Event()

    def paused():
        yield "first"
        asked.set()
        assert gone_on.wait(10)
        yield "second"

    chunks = read_chunks(paused())
    assert next(chunks) == ["first"]
    assert asked.wait(10)
    gone_on.set()
    assert next(chunks) == ["second"]
    with pytest.raises(StopIteration):
        next(chunks)


def test_an_error_comes_after_what_was_read_before_it():
    def broken():
        yield from range(3)
        raise DataError("here")

    chunks, received = read_chunks(broken()), []
    while len(received) < 3:
        received += next(chunks)
    assert received == [0, 1, 2]
    with pytest.raises(DataError, match="here"):
        next(chunks)


def test_an_error_at_the_very_start_is_raised_too():
    with pytest.raises(DataError, match="gone.txt"):
        list(read_chunks(read_file(Path("gone.txt"), Data(train="train.csv"), ["text"], ["text"], None)))


def test_a_long_stream_is_not_read_far_ahead():
    read = 0

    def counted():
        nonlocal read
        for number in range(50 * MAX_CHUNK):
            read = number + 1
            yield number

    done = 0
    for chunk in read_chunks(counted()):
        done += len(chunk)
        assert read - done <= 4 * MAX_CHUNK + 1  # its queue, and the one in its hand
        if done > 20 * MAX_CHUNK:
            break


def test_a_chunk_of_long_texts_has_few_of_them():
    long = "x" * (ROW_SIZE * MAX_CHUNK // 4)
    assert max(map(len, read_chunks(iter([long] * 20)))) == 4
    assert sum(map(len, read_chunks(iter(["x"] * 3000)))) == 3000


def test_what_is_read_ahead_is_bounded_by_its_characters():
    taken = []

    def texts():
        for number in range(100):
            taken.append(number)
            yield "x" * (ROW_SIZE * MAX_CHUNK)

    chunks = read_chunks(texts())
    next(chunks)
    while threading.active_count() > 1 and len(taken) < 5:
        pass  # the reader fills its queue
    assert len(taken) < 10
    assert sum(map(len, chunks)) == 99
