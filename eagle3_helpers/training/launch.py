"""Starting, finding and stopping the trainer: a process of its own session that outlives notebook, kernel and terminal.

process.json is written before the process exists, so a crash in between leaves a trace and not a stranger. A process is the
trainer only if id and start time both agree: ids are used again. Launching twice starts one trainer; the second launch attaches.
"""

import contextlib
import dataclasses
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

from eagle3_helpers.durable import digest, file_digest, read_json, read_lines, write_json
from eagle3_helpers.errors import CheckRefused
from eagle3_helpers.runs import Run, now
from eagle3_helpers.training.spec import read_spec

LIVE = ("launching", "running")
LAST_LINES = 12
LAUNCH_SECONDS = 60  # that a second launch waits for the first to be through


@dataclasses.dataclass(frozen=True)
class TrainerStatus:
    """`state`: none, running, stopped (on request), failed, finished. `step` is the last one done."""

    state: str
    pid: int | None = None
    step: int = 0
    reason: str = ""
    log: str = ""

    def __repr__(self) -> str:
        told = [f"trainer: {self.state}"]
        told += [f"pid {self.pid}"] if self.state == "running" and self.pid else []
        told += [f"step {self.step:,}"] if self.step else []
        told += [self.reason] if self.reason else []
        return ", ".join(told)


def launch(run: Run, redeem: Callable[[Run], object]) -> TrainerStatus:
    """Attaches to the trainer that lives, does nothing where the present plan is finished, else starts a trainer.

    `redeem(run)` is called only right before a start: it uses the approval up and returns the plan (its `.values` are those of
    plan.json), or refuses by raising.
    """
    folder = run.folder / "training"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "launch.lock", timeout=LAUNCH_SECONDS):
        if not needs_launch(run):
            status = trainer_status(folder)
            run.event("attached to the trainer", trainer=status.pid, state=status.state)
            return status
        plan = redeem(run).values
        if Path(read_spec(plan).folder) != folder:
            raise CheckRefused(f"the plan trains in {read_spec(plan).folder}, not in {folder}.", "Make the plan again.")
        note = {
            "argv": plan["argv"],
            "log": str(folder / "log.txt"),
            "plan_digest": digest(plan),
            "status": "launching",
            "time": now(),
        }
        write_json(folder / "process.json", note)
        with open(folder / "log.txt", "ab") as log:
            process = subprocess.Popen(
                plan["argv"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(plan["gpus"])},  # the approved GPUs, or none
            )
        write_json(folder / "process.json", note | {"pid": process.pid, "created": _created(process.pid)})
    run.event("trainer launched", trainer=process.pid, plan=note["plan_digest"])
    return trainer_status(folder)


def needs_launch(run: Run) -> bool:
    """False while a trainer of this run lives, and where the present plan is trained to its end."""
    folder, plan_file = run.folder / "training", run.folder / "plan.json"
    state = trainer_status(folder).state
    if state != "finished" or not plan_file.exists():
        return state != "running"
    return (read_json(folder / "result.json") or {}).get("plan_digest") != file_digest(plan_file)


def trainer_status(folder: Path) -> TrainerStatus:
    """What the files of a training folder and the process table say together. Changes nothing."""
    folder = Path(folder)
    noted = read_json(folder / "process.json")
    if not isinstance(noted, dict):
        return TrainerStatus("running", log=str(folder / "log.txt")) if _locked(folder) else TrainerStatus("none")
    alive = _alive(noted) or (noted["status"] in LIVE and _locked(folder))
    if not alive and noted["status"] in LIVE:
        noted = read_json(folder / "process.json")  # it may have ended in order between the two looks
    told = {"pid": noted.get("pid"), "step": _last_step(folder), "log": noted.get("log", "")}
    if alive:  # also the moment between its note that it ended and its end, when the log is not whole yet
        return TrainerStatus("running", **told)
    if noted["status"] in LIVE:
        return TrainerStatus(
            "failed", reason="it ended without a word (killed, out of memory, or before it began)", **told
        )
    return TrainerStatus(noted["status"], reason=noted.get("reason", ""), **told)


def stop_trainer(folder: Path) -> str:
    """Asks the trainer to write a checkpoint and end; returns a sentence. Signals no process but the one noted."""
    noted = read_json(Path(folder) / "process.json") or {}
    if not _alive(noted):
        return "no trainer runs here, nothing was signalled"
    psutil.Process(noted["pid"]).terminate()
    return f"asked process {noted['pid']} to stop: it writes a checkpoint after the step it is in"


def last_lines(log: str, count: int = LAST_LINES) -> str:
    """The end of the trainer's log."""
    try:
        return "\n".join(Path(log).read_text(errors="replace").splitlines()[-count:])
    except OSError:
        return ""


def _created(pid: int) -> float | None:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).create_time()
    return None


def _alive(noted: dict) -> bool:
    """Whether the noted process still runs: same id, same start time, and not merely waiting to be reaped."""
    if not noted.get("pid") or not noted.get("created"):
        return False
    try:
        process = psutil.Process(noted["pid"])
        if abs(process.create_time() - noted["created"]) > 0.01:
            return False
        if process.status() != psutil.STATUS_ZOMBIE:
            return True
        with contextlib.suppress(ChildProcessError):
            os.waitpid(noted["pid"], os.WNOHANG)  # ours, started from this kernel
    except psutil.Error:
        pass
    return False


def _locked(folder: Path) -> bool:
    """Whether a trainer holds the lock. A trainer waits two seconds for it, so this look takes it from nobody."""
    path = folder / "lock"
    if not path.exists():
        return False
    try:
        with FileLock(path, timeout=0):
            return False
    except Timeout:
        return True


def _last_step(folder: Path) -> int:
    step = 0
    for record in read_lines(folder / "metrics.jsonl"):
        step = record["step"]
    return step
