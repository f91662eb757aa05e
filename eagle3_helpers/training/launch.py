"""Starting, finding and stopping the trainer: a process of its own session that outlives notebook, kernel and terminal.

process.json is written before the process exists, so a crash in between leaves a trace and not a stranger. A process is the
trainer only if id and start time both agree: ids are used again. Launching twice starts one trainer; the second launch attaches.
The trainer is told the sha256 of the plan that was approved, and trains by no other.
"""

import contextlib
import dataclasses
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil

from eagle3_helpers.durable import digest, read_json, read_lines, write_json
from eagle3_helpers.errors import CheckRefused
from eagle3_helpers.runs import Run, now
from eagle3_helpers.training.checkpoints import finished_result
from eagle3_helpers.training.locks import hold, is_held
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
    """Attaches to the trainer that lives, does nothing where what the plan asks for is trained, else starts a trainer.

    `redeem(run)` is called only right before a start: it uses the approval up and returns the plan (its `.values` are those of
    plan.json), or refuses by raising. Raises CheckRefused where another launch does not come to its end.
    """
    folder = run.folder / "training"
    with launch_lock(folder, LAUNCH_SECONDS):
        status = _standing(run)
        if status is not None:
            run.event("attached to the trainer", trainer=status.pid, state=status.state)
            return status
        plan = redeem(run).values
        if Path(read_spec(plan).folder) != folder:
            raise CheckRefused(f"the plan trains in {read_spec(plan).folder}, not in {folder}.", "Make the plan again.")
        note = {
            "argv": [*plan["argv"], digest(plan)],
            "log": str(folder / "log.txt"),
            "plan_digest": digest(plan),
            "status": "launching",
            "time": now(),
        }
        write_json(folder / "process.json", note)
        with open(folder / "log.txt", "ab") as log:
            process = subprocess.Popen(
                note["argv"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(plan["gpus"])},  # the approved GPUs, or none
            )
        if read_json(folder / "process.json") == note:  # else the trainer itself has told more already
            write_json(folder / "process.json", note | {"pid": process.pid, "created": _created(process.pid)})
    run.event("trainer launched", trainer=process.pid, plan=note["plan_digest"])
    return trainer_status(folder)


def launch_lock(folder: Path, seconds: float):
    """Held while a trainer is launched and while the plan is replaced. Raises CheckRefused where it is not free in time."""
    return hold(
        folder / "launch.lock",
        seconds,
        f"a launch, or a change of the plan, is in progress in {folder}.",
        "Try again in a minute.",
    )


def needs_launch(run: Run) -> bool:
    """False while a trainer of this run lives, and where what the present plan asks for is trained and whole."""
    return _standing(run) is None


def _standing(run: Run) -> TrainerStatus | None:
    """What makes a launch needless: the trainer that lives, or the finished training."""
    status = trainer_status(run.folder / "training")
    if status.state == "running":
        return status
    return dataclasses.replace(status, state="finished", reason="") if trained(run.folder) else None


def trained(run_folder: Path) -> dict | None:
    """result.json, if it holds what the present plan asks for: the same spec to its end, and the chosen checkpoint whole.

    An earlier plan of the same spec counts: another commit, package version or environment trains no second time.
    """
    plan = read_json(Path(run_folder) / "plan.json")
    return finished_result(Path(run_folder) / "training", read_spec(plan).digest) if plan else None


def trainer_status(folder: Path) -> TrainerStatus:
    """What the files of a training folder and the process table say together. Changes nothing."""
    folder = Path(folder)
    noted = read_json(folder / "process.json")
    if not isinstance(noted, dict):
        held = is_held(folder / "lock")
        return TrainerStatus("running", log=str(folder / "log.txt")) if held else TrainerStatus("none")
    alive = _alive(noted) or (noted["status"] in LIVE and is_held(folder / "lock"))
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


def _last_step(folder: Path) -> int:
    step = 0
    for record in read_lines(folder / "metrics.jsonl"):
        step = record["step"]
    return step
