"""One attempt at a stage: what a notebook holds from its first cell to its receipt.

It begins with an event and ends with a receipt, or with an event that says which cell failed. A killed kernel leaves neither:
that gap is how notebook 01 knows of a crash.
"""

import atexit
import html
from dataclasses import dataclass

import psutil

from eagle3_helpers.display import Checks
from eagle3_helpers.durable import json_lines, write_json, write_text
from eagle3_helpers.errors import StageFailed
from eagle3_helpers.runs import Run, now, open_run
from eagle3_helpers.samples.table import SampleTable
from eagle3_helpers.stages import STAGES, Evidence, Stage, require_foundations, require_target, stage_named, stage_state
from eagle3_helpers.states.store import Store
from eagle3_helpers.target import Target


class Attempt:
    """By hand or headless; made by `begin`."""

    def __init__(self, stage: Stage, run: Run):
        self.stage, self.run, self.params = stage, run, run.params
        self.target = Target(run.params.target)
        seen = Evidence(run, hashing=True)
        self.before = stage_state(run, stage, seen)
        self.started = now()
        self.reads = stage.reads(seen)
        attempts = sum(event["stage"] == stage.name for event in run.events("stage started"))
        self.name = f"{stage.name}-{attempts + 1}"
        run.write_params()
        run.event("stage started", stage=stage.name, attempt=self.name, pid_started=psutil.Process().create_time())
        self._open = True
        _tell_of_failing_cells(self)
        atexit.register(self.close, "the kernel ended before the receipt")

    def __repr__(self) -> str:
        state = f"{self.before.state} ({self.before.reason})"
        return f"{self.stage.name}: {self.stage.purpose}\n{self.run}, {state}, attempt {self.name}"

    def _repr_html_(self) -> str:
        lines = [html.escape(line) for line in repr(self).splitlines()]
        return f"<b>{lines[0]}</b><br>{'<br>'.join(lines[1:])}"

    @property
    def samples(self) -> SampleTable | None:
        """The sample table that stage 02 of this run points to; None before that."""
        return Evidence(self.run, hashing=False).table

    @property
    def store(self) -> Store | None:
        """The hidden-state store; None where nothing was ever stored."""
        return Evidence(self.run, hashing=False).store

    def write(self, name: str, value) -> None:
        """Writes an output of this stage into the run folder, JSON or (name ends so) JSONL; where the stage is done already,
        the file stands."""
        if self.before.done:
            return
        if name.endswith(".jsonl"):
            write_text(self.run.folder / name, json_lines(value))
        else:
            write_json(self.run.folder / name, value)

    def close(self, error: str) -> None:
        """Notes that this attempt ended without a receipt. A crash leaves no such line: that is how recover sees one."""
        if self._open:
            self._open = False
            self.run.event("stage failed", stage=self.stage.name, attempt=self.name, error=error[:2000])

    def finish(self, checks: Checks, **results) -> "Finished":
        """Requires `checks` to hold, then writes the receipt with `results` (plain values) in it, as the last act.

        A receipt that still holds word for word (same inputs, same outputs) is left as it is. Raises StageFailed where an
        input changed while the stage ran or an output is not there.
        """
        checks.require()
        seen = Evidence(self.run, hashing=True)
        reads, writes = self.stage.reads(seen), self.stage.writes(seen)
        changed = [name for name in reads if reads[name] != self.reads.get(name)]
        if changed:
            raise StageFailed(f"{self.stage.name}: {', '.join(changed)} changed while it ran.", "Run it again.")
        absent = [name for name, value in {**reads, **writes}.items() if value is None]
        if absent:
            raise StageFailed(f"{self.stage.name}: {', '.join(absent)} is not there.", "Run the cells above.")
        kept = stage_state(self.run, self.stage, seen)
        if kept.done:
            receipt = kept.receipt
        else:
            receipt = self.run.write_receipt(
                self.stage.name,
                started=self.started,
                inputs=reads,
                outputs=writes,
                checks=checks.items,
                results=results,
            )
        if self._open or not kept.done:
            self._open = False
            self.run.event(
                "stage done", stage=self.stage.name, attempt=self.name, receipt=receipt["digest"], unchanged=kept.done
            )
        return Finished(self.run, self.stage.name, receipt, kept.done)


@dataclass(frozen=True)
class Finished:
    """What the last cell of a stage shows."""

    run: Run
    stage: str
    receipt: dict
    unchanged: bool

    def __repr__(self) -> str:
        verb = "nothing to do, its receipt stands" if self.unchanged else "done, receipt written"
        following = [stage.name for stage in STAGES if stage.name > self.stage]
        after = f"next: {following[0]}" if following else "next: read the report"
        return f"{self.stage}: {verb} ({self.run.receipt_file(self.stage)}, {self.receipt['digest'][:12]}); {after}"


def begin(name: str, params_file: str, run_id: str = "", overrides: dict | None = None) -> Attempt:
    """Opens a run for one stage.

    Raises BadParams for a params file, a target or data that cannot be meant, CheckRefused where a stage that this one rests
    on is not done.
    """
    run, stage = open_run(params_file, run_id, overrides), stage_named(name)
    require_target(run)
    require_foundations(run, stage)
    return Attempt(stage, run)


def _tell_of_failing_cells(attempt: Attempt) -> None:
    """In a notebook, a cell that raises closes the attempt with its error."""
    try:
        from IPython import get_ipython
    except ImportError:
        return
    shell = get_ipython()
    if shell is None:
        return

    def after_cell(result) -> None:
        error = result.error_before_exec or result.error_in_exec
        if error is not None:
            attempt.close(f"{type(error).__name__}: {error}")

    shell.events.register("post_run_cell", after_cell)
