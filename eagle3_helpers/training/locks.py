"""Locks between processes: held on a file, and fallen with their process, whatever killed that."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from eagle3_helpers.errors import CheckRefused


@contextlib.contextmanager
def hold(path: Path, seconds: float, kept: str, remedy: str) -> Iterator[None]:
    """Holds the lock, after waiting up to `seconds` for it. Raises CheckRefused(kept, remedy) where somebody keeps it."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path, timeout=seconds)
    try:
        lock.acquire()
    except Timeout as error:
        raise CheckRefused(kept, remedy) from error
    try:
        yield
    finally:
        lock.release()


def is_held(path: Path) -> bool:
    """Whether a living process holds the lock. Looking takes it for an instant, and makes no file."""
    if not Path(path).exists():
        return False
    try:
        with FileLock(path, timeout=0):
            return False
    except Timeout:
        return True
