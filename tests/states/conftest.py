"""A small store of random states: hidden size 8, boundaries 1, 2 and 4, samples of 3 to 12 tokens."""

import subprocess

import numpy as np
import pytest
import torch

from eagle3_helpers.samples.table import SampleTable
from eagle3_helpers.states.format import CaptureRecord, State
from eagle3_helpers.states.store import Store
from eagle3_helpers.states.writer import StateWriter

HIDDEN = 8
LENGTHS = (5, 3, 12, 7, 5, 9)


def make_record(**changes) -> CaptureRecord:
    values = {
        "target": "tiny",
        "identity": {"config": "c0", "weights": {"model.safetensors": "w0"}},
        "backend": "transformers",
        "backend_version": "5.0",
        "flags": {},
        "boundaries": [1, 2, 4],
        "dtype": "bfloat16",
        "hidden_size": HIDDEN,
    }
    return CaptureRecord(**{**values, **changes})


def table_of(samples: list[np.ndarray]) -> SampleTable:
    """A table of these ids (int32 [L] each), all supervised."""
    arrays = {
        "input_ids": np.concatenate(samples),
        "loss_mask": np.ones(sum(map(len, samples)), np.uint8),
        "offsets": np.cumsum([0, *map(len, samples)]),
    }
    return SampleTable(None, "0" * 16, "0" * 64, arrays, {})


def make_table(lengths=LENGTHS, seed: int = 0) -> SampleTable:
    dice = np.random.default_rng(seed)
    return table_of([dice.integers(0, 300, length).astype(np.int32) for length in lengths])


def make_state(table: SampleTable, sample_id: str, record: CaptureRecord | None = None) -> State:
    record = record or make_record()
    ids = torch.from_numpy(table.input_ids(sample_id).copy())
    generator = torch.Generator().manual_seed(int(sample_id[:8], 16))
    draw = torch.randn(len(ids), 4 * record.hidden_size, generator=generator).to(record.torch_dtype)
    return State(ids, draw[:, : 3 * record.hidden_size], draw[:, 3 * record.hidden_size :])


def put_all(store: Store, table: SampleTable, sample_ids=None, threads: int = 2, reserve: float = 0) -> StateWriter:
    with StateWriter(store, threads, reserve) as writer:
        for sample_id in table.sample_ids if sample_ids is None else sample_ids:
            state = make_state(table, sample_id, store.record)
            writer.put(sample_id, state.input_ids, state.aux, state.last)
    return writer


@pytest.fixture
def table() -> SampleTable:
    return make_table()


@pytest.fixture
def store(tmp_path) -> Store:
    (tmp_path / "data").mkdir()
    return Store.create(tmp_path / "data" / "tiny", make_record())


@pytest.fixture
def filled(store, table) -> Store:
    put_all(store, table)
    return store


@pytest.fixture
def small_disk(tmp_path):
    """Mounts a real filesystem: small_disk("size=200k") -> its folder."""
    mounted = []

    def mount(options: str):
        folder = tmp_path / f"disk{len(mounted)}"
        folder.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", folder], check=True)
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", folder], check=True)
