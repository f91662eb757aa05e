"""The manifest: what was stored, line by line, in one append-only file per writer.

A line either stores (`Entry`) or takes out again (`removes`: the time of the entry that it cancels). Nothing depends on
the order of files or lines: of a sample's entries that were not cancelled, the latest counts. A sample is done if it is
listed here and its file has the listed size; it is verified once the listed hash was seen again.
"""

import os
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import xxhash

from eagle3_helpers.durable import digest, read_lines
from eagle3_helpers.errors import CheckRefused
from eagle3_helpers.states.store import Store


class Entry(NamedTuple):
    sample_id: str
    n_tokens: int
    bytes: int
    xxh3: str  # xxh3_128 of the file, 32 hex
    time: int  # ns since 1970


def new_entry(sample_id: str, n_tokens: int, content: bytes, earlier: Entry | None = None) -> Entry:
    """The entry of a file with these bytes; later than `earlier` even where the clock went back."""
    now = max(time.time_ns(), earlier.time + 1 if earlier else 0)
    return Entry(sample_id, n_tokens, len(content), xxhash.xxh3_128_hexdigest(content), now)


def new_manifest_file(store: Store) -> Path:
    """A name that no other writer has, on any host that shares the store."""
    return store.folder / "manifest" / f"{socket.gethostname()}-{os.getpid()}-{time.time_ns()}.jsonl"


def read_manifest(store: Store) -> dict[str, Entry]:
    """The entries that count, by sample. Raises CheckRefused naming file and line of one that is damaged."""
    entries: list[Entry] = []
    removed: set[tuple[str, int]] = set()
    for path in sorted((store.folder / "manifest").glob("*.jsonl")):
        for number, line in enumerate(read_lines(path), 1):
            try:
                if "removes" in line:
                    removed.add((line["sample_id"], line["removes"]))
                else:
                    entries.append(Entry(**line))
            except (TypeError, KeyError) as error:
                raise CheckRefused(
                    f"{path}, line {number}, is no manifest entry: {error}.",
                    "Move that file aside; its samples are then found unlisted and taken back in after a check.",
                ) from error
    live: dict[str, Entry] = {}
    for entry in entries:
        if (entry.sample_id, entry.time) not in removed:
            live[entry.sample_id] = max(entry, live.get(entry.sample_id, entry), key=lambda one: one.time)
    return live


def manifest_digest(store: Store, sample_ids: Iterable[str] | None = None) -> str:
    """sha256 over what is stored of these samples (of all, if none are named): order, times and cancelled entries do not count.

    A store can be shared: what another run stores for other samples does not change the digest of these.
    """
    live = read_manifest(store)
    entries = live.values() if sample_ids is None else [live[name] for name in set(sample_ids) & live.keys()]
    return digest(sorted((e.sample_id, e.bytes, e.xxh3, e.n_tokens) for e in entries))
