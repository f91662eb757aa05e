"""A real tiny run for the trainer: target, samples, captured states, draft vocabulary, and a plan file with nothing but argv and spec."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from eagle3_helpers.capture.transformers_backend import capture, capture_record
from eagle3_helpers.draft.model import DraftConfig
from eagle3_helpers.durable import canonical_json, digest, file_digest, read_json, write_bytes, write_json
from eagle3_helpers.params import load_params
from eagle3_helpers.runs import Run
from eagle3_helpers.samples.table import build_samples
from eagle3_helpers.samples.vocab import choose_draft_vocab
from eagle3_helpers.states.store import Store
from eagle3_helpers.target import Target
from eagle3_helpers.training import loop
from eagle3_helpers.training.batches import Order
from eagle3_helpers.training.monitor import read_metrics
from eagle3_helpers.training.spec import TrainingSpec, make_spec
from tests.makers import make_home


class TinyRun:
    """One training under `home`, which holds its own copy of the states."""

    def __init__(self, home: Path, **training):
        self.home = home
        params = load_params(
            str(home / "params" / "tiny.yaml"), {f"training.{name}": value for name, value in training.items()}
        )
        self.params = params.model_copy(
            update={
                "target": params.target.model_copy(update={"path": str(home / "target")}),
                "store": params.store.model_copy(update={"data_root": str(home / "data")}),
            }
        )
        self.run = Run(home / "outputs" / "tiny", self.params)
        self.folder = self.run.folder / "training"
        self.target = Target(self.params.target)
        self.store = Store.open(self.params.store_folder)
        self.plan_file = self.run.folder / "plan.json"
        self.spec = self.make_spec()
        self.write_plan()

    def make_spec(self) -> TrainingSpec:
        table = build_samples(self.params, self.target, self.home / "conversations.jsonl")
        config = DraftConfig.from_params(self.params.draft, self.target)
        return make_spec(self.params, self.folder, table, self.home / "draft_vocab.safetensors", config)

    def write_plan(self, spec: dict | None = None, **fields) -> None:
        argv = [sys.executable, "-m", "eagle3_helpers.training.loop", str(self.plan_file)]
        self.plan = {"argv": argv, "gpus": [], "spec": spec or self.spec.model_dump(mode="json"), **fields}
        write_bytes(self.plan_file, canonical_json(self.plan))

    def redeem(self, _run: Run) -> SimpleNamespace:
        return SimpleNamespace(values=self.plan)

    def train(self) -> int:
        """The trainer in this process; its exit code."""
        return loop.main([str(self.plan_file), digest(self.plan)])

    def start(self) -> subprocess.Popen:
        return subprocess.Popen(
            [*self.plan["argv"], digest(self.plan)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def samples_of(self, step: int) -> list[str]:
        table = build_samples(self.params, self.target, self.home / "conversations.jsonl")
        train = [name for name in table.sample_ids if name not in self.spec.held_out]
        return Order(train, self.spec.training.seed, self.spec.training.samples_per_step).step(step)[2]

    def block(self, step: int) -> "Blocked":
        """Puts a pipe in the place of a state that step `step` (counted from 0) needs: the trainer waits there."""
        return Blocked(self.store.state_file(self.samples_of(step)[0]))

    @property
    def result(self) -> dict | None:
        return read_json(self.folder / "result.json")

    @property
    def metrics(self) -> list[dict]:
        return read_metrics(self.folder)

    def weights(self, step: int) -> bytes:
        return (self.folder / "checkpoints" / f"step-{step:06d}" / "draft.safetensors").read_bytes()

    def moments(self, step: int) -> bytes:
        return (self.folder / "checkpoints" / f"step-{step:06d}" / "optimizer.safetensors").read_bytes()


class Blocked:
    """A state file whose bytes come through a pipe."""

    def __init__(self, path: Path):
        self.path, self.content = path, path.read_bytes()
        path.unlink()
        os.mkfifo(path)
        self.end = None

    def reached(self) -> None:
        """Returns once the trainer has opened the pipe and waits for bytes."""
        self.end = open(self.path, "wb")  # noqa: SIM115 (opening waits for the reader)

    def restore(self) -> None:
        """The whole file is back under its name; a reader that waits gets the bytes."""
        self.path.unlink()
        self.path.write_bytes(self.content)
        if self.end is not None:
            self.end.write(self.content)
            self.end.close()

    def drop(self) -> None:
        """The reader is gone; the file is back."""
        self.path.unlink()
        self.path.write_bytes(self.content)
        self.end.close()


@pytest.fixture(scope="session")
def captured(tmp_path_factory) -> Path:
    home = tmp_path_factory.mktemp("captured")
    params = load_params(str(make_home(home)))
    target = Target(params.target)
    table = build_samples(params, target, home / "conversations.jsonl")
    params.store_folder.parent.mkdir(exist_ok=True)
    store = Store.create(params.store_folder, capture_record(params, target))
    capture(params, target, store, table, table.sample_ids)
    choose_draft_vocab(table, params.draft.vocab_size, target).save(home / "draft_vocab.safetensors")
    return home


@pytest.fixture
def tiny_run(captured, tmp_path):
    def make(**training) -> TinyRun:
        home = tmp_path / f"home{len(list(tmp_path.glob('home*')))}"
        shutil.copytree(captured, home)
        return TinyRun(home, **training)

    return make


@pytest.fixture(scope="session")
def straight(captured, tmp_path_factory) -> TinyRun:
    """A run of ten steps that nothing disturbed."""
    home = tmp_path_factory.mktemp("straight") / "home"
    shutil.copytree(captured, home)
    run = TinyRun(home)
    assert run.train() == 0
    return run


@pytest.fixture
def finished(straight, tiny_run) -> TinyRun:
    """A run of its own that was trained as `straight` was."""
    run = tiny_run()
    shutil.copytree(straight.folder, run.folder)
    (run.folder / "events.jsonl").unlink()
    write_json(run.folder / "process.json", {"status": "finished"})  # the one that trained is this very process
    for folder in (run.folder / "checkpoints").iterdir():  # the paths in a spec are the run's own
        rewrite_state(folder, spec=run.spec.model_dump(mode="json"))
    result = straight.result | {"spec_digest": run.spec.digest, "plan_digest": digest(run.plan)}
    write_json(run.folder / "result.json", result)
    return run


def rewrite_state(checkpoint: Path, **changes) -> None:
    """A checkpoint with another state.json, and a marker that fits it."""
    write_json(checkpoint / "state.json", read_json(checkpoint / "state.json") | changes)
    marker = read_json(checkpoint / "complete.json")
    marker["sha256"]["state.json"] = file_digest(checkpoint / "state.json")
    write_json(checkpoint / "complete.json", marker)
