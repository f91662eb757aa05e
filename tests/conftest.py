"""Shared by the tests that run the command: one tiny home for the whole session, and the command as a real process."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from eagle3_helpers.durable import file_digest
from eagle3_helpers.runner import NOTEBOOKS
from tests.makers import make_home, teach_target

# The tests share two cores with the processes they start.
os.environ.setdefault("OMP_NUM_THREADS", "1")


class Home:
    """A runbook's home in a temporary folder. Tests keep apart by run id; the store is shared, as on a real node."""

    def __init__(self, folder: Path, params: Path):
        self.folder, self.params = folder, params
        self.environment = {**os.environ, "EAGLE3_RUNBOOK_HOME": str(folder)}

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "eagle3_helpers.cli", *map(str, arguments)]

    def call(self, *arguments: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            self.command(*arguments), env=self.environment, capture_output=True, text=True, timeout=240, cwd=self.folder
        )

    def run(self, run_id: str, *arguments: str) -> subprocess.CompletedProcess:
        return self.call("run", "-p", self.params, "--run-id", run_id, *arguments)

    def start(self, run_id: str, *arguments: str) -> subprocess.Popen:
        return subprocess.Popen(
            self.command("run", "-p", self.params, "--run-id", run_id, *arguments),
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.folder,
        )

    def papermill(self, stage: str, run_id: str, output: Path) -> subprocess.CompletedProcess:
        """The plain papermill command, without the runner."""
        names = {"params_file": str(self.params), "run_id": run_id}
        parameters = [word for name, value in names.items() for word in ("-p", name, value)]
        return subprocess.run(
            [sys.executable, "-m", "papermill", NOTEBOOKS / f"{stage}.ipynb", output, "-k", "python3", *parameters],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=240,
        )

    def out(self, run_id: str) -> Path:
        return self.folder / "outputs" / run_id

    def receipt(self, run_id: str, stage: str) -> dict | None:
        path = self.out(run_id) / "receipts" / f"{stage}.json"
        return json.loads(path.read_text()) if path.exists() else None

    def events(self, run_id: str, kind: str = "") -> list[dict]:
        path = self.out(run_id) / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        events = [json.loads(line) for line in lines if line.endswith("}")]
        return [event for event in events if not kind or event["kind"] == kind]

    def digest_of_plan(self, run_id: str) -> str:
        return file_digest(self.out(run_id) / "plan.json")


def until(happened, seconds: float = 120):
    """Waits for `happened()` to be true and returns what it gave; fails after `seconds`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = happened()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError(f"it did not happen within {seconds} s")


@pytest.fixture(scope="session")
def home(tmp_path_factory) -> Home:
    folder = tmp_path_factory.mktemp("home")
    params = make_home(folder)
    teach_target(folder / "target", folder / "conversations.jsonl")
    return Home(folder, params)
