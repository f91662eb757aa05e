"""Watching a trainer: live curves in one display that is updated, or a line every ten seconds where nobody watches.

Watching is all it does. Interrupt the cell or close the notebook, and training goes on; run the cell again to see it again.
"""

import sys
import time
from pathlib import Path

from eagle3_helpers.display import Checks, seconds_text
from eagle3_helpers.durable import read_json, read_lines
from eagle3_helpers.errors import StageFailed
from eagle3_helpers.progress import LOG_SECONDS, someone_watches
from eagle3_helpers.training.checkpoints import LAUNCH_AGAIN, chosen_damage
from eagle3_helpers.training.launch import TrainerStatus, last_lines, trained, trainer_status
from eagle3_helpers.training.spec import read_spec

POLL_SECONDS = 1.0
RECENT = 20  # steps that the pace is taken from


def attach(run_folder: Path) -> dict:
    """Shows the trainer of a run until it ends; returns result.json.

    Raises StageFailed where it failed (with its last log lines), was stopped, or was never launched.
    """
    folder = Path(run_folder) / "training"
    show = _Picture() if someone_watches() else _Lines()
    total = _planned_steps(run_folder)
    while True:
        status = trainer_status(folder)  # before the metrics, so that an ended trainer's are all there
        metrics = read_metrics(folder)
        ended = status.state != "running"
        show(metrics, status_line(status, metrics, total), last=ended)
        if ended:
            return _result(Path(run_folder), status)
        time.sleep(POLL_SECONDS)


def read_metrics(training_folder: Path) -> list[dict]:
    """The records of metrics.jsonl: a line a step, a line a held-out evaluation."""
    return list(read_lines(Path(training_folder) / "metrics.jsonl"))


def training_checks(run_folder: Path, result: dict) -> Checks:
    """Whether a finished training is what the plan asks for, and its checkpoint still whole."""
    plan = read_json(Path(run_folder) / "plan.json") or {}
    asked, wrong = read_spec(plan), chosen_damage(Path(run_folder) / "training", result)
    done = result["updates"] + result["skips"]
    checks = Checks("training")
    checks.add(
        "trained by the plan's spec",
        result["spec_digest"] == asked.digest,
        result["spec_digest"][:12],
        asked.digest[:12],
        "Launch: it says what of the present plan is not what was trained.",
    )
    checks.add("under plan", True, result["plan_digest"][:12])
    checks.add(
        "optimizer steps done or skipped",
        done == asked.optimizer_steps,
        done,
        asked.optimizer_steps,
        "Keep this folder and train under another run id: the result does not add up.",
    )
    checks.add("steps skipped for NaN or inf", True, result["skips"])
    checks.add("best checkpoint reads back", not wrong, wrong or "every hash holds", "every hash holds", LAUNCH_AGAIN)
    checks.add(
        "frozen weights unchanged",
        result["frozen_unchanged"] is True,
        result["frozen_unchanged"],
        True,
        "Do not use these checkpoints; keep the folder.",
    )
    return checks


def _planned_steps(run_folder: Path) -> int:
    plan = read_json(Path(run_folder) / "plan.json") or {}
    return plan.get("spec", {}).get("optimizer_steps", 0)


def status_line(status: TrainerStatus, metrics: list[dict], total: int) -> str:
    """Step, loss, tokens/s and the time left at the pace of the last steps."""
    steps = [record for record in metrics if "loss" in record]
    if not steps:
        return f"trainer {status.state}: no step done yet"
    recent = steps[-RECENT:]
    seconds = sum(record["seconds"] for record in recent)
    rate = sum(record["tokens"] for record in recent) / seconds
    left = (total - steps[-1]["step"]) * seconds / len(recent)
    eta = f", {seconds_text(left)} left" if status.state == "running" and total else ""
    return f"trainer {status.state}: step {steps[-1]['step']:,} of {total:,}, loss {recent[-1]['loss']:.3f}, {rate:,.0f} tok/s{eta}"


def _result(run_folder: Path, status: TrainerStatus) -> dict:
    folder = run_folder / "training"
    result = trained(run_folder)
    if result:  # whatever became of a later attempt
        return result
    result = read_json(folder / "result.json")
    if status.state == "finished" and result:
        return result
    if status.state == "none":
        raise StageFailed(f"no trainer was launched in {folder}.", "Run the launch cell above.")
    if status.state == "stopped":
        raise StageFailed(
            f"the trainer was stopped at step {status.step} ({status.reason}).", "Launch again: it resumes there."
        )
    print(last_lines(status.log), file=sys.stderr, flush=True)
    raise StageFailed(
        f"the trainer {status.state} at step {status.step}: {status.reason}",
        f"Read {status.log}, mend the cause, launch again: training resumes from the newest checkpoint.",
    )


class _Lines:
    """For logs."""

    def __init__(self):
        self.last = float("-inf")

    def __call__(self, metrics: list[dict], line: str, last: bool) -> None:
        if last or time.monotonic() - self.last >= LOG_SECONDS:
            self.last = time.monotonic()
            print(line, flush=True)


class _Picture:
    """For eyes: one output, drawn again in place."""

    def __init__(self):
        from IPython.display import display

        self.handle = display(_Panel([], ""), display_id=True)
        self.seen: tuple | None = None

    def __call__(self, metrics: list[dict], line: str, last: bool) -> None:
        if (len(metrics), line) != self.seen:
            self.seen = (len(metrics), line)
            if self.handle is None:  # a terminal without IPython
                print(line, flush=True)
            else:
                self.handle.update(_Panel(metrics, line))


class _Panel:
    """The curves with one line of text under them."""

    def __init__(self, metrics: list[dict], line: str):
        self.metrics, self.line = metrics, line

    def __repr__(self) -> str:
        return self.line

    def _repr_html_(self) -> str:
        from eagle3_helpers.plots import to_png_base64, training_curves

        picture = to_png_base64(training_curves(self.metrics))
        return f"<img alt='training curves' src='data:image/png;base64,{picture}'><p>{self.line}</p>"
