"""Lines: their bound, what is no file of lines, and what is said while a pipe is waited for."""

import os
import sys
import threading

import pytest

from weft.data.readers import lines
from weft.data.readers.lines import BadRow, check_file, read_lines
from weft.errors import DataError


def test_a_line_that_is_too_long_is_a_bad_row_and_the_next_is_read(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"good\n" + b"x" * 11 + b"\n" + b"x" * 10 + b"\r\n")
    (_, good), (number, bad), (_, exact) = read_lines(str(path), 10)
    assert (good, number, exact) == ("good\n", 2, "x" * 10 + "\r\n")
    assert isinstance(bad, BadRow)


def test_a_line_that_does_not_end_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_bytes(b"x" * (1 << 20))
    assert isinstance(next(read_lines(str(path), 10))[1], BadRow)
    monkeypatch.setattr(lines, "MAX_DISCARDED", 1 << 19)
    with pytest.raises(DataError, match=r"a\.txt:1: the line has more than 524,288 bytes; is this text"):
        list(read_lines(str(path), 10))


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/full", "/dev/urandom"])
def test_a_device_is_refused(path):
    for read in (check_file, lambda path: list(read_lines(path, 10))):
        with pytest.raises(DataError, match=f"{path}: is a device, not a file; give a file or a pipe"):
            read(path)


def test_the_null_device_is_an_empty_file():
    check_file(os.devnull)
    assert list(read_lines(os.devnull, 10)) == []


@pytest.mark.parametrize("encoding", ["UTF-16LE", "UTF-16BE"])
def test_utf_16_without_a_byte_order_mark_is_named_with_its_byte_order(tmp_path, encoding):
    path = tmp_path / "a.txt"
    path.write_bytes("héllo wörld\nsecond\n".encode(encoding))
    bad = next(read_lines(str(path), 100))[1]
    assert f"iconv -f {encoding} -t UTF-8 '{path}' > new" in str(bad)


def test_a_pipe_that_nothing_writes_to_is_named_after_a_while(tmp_path, monkeypatch, capsys):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    monkeypatch.setattr(lines, "_WAIT", 0.05)
    told = threading.Event()
    monkeypatch.setattr(sys.stderr, "write", lambda text: (print(text), told.set()))

    def write():
        told.wait(10)
        path.write_text("one\ntwo\n")

    thread = threading.Thread(target=write)
    thread.start()
    assert [line for _, line in read_lines(str(path), 100)] == ["one\n", "two\n"]
    thread.join()
    assert f"{path}: is a pipe, and nothing has been written to it yet; waiting" in capsys.readouterr().out


def test_a_pipe_that_is_written_to_at_once_is_read_without_a_notice(tmp_path, capsys):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    thread = threading.Thread(target=path.write_text, args=("one\n",))
    thread.start()
    assert [line for _, line in read_lines(str(path), 100)] == ["one\n"]
    thread.join()
    assert not capsys.readouterr().err
