"""A run with a small store, and the plan that its params make."""

import itertools

import pytest

from eagle3_helpers.durable import append_lines, digest, file_digest
from eagle3_helpers.gate.plan import build_plan, write_plan
from eagle3_helpers.params import load_params
from eagle3_helpers.runs import Run, outputs
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
WARMUP = {"seconds_per_step": 0.5, "steps": 3}


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
            add_samples(Store.create(params.store_folder, RECORD), 3)
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


def add_samples(store: Store, count: int) -> None:
    contents = [str(next(NUMBERS)).encode() for _ in range(count)]
    entries = [new_entry(digest(content)[:16], 10, content) for content in contents]
    append_lines(new_manifest_file(store), [entry._asdict() for entry in entries])


def make_plan(run: Run):
    """The plan that the params of `run` make now, not written."""
    store = Store.open(run.params.store_folder)
    training = run.params.training
    samples, vocab = store.folder / "samples.safetensors", store.folder / "draft_vocab.safetensors"
    for path in (samples, vocab):
        if not path.exists():
            path.write_text(path.name)
    spec = {
        "folder": str(run.folder / "training"),
        "target": run.params.target.model_dump(mode="json"),
        "store": str(store.folder),
        "samples": str(store.folder),
        "draft_vocab": str(vocab),
        "manifest_digest": manifest_digest(store),
        "samples_digest": file_digest(samples),
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
