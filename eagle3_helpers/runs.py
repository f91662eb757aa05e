"""A run folder and its evidence: params, events, receipts.

    outputs/<run_id>/params.yaml              as resolved, written when a stage begins
                     events.jsonl             one line before and one after each action
                     receipts/NN_stage.json   the only proof that a stage is done
                     notebooks/               executed notebooks, one per attempt
A receipt is written last, atomically, and carries digests of what the stage read and wrote. A notebook's own cell status
proves nothing: after a killed kernel it reads "completed" everywhere.
"""

import contextlib
import getpass
import os
import platform
import socket
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import psutil
import yaml

from eagle3_helpers.durable import append_lines, digest, read_json, read_lines, write_json, write_text
from eagle3_helpers.errors import BadParams
from eagle3_helpers.params import Params, home, load_params

RECORDED_VERSIONS = ("torch", "transformers", "safetensors", "papermill", "sglang", "eagle3-runbook")


def now() -> str:
    """UTC, ISO 8601, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def outputs() -> Path:
    return home() / "outputs"


class Run:
    """One folder under outputs/ and the params that apply to it now."""

    def __init__(self, folder: Path, params: Params):
        self.folder = folder
        self.params = params
        self.id = folder.name

    def __repr__(self) -> str:
        return f"run {self.id} in {self.folder}"

    @property
    def events_file(self) -> Path:
        return self.folder / "events.jsonl"

    def event(self, kind: str, **fields) -> None:
        append_lines(
            self.events_file,
            [{"time": now(), "kind": kind, "pid": os.getpid(), "host": socket.gethostname(), **fields}],
        )

    def events(self, *kinds: str) -> list[dict]:
        return [event for event in read_lines(self.events_file) if not kinds or event["kind"] in kinds]

    @contextlib.contextmanager
    def action(self, name: str, **fields) -> Iterator[dict]:
        """Writes a line before and after; what the body puts into the yielded dict lands in the second line."""
        self.event(f"{name} started", **fields)
        result: dict = {}
        try:
            yield result
        except BaseException as error:
            self.event(f"{name} failed", error=f"{type(error).__name__}: {error}"[:2000], **result)
            raise
        self.event(f"{name} done", **result)

    def write_params(self) -> None:
        """Keeps params.yaml equal to the params in force; a change is an event that names the sections."""
        path = self.folder / "params.yaml"
        values = self.params.values()
        text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
        old = path.read_text() if path.exists() else None
        if old == text:
            return
        if old is not None:
            before = yaml.safe_load(old)
            self.event("params changed", sections=[name for name in values if before.get(name) != values[name]])
        write_text(path, text)

    def interrupted(self) -> list[str]:
        """Attempts of a stage that began, never ended, and whose process is gone: what a crash leaves behind."""
        open_attempts = {}
        for event in self.events("stage started", "stage done", "stage failed"):
            if event["kind"] == "stage started":
                open_attempts[event["attempt"]] = event
            else:
                open_attempts.pop(event["attempt"], None)
        return [name for name, event in open_attempts.items() if not _alive(event)]

    def receipt_file(self, stage: str) -> Path:
        return self.folder / "receipts" / f"{stage}.json"

    def receipt(self, stage: str) -> dict | None:
        """The receipt, or None where it is absent, damaged or not of this stage."""
        receipt = read_json(self.receipt_file(stage))
        if not isinstance(receipt, dict) or receipt.get("stage") != stage:
            return None
        body = {name: value for name, value in receipt.items() if name != "digest"}
        return receipt if receipt.get("digest") == digest(body) else None

    def write_receipt(
        self, stage: str, *, started: str, inputs: dict, outputs: dict, checks: list[dict], results: dict
    ) -> dict:
        """Writes the proof that `stage` is done. `results` (plain values) go into it under their own names."""
        receipt = {
            "stage": stage,
            "run_id": self.id,
            "started": started,
            "ended": now(),
            "host": socket.gethostname(),
            "user": getpass.getuser(),
            "commit": code_commit(),
            "versions": versions(),
            "inputs": inputs,
            "outputs": outputs,
            "checks": checks,
            **results,
        }
        receipt["digest"] = digest(receipt)
        write_json(self.receipt_file(stage), receipt)
        return receipt


def _alive(event: dict) -> bool:
    """Whether the process that wrote `event` still runs; on another host nobody here can tell, so it counts as alive."""
    if event["host"] != socket.gethostname():
        return True
    try:
        return abs(psutil.Process(event["pid"]).create_time() - event["pid_started"]) < 1
    except psutil.Error:
        return False


def open_run(params_file: str, run_id: str = "", overrides: dict | None = None) -> Run:
    """The run that a params file names (`run_id` wins over the file). Raises BadParams."""
    overrides = dict(overrides or {})
    if run_id:
        overrides["run_id"] = run_id
    params = load_params(params_file, overrides)
    return Run(outputs() / params.run_id, params)


def reopen_run(run_id: str) -> Run:
    """A run that exists, with the params it was last used with."""
    folder = outputs() / run_id
    known = sorted(path.parent.name for path in outputs().glob("*/params.yaml"))
    if run_id not in known:
        raise BadParams(f"there is no run {run_id!r} in {outputs()}.", f"Known runs: {', '.join(known) or 'none'}.")
    return Run(folder, load_params(str(folder / "params.yaml")))


def versions() -> dict:
    found = {"python": platform.python_version()}
    for name in RECORDED_VERSIONS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def code_commit() -> dict:
    """Commit of the runbook, whether files differ from it, and sha256 of how the package itself does; nulls outside git.

    `diff` is null too where the package is as committed. Notebooks do not count in it: JupyterLab saves them as they run.
    """

    def git(*arguments: str) -> bytes | None:
        done = subprocess.run(["git", "-C", str(Path(__file__).parent), *arguments], capture_output=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else None

    try:
        commit = git("rev-parse", "HEAD")
    except FileNotFoundError:
        commit = None
    if not commit:
        return {"commit": None, "dirty": None, "diff": None}
    diff = git("diff", "--no-ext-diff", "--no-textconv", "--no-color", "--binary", "HEAD", "--", ".")
    dirty = bool(git("status", "--porcelain", "--untracked-files=no"))
    return {"commit": commit.decode(), "dirty": dirty, "diff": digest(diff) if diff else None}
