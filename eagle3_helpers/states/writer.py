"""Writes states from several threads: a whole file first, then its line in the manifest, so a kill loses only what was not listed.

The queue is bounded, so a fast capture waits for a slow disk instead of filling memory. The first failure stops the rest
of the queue and is raised to whoever puts next (or at the end); what was stored before it stays.
"""

import contextlib
import os
import queue
import threading
from pathlib import Path

import torch

from eagle3_helpers.display import bytes_text
from eagle3_helpers.durable import append_lines, sync_folder, write_bytes
from eagle3_helpers.errors import CheckRefused
from eagle3_helpers.states.format import State, encode_state
from eagle3_helpers.states.manifest import new_entry, new_manifest_file, read_manifest
from eagle3_helpers.states.store import Store


class StateWriter:
    """`with StateWriter(store, threads, reserve_bytes) as writer: writer.put(...)`; leaves only when all is on the disk.

    `reserve_bytes` stay free on the store's volume. Raises CheckRefused with bytes needed and free and the path where
    the volume is full or fails. `samples`, `tokens` and `bytes` count what is stored and listed.
    """

    def __init__(self, store: Store, threads: int, reserve_bytes: float):
        self.store, self.reserve_bytes = store, reserve_bytes
        self.samples = self.tokens = self.bytes = 0
        self._earlier = read_manifest(store)
        self._manifest = new_manifest_file(store)
        self._queue: queue.Queue = queue.Queue(maxsize=2 * threads)
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(threads)]

    def __enter__(self) -> "StateWriter":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind, *_) -> None:
        for _thread in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()
        if kind is None:
            self._raise_failure()

    def put(self, sample_id: str, input_ids: torch.Tensor, aux: torch.Tensor, last: torch.Tensor) -> None:
        """Queues one sample: int32 [L], [L, 3H], [L, H], not to be changed afterwards. Waits while the queue is full."""
        self._raise_failure()
        self._queue.put((sample_id, State(input_ids, aux, last)))

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            if self._failure is not None:
                continue  # keeps the queue moving so that nobody waits for ever
            try:
                self._write(*item)
            except BaseException as error:
                self._failure = self._failure or error

    def _write(self, sample_id: str, state: State) -> None:
        content = encode_state(state, sample_id, self.store.record.digest)
        entry = new_entry(sample_id, len(state.input_ids), content, self._earlier.get(sample_id))
        path = self.store.state_file(sample_id)
        try:
            self._require_space(path, len(content))
            if not path.parent.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                sync_folder(path.parent.parent)
            write_bytes(path, content)
            with self._lock:
                append_lines(self._manifest, [entry._asdict()])
                self.samples += 1
                self.tokens += entry.n_tokens
                self.bytes += entry.bytes
        except OSError as error:
            raise self._refusal(path, len(content), error.strerror or str(error)) from error

    def _require_space(self, path: Path, needed: int) -> None:
        if self.reserve_bytes and self._free() - needed < self.reserve_bytes:
            kept = f"{bytes_text(self.reserve_bytes)} must stay free (store.reserve_gb)"
            raise self._refusal(path, needed, kept)

    def _free(self) -> int:
        room = os.statvfs(self.store.states)
        return room.f_bavail * room.f_frsize

    def _refusal(self, path: Path, needed: int, why: str) -> CheckRefused:
        free = "unknown"
        with contextlib.suppress(OSError):
            free = f"{self._free():,}"
        return CheckRefused(
            f"{path} was not written: {why}; needed {needed:,} bytes, free {free} bytes. "
            f"The {self.samples} samples stored before it are kept.",
            "Make room or mend the volume and run the stage again: it goes on where this stopped.",
        )
