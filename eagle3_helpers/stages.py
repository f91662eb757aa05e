"""The six stages: what each reads, what it writes, and whether it is done.

    01_recover -> 02_extract -> 03_verify -> 04_inspect_freeze -> (approval) -> 05_train -> 06_evaluate
A stage is done when its receipt is there, valid, and the digests of all it read and wrote are still those in the receipt.
Change an input and every later stage that rests on it says "stale" and names the input.
"""

import atexit
import html
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from eagle3_helpers.display import Checks, Table
from eagle3_helpers.durable import digest, file_digest, read_json, write_json
from eagle3_helpers.errors import CheckRefused, StageFailed
from eagle3_helpers.params import resolve
from eagle3_helpers.runs import Run, now, open_run
from eagle3_helpers.samples.table import SampleTable, load_samples
from eagle3_helpers.states.manifest import manifest_digest
from eagle3_helpers.states.store import Store
from eagle3_helpers.target import Target


@dataclass(frozen=True)
class Stage:
    """`reads` and `writes` give {name: digest} of a run; None where a file is not there."""

    name: str
    purpose: str
    reads: Callable[[Run], dict]
    writes: Callable[[Run], dict]


def _file(path: Path) -> str | None:
    return file_digest(path) if path.is_file() else None


def _manifest(run: Run) -> str | None:
    folder = run.params.store_folder
    return manifest_digest(Store.open(folder)) if (folder / "store.json").is_file() else None


def _samples(run: Run) -> str | None:
    """Digest of the sample table that stage 02 of this run points to."""
    table = read_json(run.folder / "samples.json")
    return table and _file(Path(table["folder"]) / "samples.safetensors")


def _data(run: Run) -> dict:
    return {
        "samples": _samples(run),
        "manifest": _manifest(run),
        "draft vocabulary": _file(run.folder / "draft_vocab.safetensors"),
    }


def _params(run: Run, *sections: str) -> str:
    return digest(run.params.values(*sections))


def _export(run: Run) -> str | None:
    return _file(run.folder / "export" / "sglang" / "model.safetensors")


STAGES = [
    Stage(
        "01_recover",
        "what survived, what holds the machine, what to do next",
        lambda run: {"params": _params(run, "target", "store"), "interrupted attempts": digest(run.interrupted())},
        lambda run: {"recovery.json": _file(run.folder / "recovery.json")},
    ),
    Stage(
        "02_extract",
        "conversations to samples, samples to the target's hidden states",
        lambda run: {
            "params": _params(run, "target", "samples", "store") + f"/{run.params.draft.vocab_size}",
            "conversations": _file(resolve(run.params.samples.conversations)),
            "target": digest(Target(run.params.target).identity),
        },
        _data,
    ),
    Stage(
        "03_verify",
        "every stored byte read again, and the alignment proved by the target itself",
        _data,
        lambda run: {"verification.json": _file(run.folder / "verification.json")},
    ),
    Stage(
        "04_inspect_freeze",
        "what trains, what stays frozen, and the plan a person approves",
        lambda run: {
            **_data(run),
            "params": _params(run, "target", "draft", "training", "gate"),
            "verification.json": _file(run.folder / "verification.json"),
        },
        lambda run: {
            "freeze_table.json": _file(run.folder / "freeze_table.json"),
            "plan.json": _file(run.folder / "plan.json"),
        },
    ),
    Stage(
        "05_train",
        "the approved plan, launched outside the kernel and watched",
        lambda run: {"plan.json": _file(run.folder / "plan.json")},
        lambda run: {"training/result.json": _file(run.folder / "training" / "result.json")},
    ),
    Stage(
        "06_evaluate",
        "export, then what the draft is worth",
        lambda run: {
            "training/result.json": _file(run.folder / "training" / "result.json"),
            "params": _params(run, "evaluation"),
            "prompts": _file(resolve(run.params.evaluation.prompts)),
        },
        lambda run: {
            "export": _export(run),
            "evaluation/summary.json": _file(run.folder / "evaluation" / "summary.json"),
        },
    ),
]


def stage_named(name: str) -> Stage:
    """By full name, number or word: "02_extract", "02", "extract". Raises KeyError."""
    for stage in STAGES:
        number, word = stage.name.split("_", 1)
        if name in (stage.name, number, word):
            return stage
    raise KeyError(name)


