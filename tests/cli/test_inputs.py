"""Lines from a file or a pipe, gathered as they arrive."""

import os
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.cli.inputs import MAX_CHUNK, read_chunks, read_input
from weft.errors import DataError


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
    assert list(read_input(file_of(tmp_path, data))) == lines
    os.close(stdin(data))
    assert list(read_input(None)) == lines


def test_jsonl_holds_objects(tmp_path):
    path = file_of(tmp_path, b'{"text": "one"}\n"two"\n', "in.jsonl")
    assert list(read_input(path)) == [{"text": "one"}, "two"]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("in.txt", b"one\nt\xffo\n", r"in.txt:2: not UTF-8: invalid start byte at byte 1; try iconv"),
        ("in.jsonl", b'{"text": "one"}\n{"text": \n', r"in.jsonl:2: not JSON: Expecting value at column"),
        ("in.jsonl", b"\n", r"in.jsonl:1: not JSON"),
        ("in.jsonl", b"[" * 100_000, r"in.jsonl:1: not JSON: .*recursion"),
        ("in.jsonl", b"9" * 5000, r"in.jsonl:1: not JSON: "),
    ],
)
def test_a_bad_line_is_named(tmp_path, name, data, message):
    with pytest.raises(DataError, match=message):
        list(read_input(file_of(tmp_path, data, name)))


def test_a_bad_line_of_stdin_is_named(stdin):
    os.close(stdin(b"one\ntwo\n\xc3(\n"))
    lines = read_input(None)
    assert [next(lines), next(lines)] == ["one", "two"]
    with pytest.raises(DataError, match="stdin:3: not UTF-8"):
        next(lines)


def test_a_file_that_cannot_be_read_is_named(tmp_path, stdin):
    with pytest.raises(DataError, match=r"gone.txt: cannot be read: No such file"):
        list(read_input(tmp_path / "gone.txt"))
    with pytest.raises(DataError, match=r"cannot be read: Is a directory"):
        list(read_input(tmp_path))
    stdin(b"")
    os.close(0)
    with pytest.raises(DataError, match=r"stdin: cannot be read: Bad file descriptor"):
        list(read_input(None))


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
        list(read_chunks(read_input(Path("gone.txt"))))


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
