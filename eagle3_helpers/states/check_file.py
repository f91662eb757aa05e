"""Looks at one state file with a single read: bytes, hash, decoded state, and whether it is the sample's. Many in threads."""

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import NamedTuple

import numpy as np

from eagle3_helpers.states.format import Damage, State, check_state, decode_state, read_content
from eagle3_helpers.states.manifest import Entry, new_entry
from eagle3_helpers.states.store import Store


class Examined(NamedTuple):
    """A state that is sound, and the entry that describes its file as it is now."""

    state: State
    entry: Entry


def examine(store: Store, sample_id: str, input_ids, listed: Entry | None) -> Examined:
    """Reads the file of `sample_id` once. `input_ids` int32 [L] are the sample's, `listed` its manifest entry if it has one.

    Raises Damage: missing, unreadable, corrupt, checksum mismatch, wrong capture, wrong length, wrong tokens, wrong shape
    or non-finite, the first that holds.
    """
    content = read_content(store.state_file(sample_id))
    state = decode_state(content, sample_id, store.record.digest)
    entry = new_entry(sample_id, len(state.input_ids), content)
    if listed is not None and (entry.xxh3, entry.bytes) != (listed.xxh3, listed.bytes):
        raise Damage("checksum mismatch", f"xxh3 is {entry.xxh3}, listed as {listed.xxh3}")
    expected, found = np.asarray(input_ids), state.input_ids.numpy()
    if len(found) != len(expected):
        raise Damage("wrong length", f"the file has {len(found)} tokens, the sample {len(expected)}")
    if not np.array_equal(found, expected):
        first = int(np.flatnonzero(found != expected)[0])
        raise Damage("wrong tokens", f"token {first} is {found[first]}, the sample has {expected[first]}")
    check_state(state, store.record)
    return Examined(state, entry)


def in_threads(work: Callable, items: Iterable) -> Iterator:
    """Results of work(item) as they come. Results should be small: those not yet taken are kept."""
    pool = ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1))
    try:
        for future in as_completed([pool.submit(work, item) for item in items]):
            yield future.result()
    finally:
        pool.shutdown(cancel_futures=True)
