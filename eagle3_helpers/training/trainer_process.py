"""Being the trainer: one in a folder, known by process.json, and asked to stop by a signal."""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil

from eagle3_helpers.durable import read_json, write_json
from eagle3_helpers.runs import now
from eagle3_helpers.training.locks import hold

LOCK_SECONDS = 2  # whoever looks whether a trainer lives holds the lock for an instant


class Stopped(Exception):
    """A signal asked for the end, and a checkpoint holds all work done."""

    def __init__(self, number: int):
        self.number = number
        super().__init__(signal.Signals(number).name)


@contextlib.contextmanager
def stop_signals() -> Iterator[list[int]]:
    """A list that SIGTERM and SIGINT put their number into."""
    arrived: list[int] = []
    before = {
        number: signal.signal(number, lambda got, _: arrived.append(got)) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield arrived
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def only_trainer(folder: Path, plan_digest: str) -> Iterator[None]:
    """Holds the folder's lock, and tells in process.json who trains and how it ended. Raises CheckRefused where one trains."""
    path = folder / "process.json"
    me = {"pid": os.getpid(), "created": psutil.Process().create_time(), "plan_digest": plan_digest}
    with hold(
        folder / "lock",
        LOCK_SECONDS,
        f"another trainer holds {folder / 'lock'}.",
        "Attach to it, or stop it first (eagle3-runbook stop).",
    ):
        known = {**(read_json(path) or {}), **me}
        for name in ("reason", "ended"):  # of the trainer before
            known.pop(name, None)
        try:
            write_json(path, {**known, "status": "running"})
            yield
        except Stopped as stopped:
            write_json(path, {**known, "status": "stopped", "reason": str(stopped), "ended": now()})
            raise
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}"[:2000]
            write_json(path, {**known, "status": "failed", "reason": reason, "ended": now()})
            raise
        else:
            write_json(path, {**known, "status": "finished", "ended": now()})
