"""Files that survive a crash: whole or absent, and never older than what was reported.

A file is written under a temporary name in its own folder, synced, renamed, and the folder is synced. Line files grow by
whole lines; a last line that a crash tore is not a record, a bad line anywhere else is an error with its number.
Canonical JSON (sorted keys, no spaces) is what gets digested, so equal content has equal digests.
"""

import contextlib
import hashlib
import json
import os
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path

from eagle3_helpers.errors import CheckRefused

TEMPORARY = ".writing-"


def temporary_name(name: str) -> str:
    """A name for the unfinished `name` that says who writes it and that nobody else uses, on any host or in any container."""
    return f"{TEMPORARY}{name}~{socket.gethostname()}~{os.getpid()}~{secrets.token_hex(4)}"


def temporary_writer(name: str) -> tuple[str, int] | None:
    """(host, process id) that a temporary name tells of; None where it was not made by `temporary_name`."""
    parts = name.rsplit("~", 3)
    return (parts[1], int(parts[2])) if len(parts) == 4 and parts[2].isdigit() else None


def sync_folder(folder: Path) -> None:
    """Makes renames inside `folder` durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_bytes(path: Path, content: bytes) -> None:
    """Puts `content` at `path`, whole or not at all. The folder is made if it is not there."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / temporary_name(path.name)
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, path)  # never across filesystems: EXDEV stays an error, not a copy
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_json(path: Path, value) -> None:
    """Readable JSON, keys in the order given."""
    write_bytes(path, (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode())


def read_json(path: Path):
    """The value, or None where the file is absent, empty or not JSON."""
    try:
        return json.loads(Path(path).read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None


def canonical_json(value) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def digest(value) -> str:
    """sha256 (64 hex) of bytes, or of the canonical JSON of anything else."""
    return hashlib.sha256(value if isinstance(value, bytes) else canonical_json(value)).hexdigest()


def file_digest(path: Path) -> str:
    """sha256 (64 hex) of a file's bytes. Raises OSError where it cannot be read."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def append_lines(path: Path, records: list[dict], durable: bool = True) -> None:
    """Adds one JSON line a record. A tail that an earlier crash tore is cut off first, so nothing is glued on to it."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    text = json_lines(records)
    with open(path, "ab+") as file:
        end = file.seek(0, os.SEEK_END)
        if end:
            file.seek(end - 1)
            if file.read(1) != b"\n":
                file.truncate(_end_of_last_whole_line(file, end))
        file.write(text.encode())
        file.flush()
        if durable:
            os.fsync(file.fileno())
    if new and durable:
        sync_folder(path.parent)


def json_lines(records: list[dict]) -> str:
    return "".join(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n" for record in records)


def _end_of_last_whole_line(file, end: int, block: int = 65536) -> int:
    """Offset just behind the last newline before `end`, 0 if there is none."""
    while end:
        start = max(0, end - block)
        file.seek(start)
        at = file.read(end - start).rfind(b"\n")
        if at >= 0:
            return start + at + 1
        end = start
    return 0


def read_lines(path: Path) -> Iterator[dict]:
    """The records of a line file; none where it is absent. A torn last line is left out.

    Raises CheckRefused for a bad line that is followed by others.
    """
    try:
        file = open(path, "rb")  # noqa: SIM115 (closed below; an absent file is an empty one)
    except FileNotFoundError:
        return
    with file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                yield json.loads(line)
            except ValueError as error:
                raise CheckRefused(
                    f"{path}, line {number}, is not a JSON record ({error}).",
                    "Look at that line; move the file aside and rebuild it if the line cannot be mended.",
                ) from error
