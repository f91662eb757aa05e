"""Before anything is written: does it fit where it will really be written, and how long will writing take?

The folder is resolved first, because a link may lead to another volume than the one that was looked at; where it is not
there yet, the nearest folder above it that is decides.
"""

import os
import time
from pathlib import Path

from eagle3_helpers.display import Checks, bytes_text, seconds_text
from eagle3_helpers.durable import temporary_name

SPEED_TEST_BYTES = 64_000_000
BLOCK_BYTES = 1_000_000


def forecast(store_folder: Path, tokens: int, bytes_per_token: int, reserve: float, files: int = 1) -> Checks:
    """Checks of volume, permission, space and inodes for `tokens` in `files`; `reserve` bytes must stay free.

    Writes and removes a temporary file to prove that writing works and to measure its speed.
    """
    wanted = Path(store_folder).resolve()
    folder = next(place for place in (wanted, *wanted.parents) if place.is_dir())
    where = str(wanted) if folder == wanted else f"{wanted} (not there yet; {folder} decides)"
    room = os.statvfs(folder)
    free = room.f_bavail * room.f_frsize
    needed = tokens * bytes_per_token
    change = "Make room, or point store.data_root to a larger volume."
    checks = Checks("Room for the states")
    checks.add("folder", True, where)
    checks.add(
        "free space",
        needed + reserve <= free,
        f"{bytes_text(free)} free",
        f"{bytes_text(needed)} ({tokens:,} tokens x {bytes_per_token:,} bytes) + {bytes_text(reserve)} reserve",
        change,
    )
    if room.f_files:  # some filesystems have no limit and say 0
        checks.add("free inodes", files <= room.f_favail, room.f_favail, f"{files:,} files", change)
    size = min(SPEED_TEST_BYTES, free // 4)
    try:
        speed = _write_speed(folder, size)
    except OSError as error:
        why = f"{folder}: {error.strerror}"
        return checks.add("writable", False, why, "yes", "Check the mount and its owner, or change store.data_root.")
    checks.add("writable", True, "yes", "yes")
    if size:
        duration = seconds_text(needed / speed)
        checks.add("write speed", True, f"{bytes_text(speed)}/s: {bytes_text(needed)} take {duration}, one thread")
    return checks


def _write_speed(folder: Path, size: int) -> float:
    """Bytes per second of writing and syncing `size` bytes; random ones, which no filesystem can shrink."""
    path = folder / temporary_name("speed")
    block = os.urandom(BLOCK_BYTES)
    began = time.perf_counter()
    try:
        with open(path, "wb", buffering=0) as file:
            for start in range(0, size, BLOCK_BYTES):
                file.write(block[: size - start])
            os.fsync(file.fileno())
    finally:
        path.unlink(missing_ok=True)
    return size / (time.perf_counter() - began)
