"""Runs the stages headless, in order, through papermill: skip what is done, stop at the gate, stop at the first failure.

Each attempt's executed notebook is kept beside the earlier ones. What decides is the receipt and the exit code, never the
status that papermill writes into cells (after a killed kernel that says "completed").
"""

import contextlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import papermill
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from papermill.exceptions import PapermillExecutionError
from traitlets.config import Config

from eagle3_helpers.errors import REFUSALS, BadParams, NotApproved, Refusal, StageFailed
from eagle3_helpers.gate.approval import auto_approve, require_approval
from eagle3_helpers.params import home
from eagle3_helpers.report.page import build_report
from eagle3_helpers.runs import Run, open_run
from eagle3_helpers.stages import STAGES, Stage, require_foundations, require_target, stage_named, stage_state
from eagle3_helpers.training.launch import needs_launch

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
# Kernels are reached through files of this user, not through TCP ports that everybody on the node can open.
PRIVATE_KERNEL = Config({"KernelManager": {"transport": "ipc"}})
DONE, INTERRUPTED, TERMINATED = 0, 130, 143


class Terminated(BaseException):
    """SIGTERM arrived."""


def run_stages(
    params_file: str,
    run_id: str = "",
    overrides: dict | None = None,
    first: str = STAGES[0].name,
    last: str = STAGES[-1].name,
    approve_as: str = "",
) -> int:
    """Runs `first` to `last` of one run. Returns the exit code of the command; a refusal is raised with its own code."""
    chosen = _between(first, last)
    run = open_run(params_file, run_id, overrides)
    require_target(run)
    print(f"{run}: {chosen[0].name} to {chosen[-1].name}", flush=True)
    try:
        with _sigterm_raises():
            for stage in chosen:
                state = stage_state(run, stage)
                if state.done:
                    print(f"{stage.name}: nothing to do ({state.reason})", flush=True)
                    continue
                require_foundations(run, stage)
                if stage.name == "05_train":
                    _pass_gate(run, approve_as)
                _execute(run, stage, params_file, overrides or {})
    except KeyboardInterrupt:
        print("interrupted; run the same command again to go on from here", file=sys.stderr)
        return INTERRUPTED
    except Terminated:
        print("terminated; run the same command again to go on from here", file=sys.stderr)
        return TERMINATED
    print(f"report: {build_report(run)}", flush=True)
    return DONE


def _between(first: str, last: str) -> list[Stage]:
    try:
        start, end = STAGES.index(stage_named(first)), STAGES.index(stage_named(last))
    except KeyError as error:
        known = ", ".join(stage.name for stage in STAGES)
        raise BadParams(f"unknown stage {error.args[0]!r}.", f"Stages: {known}.") from error
    if start > end:
        raise BadParams(f"--from {first} comes after --to {last}.", "Swap them.")
    return STAGES[start : end + 1]


def _pass_gate(run: Run, approve_as: str) -> None:
    """Raises NotApproved, with the command that approves, unless the plan is approved or training goes on already."""
    if not needs_launch(run):
        return
    try:
        require_approval(run)
    except NotApproved:
        if not approve_as:
            raise
        auto_approve(run, approve_as)
        require_approval(run)


def _execute(run: Run, stage: Stage, params_file: str, overrides: dict) -> None:
    """One attempt at one stage. Raises StageFailed, or the refusal that stopped the notebook."""
    output = _free_name(run.folder / "notebooks", stage.name)
    output.parent.mkdir(parents=True, exist_ok=True)
    print(f"{stage.name}: {stage.purpose}", flush=True)
    try:
        papermill.execute_notebook(
            str(NOTEBOOKS / f"{stage.name}.ipynb"),
            str(output),
            parameters={"params_file": str(params_file), "run_id": run.id, "overrides": overrides},
            kernel_name="python3",
            cwd=str(home()),
            progress_bar=False,
            coalesce_streams=True,
            stdout_file=_Indented(sys.stdout),
            stderr_file=_Indented(sys.stderr),
            start_timeout=300,
            config=PRIVATE_KERNEL,
        )
    except PapermillExecutionError as error:
        run.event(
            "notebook failed", stage=stage.name, error=f"{error.ename}: {error.evalue}"[:2000], notebook=output.name
        )
        raise _refusal_of(stage, error, output) from error
    except (DeadKernelError, CellTimeoutError) as error:
        run.event("notebook failed", stage=stage.name, error=f"kernel killed: {error}"[:500], notebook=output.name)
        raise StageFailed(
            f"{stage.name}: its kernel was killed (out of memory, or SIGKILL).",
            "Run the same command again: what is stored is kept and only the rest is done.",
        ) from error
    state = stage_state(run, stage)
    if not state.done:
        raise StageFailed(f"{stage.name} ran to its end but is {state.state} ({state.reason}).", f"Look at {output}.")


def _refusal_of(stage: Stage, error: PapermillExecutionError, output: Path) -> Refusal:
    """The refusal that a notebook raised, as one of this process, with the same exit code."""
    kind = REFUSALS.get(error.ename)
    if kind is None:
        return StageFailed(
            f"{stage.name}, cell {error.exec_count}: {error.ename}: {error.evalue}", f"Look at {output}."
        )
    return kind(f"{stage.name}: {error.evalue}", f"(notebook: {output})")


def _free_name(folder: Path, stage: str) -> Path:
    """NN_stage.ipynb, then NN_stage.attempt-2.ipynb and so on: an executed notebook is never overwritten."""
    path, attempt = folder / f"{stage}.ipynb", 1
    while path.exists():
        attempt += 1
        path = folder / f"{stage}.attempt-{attempt}.ipynb"
    return path


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    def raise_terminated(*_):
        raise Terminated

    before = signal.signal(signal.SIGTERM, raise_terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Indented:
    """What a notebook prints, set off from what the runner says."""

    def __init__(self, stream):
        self.stream = stream

    def write(self, text: str) -> None:
        self.stream.write("".join(f"    {line}" if line.strip() else line for line in text.splitlines(keepends=True)))

    def flush(self) -> None:
        self.stream.flush()
