"""Who a process is, and which ones belong to a run.

A process id alone names nobody: after a reboot, or a day, the same number is somebody else. An identity is the id, the
start time and the command line; only a process for which all three still hold is the one that was meant. What is shown of
a command line hides the values of options that sound like secrets.
"""

import re
from dataclasses import dataclass
from datetime import UTC, datetime

import psutil
from filelock import FileLock, Timeout

from eagle3_helpers.display import Table, bytes_text
from eagle3_helpers.durable import read_json
from eagle3_helpers.runs import Run

SECRET = re.compile(r"key|token|secret|passw|credential|auth", re.IGNORECASE)
SHOWN = 120  # characters of a command line


@dataclass(frozen=True)
class Identity:
    """`created` is in seconds since the epoch, as the kernel reports it."""

    pid: int
    created: float
    cmdline: tuple[str, ...]

    @property
    def runs(self) -> bool:
        return identify(self.pid) == self

    @property
    def command(self) -> str:
        return safe_command(self.cmdline)


def identify(pid: int) -> Identity | None:
    """The process that has this id now; None where there is none, it is dead and unreaped, or it may not be looked at."""
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            if process.status() == psutil.STATUS_ZOMBIE:
                return None
            return Identity(pid, process.create_time(), tuple(process.cmdline()))
    except (psutil.Error, ValueError):
        return None


def safe_command(cmdline: tuple[str, ...] | list[str]) -> str:
    """A command line for eyes and logs: values of secret-sounding options replaced by ***, cut at 120 characters."""
    words, hide = [], False
    for word in cmdline:
        name, equals, _ = word.partition("=")
        option = name.startswith("-") or (equals and name.isidentifier())
        if hide and not word.startswith("-"):
            word = "***"
        elif option and equals and SECRET.search(name):
            word = f"{name}=***"
        hide = word.startswith("-") and not equals and bool(SECRET.search(name))
        words.append(word)
    text = " ".join(words)
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"


def trainers(run: Run) -> list[Identity]:
    """The run's trainer, if it is still the process that training/process.json describes."""
    noted = read_json(run.folder / "training" / "process.json")
    if not isinstance(noted, dict) or not noted.get("pid") or not noted.get("created"):
        return []  # none, or a launch that was cut short before there was a process
    found = identify(noted["pid"])
    return [found] if found and abs(found.created - noted["created"]) < 0.01 else []


def kernels() -> list[Identity]:
    """Jupyter kernels of this machine: what an interrupted notebook leaves behind."""
    everyone = (identify(pid) for pid in psutil.pids())
    return [who for who in everyone if who and any("ipykernel" in word for word in who.cmdline[:4])]


def describe_processes(run: Run) -> Table:
    """The run's trainer and all kernels, with what each holds in memory."""
    rows = [
        [kind, str(who.pid), _started(who), _memory(who.pid), who.command]
        for kind, group in (("trainer of this run", trainers(run)), ("kernel", kernels()))
        for who in group
    ]
    return Table(["what", "pid", "started (UTC)", "memory", "command"], rows, "processes of the runbook")


def _started(who: Identity) -> str:
    return datetime.fromtimestamp(who.created, UTC).isoformat(sep=" ", timespec="seconds")[:19]


def _memory(pid: int) -> str:
    try:
        return bytes_text(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return "gone"


def training_locked(run: Run) -> bool:
    """Whether a trainer of this run holds its lock now. The lock falls with its process, whatever killed that."""
    path = run.folder / "training" / "lock"
    if not path.exists():
        return False
    try:
        with FileLock(path, timeout=0):
            return False
    except Timeout:
        return True