@dataclass(frozen=True)
class StageState:
    """ "done", "stale" (with what changed) or "to do", and the receipt if there is one."""

    name: str
    state: str
    reason: str
    receipt: dict | None

    @property
    def done(self) -> bool:
        return self.state == "done"


def stage_state(run: Run, stage: Stage) -> StageState:
    receipt = run.receipt(stage.name)
    if receipt is None:
        damaged = run.receipt_file(stage.name).exists()
        return StageState(stage.name, "to do", "its receipt is damaged" if damaged else "no receipt yet", None)
    changed = [
        name
        for kind, now_there in (("inputs", stage.reads(run)), ("outputs", stage.writes(run)))
        for name in {**receipt[kind], **now_there}
        if receipt[kind].get(name) != now_there.get(name)
    ]
    if changed:
        return StageState(stage.name, "stale", f"changed since: {', '.join(dict.fromkeys(changed))}", receipt)
    return StageState(stage.name, "done", f"receipt of {receipt['ended'][:19]} UTC", receipt)


def status_table(run: Run) -> Table:
    rows = [[state.name, state.state, state.reason] for state in (stage_state(run, stage) for stage in STAGES)]
    return Table(["stage", "state", "why"], rows, f"run {run.id}")


class Attempt:
    """One attempt at a stage, by hand or headless: what a notebook holds from its first cell to its receipt."""

    def __init__(self, stage: Stage, run: Run):
        self.stage, self.run, self.params = stage, run, run.params
        self.target = Target(run.params.target)
        self.before = stage_state(run, stage)
        self.started = now()
        self.reads = stage.reads(run)
        attempts = sum(event["stage"] == stage.name for event in run.events("stage started"))
        self.name = f"{stage.name}-{attempts + 1}"
        run.write_params()
        run.event("stage started", stage=stage.name, attempt=self.name, pid_started=psutil.Process().create_time())
        self._open = True
        _tell_of_failing_cells(self)
        atexit.register(self.close, "the kernel ended before the receipt")

    def __repr__(self) -> str:
        return f"{self.stage.name}: {self.stage.purpose}\n{self.run}, {self.before.state} ({self.before.reason}), attempt {self.name}"

    def _repr_html_(self) -> str:
        lines = [html.escape(line) for line in repr(self).splitlines()]
        return f"<b>{lines[0]}</b><br>{'<br>'.join(lines[1:])}"

    @property
    def samples(self) -> SampleTable | None:
        """The sample table that stage 02 of this run points to; None before that."""
        pointer = read_json(self.run.folder / "samples.json")
        return load_samples(Path(pointer["folder"])) if pointer else None

    @property
    def store(self) -> Store | None:
        """The hidden-state store; None where nothing was ever stored."""
        folder = self.params.store_folder
        return Store.open(folder) if (folder / "store.json").exists() else None

    def need(self, *names: str) -> None:
        """Raises CheckRefused unless the stages `names` are done, saying which to run."""
        states = [stage_state(self.run, stage_named(name)) for name in names]
        undone = [state for state in states if not state.done]
        if undone:
            raise CheckRefused(
                "; ".join(f"{state.name} is {state.state} ({state.reason})" for state in undone) + ".",
                f"Run {undone[0].name} first.",
            )

    def write(self, name: str, value) -> None:
        """Writes a JSON output of this stage into the run folder; where the stage is done already, the file stands."""
        if not self.before.done:
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
        reads, writes = self.stage.reads(self.run), self.stage.writes(self.run)
        changed = [name for name in reads if reads[name] != self.reads.get(name)]
        if changed:
            raise StageFailed(f"{self.stage.name}: {', '.join(changed)} changed while it ran.", "Run it again.")
        absent = [name for name, value in {**reads, **writes}.items() if value is None]
        if absent:
            raise StageFailed(f"{self.stage.name}: {', '.join(absent)} is not there.", "Run the cells above.")
        kept = stage_state(self.run, self.stage)
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
        if self._open:
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
    """Opens a run for one stage. Raises BadParams for a params file, a target or data that cannot be meant."""
    run = open_run(params_file, run_id, overrides)
    require_target(run)
    return Attempt(stage_named(name), run)


def require_target(run: Run) -> Target:
    """Raises BadParams for a target that is not there or has too few layers, before anything is loaded or written."""
    target = Target(run.params.target)
    target.require()
    target.boundaries  # noqa: B018 (raises)
    return target


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
