"""What is in a store, from the manifest and the files' sizes alone: fast, and no proof that the bytes are right.

Every sample of the table is in one class: ok (listed, size and length as listed), truncated (size differs), wrong length
(other number of tokens than the table's), unlisted (a file, but no entry: its writer was killed in between, or the manifest
was lost), lost (an entry, but no file) or never stored. Outside the table there are unfinished writes (temporary files
whose writer is gone) and orphans (states of no sample here; they may be of another sample list and are only reported).
"""

import contextlib
import os
import socket
import time
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import psutil

from eagle3_helpers.display import Checks, Table, bytes_text
from eagle3_helpers.durable import TEMPORARY, temporary_writer
from eagle3_helpers.states.format import SUFFIX
from eagle3_helpers.states.manifest import Entry, read_manifest
from eagle3_helpers.states.store import Store

MISSING, TRUNCATED, WRONG_LENGTH = "missing", "truncated", "wrong length"
UNLISTED, UNFINISHED, ORPHAN = "unlisted", "unfinished write", "orphan"


FOREIGN_HOURS = 6


class Finding(NamedTuple):
    """Something in a store that is not as it should be."""

    sample_id: str
    kind: str
    detail: str
    path: str  # of the file; "" where there is none
    bytes: int = 0


class Inventory:
    """Lists of sample ids (`ok`, and `missing`: to be captured) in the table's order, and the `findings`.

    `missing` holds samples that were never stored and those whose file is gone. Truncated files and the like become
    missing when they are moved to quarantine, unlisted ones may be adopted.
    """

    def __init__(self, total: int, ok: list[str], ok_bytes: int, missing: list[str], findings: list[Finding]):
        self.total, self.ok, self.ok_bytes = total, ok, ok_bytes
        self.missing, self.findings = missing, findings

    @property
    def complete(self) -> bool:
        """Every sample of the table is ok."""
        return len(self.ok) == self.total

    @property
    def damage(self) -> list[Finding]:
        """Findings that notebook 01 can put right: not what was never stored, not what may be somebody else's."""
        return [finding for finding in self.findings if finding.kind not in (MISSING, ORPHAN)]

    @property
    def counts(self) -> dict[str, int]:
        """Samples or files by class; ok, missing, truncated, wrong length and unlisted add up to the table."""
        return {kind: len(names) for kind, names, _bytes in self._classes()}

    def _classes(self) -> list[tuple[str, list[str], int]]:
        classes = [("ok", self.ok, self.ok_bytes), (MISSING, self.missing, 0)]
        for kind in (TRUNCATED, WRONG_LENGTH, UNLISTED, UNFINISHED, ORPHAN):
            found = [finding for finding in self.findings if finding.kind == kind]
            classes.append((kind, [Path(f.path).name for f in found], sum(f.bytes for f in found)))
        return classes

    def _table(self) -> Table:
        rows = [
            [kind, len(names), bytes_text(size), ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")]
            for kind, names, size in self._classes()
        ]
        return Table(
            ["class", "count", "bytes", "first"], rows, f"{len(self.ok):,} of {self.total:,} samples are stored"
        )

    def __repr__(self) -> str:
        return repr(self._table())

    def _repr_html_(self) -> str:
        return self._table()._repr_html_()


def take_inventory(store: Store, table) -> Inventory:
    """Compares manifest, files and sample table; reads no state. Raises CheckRefused for a damaged manifest."""
    manifest = read_manifest(store)
    sizes, findings = _scan(store)
    ok, ok_bytes, missing = [], 0, []
    for sample_id, length in zip(table.sample_ids, table.lengths.tolist(), strict=True):
        entry = manifest.pop(sample_id, None)
        size = sizes.get(sample_id)
        if size is None and entry is not None:
            size = _size(store.state_file(sample_id))
        if size is None:
            missing.append(sample_id)
            if entry is not None:
                findings.append(Finding(sample_id, MISSING, "listed in the manifest, but the file is gone", ""))
            continue
        problem = _problem(entry, size, length)
        if problem:
            findings.append(Finding(sample_id, *problem, str(store.state_file(sample_id)), size))
        else:
            ok.append(sample_id)
            ok_bytes += size
    known = set(table.sample_ids)
    for sample_id in sizes.keys() - known:
        detail = "listed" if sample_id in manifest else "not listed"
        path = str(store.state_file(sample_id))
        findings.append(Finding(sample_id, ORPHAN, f"not in this sample list, {detail}", path, sizes[sample_id]))
    return Inventory(len(table), ok, ok_bytes, missing, sorted(findings))


def check_usable(inventory: Inventory) -> Checks:
    """That nothing damaged or unlisted lies in the way of a capture; missing samples and orphans do not."""
    checks = Checks("The store can be added to")
    for kind in (TRUNCATED, WRONG_LENGTH, UNLISTED, UNFINISHED):
        checks.add(kind, not inventory.counts[kind], inventory.counts[kind], 0, "Run 01_recover: it puts these right.")
    return checks


def check_complete(inventory: Inventory) -> Checks:
    """That every sample of the table is stored, and nothing damaged is left."""
    remedy = "Run this stage again; a sample that is refused each time has NaN or inf in its states."
    stored = len(inventory.ok)
    checks = Checks("Every sample is stored").add("samples stored", inventory.complete, stored, inventory.total, remedy)
    checks.items += check_usable(inventory).items
    return checks


def _problem(entry: Entry | None, size: int, length: int) -> tuple[str, str] | None:
    if entry is None:
        return UNLISTED, f"{size:,} bytes, not in the manifest"
    if size != entry.bytes:
        return TRUNCATED, f"{size:,} bytes, listed with {entry.bytes:,}"
    if entry.n_tokens != length:
        return WRONG_LENGTH, f"listed with {entry.n_tokens:,} tokens, the sample has {length:,}"
    return None


def _scan(store: Store) -> tuple[dict[str, int], list[Finding]]:
    """Sizes of the state files by sample id, and what else lies among them."""
    sizes: dict[str, int] = {}
    others: dict[str, list[os.DirEntry]] = defaultdict(list)
    folders = [entry for entry in _entries(store.states) if entry.is_dir()]
    for folder in folders:
        for entry in _entries(folder.path):
            sample_id = entry.name.removesuffix(SUFFIX)
            if sample_id != entry.name and sample_id[:2] == folder.name and not entry.name.startswith(TEMPORARY):
                with contextlib.suppress(FileNotFoundError):
                    sizes[sample_id] = entry.stat().st_size
            else:
                others[UNFINISHED if entry.name.startswith(TEMPORARY) else ORPHAN].append(entry)
    findings = []
    for kind, entries in others.items():
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # a live writer may rename it meanwhile
                if kind == ORPHAN or not _being_written(entry):
                    sample_id = entry.name.removeprefix(TEMPORARY).split(".")[0]
                    findings.append(Finding(sample_id, kind, "", entry.path, entry.stat().st_size))
    return sizes, findings


def _entries(folder) -> list[os.DirEntry]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except FileNotFoundError:
        return []


def _size(path: Path) -> int | None:
    """Asked once more by name: a network filesystem's listing may be older than the file."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def _being_written(entry: os.DirEntry) -> bool:
    """Whether the process that the temporary name tells of may still write it.

    On this host it must run and have begun before the file did; on another host nobody here can tell, so a file that changed
    within FOREIGN_HOURS is left alone.
    """
    writer = temporary_writer(entry.name)
    try:
        changed = entry.stat().st_mtime
        if writer is not None and writer[0] != socket.gethostname():
            return time.time() - changed < FOREIGN_HOURS * 3600
        return writer is not None and psutil.Process(writer[1]).create_time() <= changed
    except (psutil.Error, FileNotFoundError):
        return False
