"""Files that are named by a URL, such as s3://bucket/part-*.jsonl: all that fsspec knows, with what it needs for each.

The URL is read where it is used, with the credentials of that machine; nothing is copied to the disk.
"""

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from weft.errors import DataError

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")


def is_url(path: str) -> bool:
    """Return whether a source is a URL, and not a path."""
    return _URL.match(path) is not None


def open_url(url: str) -> BinaryIO:
    """Return a binary stream of a file that can be sought in."""
    with _file_system(url) as (system, path):
        stream: BinaryIO = system.open(path, "rb")
        return stream


def expand_url(source: str) -> list[str]:
    """Return the files that match a URL or a pattern in it, sorted; raise if there is none."""
    with _file_system(source) as (system, path):
        if not re.search(r"[*\[]", path):
            if not system.isfile(path):
                raise DataError(f"{source}: there is no such file; give a file, or a pattern such as {source}/*.jsonl")
            return [source]
        files = sorted(name for name in system.glob(path) if system.isfile(name))
        if not files:
            raise DataError(f"{source}: no file matches this pattern")
        return [str(system.unstrip_protocol(name)) for name in files]


def url_status(url: str) -> tuple[int, int]:
    """Return the size of a file, and a number that changes with the file, as far as its server tells."""
    with _file_system(url) as (system, path):
        version = hashlib.sha256(str(system.ukey(path)).encode()).digest()[:7]
        return int(system.size(path)), int.from_bytes(version)


@contextmanager
def _file_system(url: str) -> Iterator[tuple[Any, str]]:
    """Yield the file system of a URL, and the path in it; raise a `DataError` if it cannot be reached."""
    from fsspec.core import url_to_fs

    try:
        yield url_to_fs(url)
    except DataError:
        raise
    except ImportError as error:
        raise DataError(f"{url}: {error}; install what fsspec needs for it, or copy the file to this machine") from None
    except FileNotFoundError:
        raise DataError(f"{url}: there is no such file") from None
    except Exception as error:  # each file system has errors of its own
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{url}: cannot be opened: {reason}; is the URL right, and may this machine read it?") from None
