"""A run with a small store, and the plan that its params make."""

import itertools

import numpy as np
import pytest
import safetensors.numpy

from eagle3_helpers.durable import append_lines, file_digest, write_bytes, write_json
from eagle3_helpers.gate.plan import build_plan, write_plan
from eagle3_helpers.params import load_params
from eagle3_helpers.runs import Run, outputs
from eagle3_helpers.samples.table import load_samples
from eagle3_helpers.states.format import CaptureRecord
from eagle3_helpers.states.manifest import manifest_digest, new_entry, new_manifest_file
from eagle3_helpers.states.store import Store
from tests.makers import make_home

NUMBERS = itertools.count()
FREEZE_TABLE = {
    "rows": [
        {"tensor": "embed_tokens.weight", "count": 500, "trainable": False},
        {"tensor": "lm_head.weight", "count": 100, "trainable": False},
        {"tensor": "fc.weight", "count": 1000, "trainable": True},
    ],
    "trainable": 1000,
    "frozen": 600,
}
WARMUP = {"seconds_per_step": 0.5, "seconds_per_evaluation": 0.25, "seconds_per_checkpoint": 2.0, "steps": 3}


@pytest.fixture(scope="session")
def params_file(tmp_path_factory):
    return make_home(tmp_path_factory.mktemp("home"))


@pytest.fixture
def open_run(params_file, monkeypatch):
    """open_run(run_id, **overrides with __ for the dot) -> Run; its folder is new for each test."""
    home = params_file.parents[1]
    monkeypatch.setenv("EAGLE3_RUNBOOK_HOME", str(home))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    unique = f"t{next(NUMBERS)}"

    def open_it(run_id: str = "one", **overrides) -> Run:
        settings = {"run_id": f"{unique}-{run_id}", "store.name": unique}
        settings |= {name.replace("__", "."): value for name, value in overrides.items()}
        params = load_params(str(params_file), settings)
        folder = outputs() / params.run_id
        folder.mkdir(parents=True, exist_ok=True)
        params.store_folder.parent.mkdir(exist_ok=True)
        if not params.store_folder.exists():
            make_samples(params.store_folder)
            list_states(Store.create(params.store_folder, RECORD), load_samples(params.store_folder).sample_ids)
        return Run(folder, params)

    return open_it


RECORD = CaptureRecord(
    target="target",
    identity={},
    backend="transformers",
    backend_version="0",
    flags={},
    boundaries=[2, 4, 5],
    dtype="float32",
    hidden_size=32,
)


def make_samples(folder) -> None:
    """A table of three samples of ten tokens, other ones for every store."""
    ids = np.arange(30, dtype=np.int32) + 100 * next(NUMBERS)
    arrays = {"input_ids": ids, "loss_mask": np.ones(30, np.uint8), "offsets": np.arange(0, 31, 10)}
    path = folder / "samples.safetensors"
    write_bytes(path, safetensors.numpy.save(arrays))
    write_json(folder / "accounting.json", {"fingerprint": "f" * 16, "digest": file_digest(path), "accounting": {}})


def list_states(store: Store, sample_ids: list[str]) -> None:
    """Lists states with new bytes for these samples."""
    entries = [new_entry(name, 10, str(next(NUMBERS)).encode()) for name in sample_ids]
    append_lines(new_manifest_file(store), [entry._asdict() for entry in entries])


def make_plan(run: Run):
    """The plan that the params of `run` make now, not written."""
    store = Store.open(run.params.store_folder)
    training = run.params.training
    table, vocab = load_samples(store.folder), store.folder / "draft_vocab.safetensors"
    if not vocab.exists():
        vocab.write_text(vocab.name)
    spec = {
        "folder": str(run.folder / "training"),
        "target": run.params.target.model_dump(mode="json"),
        "store": str(store.folder),
        "samples": str(store.folder),
        "draft_vocab": str(vocab),
        "manifest_digest": manifest_digest(store, table.sample_ids),
        "samples_digest": table.digest,
        "draft_vocab_digest": file_digest(vocab),
        "draft": {"hidden_size": 32},
        "training": training.model_dump(mode="json"),
        "steps_per_epoch": 4,
        "optimizer_steps": 4 * training.epochs,
        "held_out": ("00112233aabbccdd",),
    }
    return build_plan(run, spec, FREEZE_TABLE, {"hidden_size": 32}, WARMUP)


def written_plan(run: Run):
    return write_plan(run, make_plan(run))
