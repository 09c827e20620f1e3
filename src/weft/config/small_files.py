"""Files that are read whole: manifests, configurations, vocabularies. What stands in their place may not harm."""

import errno
import os
import stat
from pathlib import Path

MAX_BYTES = 256 << 20  # the vocabulary of 250,000 tokens has 17 MB


def read_small_file(path: Path) -> bytes:
    """Return the content of a plain file; a device, a pipe or a file of over `MAX_BYTES` raises OSError."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe without a writer must not block
    try:
        status = os.fstat(handle)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a plain file", str(path))
        if status.st_size > MAX_BYTES:
            raise OSError(errno.EFBIG, f"has more than {MAX_BYTES >> 20} MB", str(path))
        with os.fdopen(handle, "rb", closefd=False) as file:
            return file.read(status.st_size)  # a larger number would take that much memory
    finally:
        os.close(handle)


def read_small_text(path: Path) -> str:
    """Return the content of a plain file as text; UnicodeDecodeError, a ValueError, if it is not UTF-8."""
    return read_small_file(path).decode("utf-8")
