"""Takes bad files out of a store without losing them: each is moved to `quarantine/<time>/`, with its reason beside it.

The order makes a crash harmless: reason, move, then the manifest entry is cancelled. Between the last two the sample reads
as missing, which is true. Nothing is deleted. Orphans are never moved: they may belong to another sample list.
"""

import dataclasses
import os
import time
from datetime import UTC, datetime
from pathlib import Path

from eagle3_helpers.display import Table, bytes_text
from eagle3_helpers.durable import append_lines, sync_folder
from eagle3_helpers.errors import CheckRefused
from eagle3_helpers.states.inventory import ORPHAN, Finding
from eagle3_helpers.states.manifest import new_manifest_file, read_manifest
from eagle3_helpers.states.store import Store


@dataclasses.dataclass(frozen=True)
class Quarantined:
    """What was moved where; `folder` is None when there was nothing to move."""

    folder: Path | None
    findings: list[Finding]
    files: int
    bytes: int

    def _table(self) -> Table:
        where = f" to {self.folder}" if self.folder else ""
        return Table(
            ["sample", "class", "detail"],
            [[finding.sample_id, finding.kind, finding.detail] for finding in self.findings],
            f"{self.files:,} files ({bytes_text(self.bytes)}) moved{where}",
        )

    def __repr__(self) -> str:
        return repr(self._table())

    def _repr_html_(self) -> str:
        return self._table()._repr_html_()


def quarantine(store: Store, findings: list[Finding]) -> Quarantined:
    """Moves the files of all findings but orphans and cancels their manifest entries; the samples are then missing.

    Raises CheckRefused where a file cannot be moved; those before it are moved and recorded.
    """
    findings = [finding for finding in findings if finding.kind != ORPHAN]
    if not findings:
        return Quarantined(None, [], 0, 0)
    manifest = read_manifest(store)
    tombstones = new_manifest_file(store)
    folder = store.folder / "quarantine" / datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
    append_lines(folder / "reasons.jsonl", [{**finding._asdict(), "time": time.time_ns()} for finding in findings])
    sync_folder(folder.parent)
    files = size = 0
    for finding in findings:
        path = Path(finding.path) if finding.path else None
        try:
            if path and path.exists():
                size += path.stat().st_size
                os.rename(path, folder / path.name)  # within the store: EXDEV stays an error, not a copy
                sync_folder(folder)
                sync_folder(path.parent)
                files += 1
        except OSError as error:
            raise CheckRefused(
                f"{path} cannot be moved to {folder}: {error.strerror}.", "Check the mount and its owner; run again."
            ) from error
        entry = manifest.get(finding.sample_id)
        if entry is not None and path in (None, store.state_file(finding.sample_id)):
            record = {
                "sample_id": entry.sample_id,
                "removes": entry.time,
                "reason": finding.kind,
                "time": time.time_ns(),
            }
            append_lines(tombstones, [record])
    return Quarantined(folder, findings, files, size)
