"""Reads every byte of a store once and says whether it may be trained on.

Each listed file must have the listed hash, decode, be of this capture, hold the sample's own tokens, and have finite states
of the right shape for every one of them. Norms are shown per block (h_k and last), because a wrong one often gives itself
away there; rows that are zero or constant are found, as buffers that were never filled look like that.
"""

import functools
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from eagle3_helpers.display import Checks, Table, bytes_text
from eagle3_helpers.durable import write_json
from eagle3_helpers.progress import Progress
from eagle3_helpers.states.check_file import examine, in_threads
from eagle3_helpers.states.format import CaptureRecord, Damage, State
from eagle3_helpers.states.inventory import MISSING, Finding
from eagle3_helpers.states.manifest import Entry, manifest_digest, read_manifest
from eagle3_helpers.states.store import Store

KINDS = (
    MISSING,
    "unreadable",
    "corrupt",
    "checksum mismatch",
    "wrong capture",
    "wrong length",
    "wrong tokens",
    "wrong shape",
    "non-finite",
    "dead rows",
)
NORM_ROWS = 64  # of each sample go into the percentiles; the mean is over all
REMEDY = "Move them to quarantine (notebook 01), then capture them again (notebook 02)."


class _Sound(NamedTuple):
    tokens: int
    bytes: int
    norm_sums: torch.Tensor  # [slots]
    norm_rows: torch.Tensor  # [<= NORM_ROWS, slots]


class Verification:
    """`checks` with one row per class of damage, `findings` (name every bad sample), `totals` and `norms` per block."""

    def __init__(self, checks: Checks, findings: list[Finding], totals: dict, norms: dict, manifest: str):
        self.checks, self.findings, self.totals, self.norms = checks, findings, totals, norms
        self.manifest_digest = manifest

    @property
    def ok(self) -> bool:
        return self.checks.ok

    def values(self) -> dict:
        """What verification.json holds."""
        return {
            "checks": self.checks.items,
            "totals": self.totals,
            "norms": self.norms,
            "findings": [finding._asdict() for finding in self.findings],
            "manifest_digest": self.manifest_digest,
        }

    def save(self, path: Path) -> None:
        write_json(path, self.values())

    def _tables(self) -> list:
        norms = Table(
            ["block", "mean norm", "1 %", "median", "99 %"],
            [[slot, n["mean"], n["p1"], n["p50"], n["p99"]] for slot, n in self.norms.items()],
            f"Norms of a token's states; {self.totals['tokens']:,} tokens, {bytes_text(self.totals['bytes'])} read",
        )
        bad = Table(
            ["sample", "class", "detail"],
            [[finding.sample_id, finding.kind, finding.detail] for finding in self.findings[:10]],
            f"Bad samples ({len(self.findings):,}, the first 10)",
        )
        return [self.checks, norms, *([bad] if self.findings else [])]

    def __repr__(self) -> str:
        return "\n\n".join(map(repr, self._tables()))

    def _repr_html_(self) -> str:
        return "".join(table._repr_html_() for table in self._tables())


def verify_store(store: Store, table) -> Verification:
    """Reads the listed file of every sample in `table`. Collects all damage; raises only for a damaged manifest."""
    manifest, digest = read_manifest(store), manifest_digest(store, table.sample_ids)
    work = functools.partial(_examine, store, table, manifest)
    sound: list[_Sound] = []
    findings: list[Finding] = []
    began, size = time.perf_counter(), 0
    with Progress("verify", len(table), "files") as progress:
        for result in in_threads(work, table.sample_ids):
            (sound if isinstance(result, _Sound) else findings).append(result)
            size += result.bytes
            progress.add(1, f"{size / 1e9 / (time.perf_counter() - began):.2f} GB/s")
    checks = Checks("States on the disk")
    checks.add("samples that may be trained on", len(sound) == len(table), len(sound), len(table), REMEDY)
    counts = Counter(finding.kind for finding in findings)
    for kind in KINDS:
        checks.add(kind, not counts[kind], counts[kind], 0, REMEDY)
    totals = {
        "samples": len(sound),
        "files": len(sound) + sum(finding.kind != MISSING for finding in findings),
        "tokens": sum(one.tokens for one in sound),
        "bytes": size,
        "seconds": round(time.perf_counter() - began, 3),
    }
    return Verification(checks, sorted(findings), totals, _norms(sound, store.record), digest)


def _examine(store: Store, table, manifest: dict[str, Entry], sample_id: str) -> _Sound | Finding:
    listed = manifest.get(sample_id)
    path, size = "", 0
    try:
        if listed is None:
            raise Damage(MISSING, "not in the manifest")
        path, size = str(store.state_file(sample_id)), listed.bytes
        state, entry = examine(store, sample_id, table.input_ids(sample_id), listed)
        blocks = _blocks(state, store.record)
        _refuse_dead_rows(blocks, store.record)
        _refuse_equal_rows(blocks, state.input_ids, store.record)
        norms = torch.stack([torch.linalg.vector_norm(b, dim=1, dtype=torch.float32) for b in blocks], dim=1)
        rows = torch.linspace(0, len(norms) - 1, min(NORM_ROWS, len(norms))).long()
        return _Sound(len(norms), entry.bytes, norms.sum(dim=0, dtype=torch.float64), norms[rows])
    except Damage as damage:
        return Finding(sample_id, damage.kind, damage.detail, path, size)


def _blocks(state: State, record: CaptureRecord) -> list[torch.Tensor]:
    """The [L, H] blocks in the order of record.slots."""
    return [*state.aux.split(record.hidden_size, dim=1), state.last]


def _refuse_dead_rows(blocks: list[torch.Tensor], record: CaptureRecord) -> None:
    """Raises Damage for rows that no layer computes: half of it or more exactly zero, or all numbers equal.

    h_0 is let be: it is the embedding, where the row of a padding token may well be zero. Bit patterns are compared, in
    numpy, because that runs at the speed of memory.
    """
    for slot, block in zip(record.slots, blocks, strict=True):
        if slot == "h_0":
            continue
        bits, width = block.view(torch.int32 if block.itemsize == 4 else torch.int16).numpy(), block.shape[1]
        dead = (bits == bits[:, :1]).all(axis=1)
        if bits.size - np.count_nonzero(bits) >= width / 2:  # else no row can hold that many zeros
            dead |= np.count_nonzero(bits, axis=1) <= width / 2
        if dead.any():
            rows = np.flatnonzero(dead)
            raise Damage("dead rows", f"{slot} is zero or constant in {len(rows)} rows, first {rows[0]}")


def _refuse_equal_rows(blocks: list[torch.Tensor], input_ids: torch.Tensor, record: CaptureRecord) -> None:
    """Raises Damage for a block that says the same of every token though the tokens differ."""
    for slot, block in zip(record.slots, blocks, strict=True):
        if torch.equal(block[0], block[-1]) and (block == block[:1]).all() and (input_ids != input_ids[0]).any():
            raise Damage("dead rows", f"{slot} is the same for all {len(block)} tokens")


def _norms(sound: list[_Sound], record: CaptureRecord) -> dict[str, dict[str, float]]:
    if not sound:
        return {}
    mean = sum(one.norm_sums for one in sound) / sum(one.tokens for one in sound)
    rows = torch.cat([one.norm_rows for one in sound]).numpy()
    low, middle, high = np.percentile(rows, (1, 50, 99), axis=0)  # torch.quantile refuses more than 16 million numbers
    return {
        slot: {"mean": float(mean[n]), "p1": float(low[n]), "p50": float(middle[n]), "p99": float(high[n])}
        for n, slot in enumerate(record.slots)
    }
