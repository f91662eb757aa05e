"""The disks that a run writes to: where a path really leads, and whether it takes files now.

After a crash a volume may be mounted read-only, or not at all, and its mount point then silently leads to the system disk.
So the resolved path, its filesystem and mount point are shown, and writing is tried, not asked for.
"""

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil

from eagle3_helpers.display import Checks, Table, bytes_text
from eagle3_helpers.params import resolve
from eagle3_helpers.runs import Run, outputs


@dataclass(frozen=True)
class Volume:
    """`resolved` has no links in it; `there` is it, or the nearest folder above it that exists. Sizes in bytes."""

    name: str
    resolved: Path
    there: Path
    filesystem: str
    mount: str
    free: int
    total: int
    free_inodes: int
    total_inodes: int  # 0: this filesystem does not count them
    write_error: str  # empty: a probe file was written, synced and removed


def look_at(name: str, path: Path) -> Volume:
    resolved = Path(os.path.realpath(path))
    there = resolved
    while not there.is_dir():
        there = there.parent
    size = os.statvfs(there)
    filesystem, mount = _mounted(there)
    return Volume(
        name,
        resolved,
        there,
        filesystem,
        mount,
        size.f_bavail * size.f_frsize,
        size.f_blocks * size.f_frsize,
        size.f_favail,
        size.f_files,
        _write_error(there),
    )


def volumes(run: Run) -> list[Volume]:
    """The data root and outputs/ of a run, looked at now."""
    return [look_at("data root", resolve(run.params.store.data_root)), look_at("outputs", outputs())]


def describe_volumes(run: Run) -> Table:
    rows = [
        [
            volume.name,
            str(volume.resolved) + ("" if volume.there == volume.resolved else " (not there yet)"),
            f"{volume.filesystem} on {volume.mount}",
            f"{bytes_text(volume.free)} of {bytes_text(volume.total)}",
            f"{volume.free_inodes:,} of {volume.total_inodes:,}" if volume.total_inodes else "not counted",
            volume.write_error or "yes",
        ]
        for volume in volumes(run)
    ]
    return Table(["volume", "path", "filesystem", "free", "free inodes", "writable"], rows, "volumes")


def check_volumes(run: Run) -> Checks:
    """STOP for a volume that takes no file, has no inode left, or less free than store.reserve_gb (data root)."""
    checks = Checks("volumes")
    for volume in volumes(run):
        checks.add(
            f"{volume.name} is there",
            volume.there == volume.resolved,
            f"{volume.resolved} does not exist" if volume.there != volume.resolved else str(volume.resolved),
            "a folder",
            "Mount the volume, or make that folder (store.data_root).",
        )
        checks.add(
            f"{volume.name} can be written",
            not volume.write_error,
            volume.write_error or str(volume.there),
            "a probe file",
            f"Look at {volume.mount} with `findmnt` and `dmesg`; mount it for writing and check the filesystem first.",
        )
        reserve = int(run.params.store.reserve_gb * 1e9) if volume.name == "data root" else 0
        checks.add(
            f"{volume.name} has room",
            volume.free > reserve,
            bytes_text(volume.free),
            f"more than {bytes_text(reserve)}",
            f"Make room on {volume.mount}, or set store.data_root to another volume.",
        )
        if volume.total_inodes:
            checks.add(
                f"{volume.name} has inodes",
                volume.free_inodes > 0,
                volume.free_inodes,
                "more than 0",
                f"Too many small files on {volume.mount}.",
            )
    return checks


def _mounted(folder: Path) -> tuple[str, str]:
    """(type, mount point) of the filesystem that holds `folder`; the last one mounted at a place is the one seen."""
    holding = [
        part for part in psutil.disk_partitions(all=True) if folder.is_relative_to(part.mountpoint or "/nowhere")
    ]
    best = max(enumerate(holding), key=lambda item: (len(item[1].mountpoint), item[0]), default=None)
    return (best[1].fstype, best[1].mountpoint) if best else ("unknown", "/")


def _write_error(folder: Path) -> str:
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".probe-") as probe:
            probe.write(b"probe")
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        return f"no: {error.strerror}"
    return ""
