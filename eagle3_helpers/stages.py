"""The six stages: what each reads and writes, which others it rests on, and whether it is done.

    01_recover -> 02_extract -> 03_verify -> 04_inspect_freeze -> (approval) -> 05_train -> 06_evaluate
A stage is done when its receipt is there and whole, the digests of all it read and wrote are still those in the receipt, and
the stages it rests on are done. Change an input, or cut a stored file short, and the stage that depends on it says "stale" and
names what changed; so does every stage after it.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from eagle3_helpers.display import Table
from eagle3_helpers.draft.export import FILES, export_digest
from eagle3_helpers.durable import digest, file_digest, read_json
from eagle3_helpers.errors import CheckRefused, Refusal
from eagle3_helpers.params import resolve
from eagle3_helpers.runs import Run
from eagle3_helpers.samples.table import SampleTable, load_samples
from eagle3_helpers.states.inventory import Inventory, take_inventory
from eagle3_helpers.states.manifest import manifest_digest
from eagle3_helpers.states.store import Store
from eagle3_helpers.target import Target


class Evidence:
    """What the disk says about a run, each thing looked at once and only if a stage asks; None for what is not there.

    `hashing` allows reading all of the target's weights, where their digests are not remembered.
    """

    def __init__(self, run: Run, hashing: bool):
        self.run, self.hashing = run, hashing

    def params(self, *names: str) -> str:
        """Digest of the settings with these dotted names; a section's name takes all of it."""
        values = self.run.params.values()
        chosen = {}
        for name in names:
            section, _, setting = name.partition(".")
            chosen[name] = values[section][setting] if setting else values[section]
        return digest(chosen)

    def file(self, name: str) -> str | None:
        """Of a file in the run folder, or at an absolute path."""
        path = self.run.folder / name
        return file_digest(path) if path.is_file() else None

    @functools.cached_property
    def target(self) -> str | None:
        target = Target(self.run.params.target)
        identity = target.identity if self.hashing else target.known_identity
        return identity and digest(identity)

    @functools.cached_property
    def table(self) -> SampleTable | None:
        """The one that stage 02 of this run points to."""
        pointer = read_json(self.run.folder / "samples.json")
        return load_samples(Path(pointer["folder"])) if pointer else None

    @functools.cached_property
    def store(self) -> Store | None:
        folder = self.run.params.store_folder
        return Store.open(folder) if (folder / "store.json").exists() else None

    @functools.cached_property
    def inventory(self) -> Inventory | None:
        return take_inventory(self.store, self.table) if self.store and self.table else None

    @functools.cached_property
    def states(self) -> str | None:
        """Of the states of this run's samples: what the manifest lists, and which of the files have that size."""
        if self.inventory is None:
            return None
        return digest([manifest_digest(self.store, self.table.sample_ids), sorted(self.inventory.ok)])

    @functools.cached_property
    def data(self) -> dict:
        return {
            "samples": self.table and self.table.digest,
            "states": self.states,
            "draft vocabulary": self.file("draft_vocab.safetensors"),
        }

    @property
    def checkpoint(self) -> str | None:
        """Of the weights that result.json chose."""
        result = read_json(self.run.folder / "training" / "result.json")
        return result and self.file(f"training/{result['checkpoint']}/draft.safetensors")

    @property
    def export(self) -> str | None:
        folder = self.run.folder / "export" / "sglang"
        return export_digest(folder) if all((folder / name).is_file() for name in FILES) else None


@dataclass(frozen=True)
class Stage:
    """`reads` and `writes` give {name: digest}; `rests_on` names the stages that must be done before this one."""

    name: str
    purpose: str
    rests_on: tuple[str, ...]
    reads: Callable[[Evidence], dict]
    writes: Callable[[Evidence], dict]


STAGES = [
    Stage(
        "01_recover",
        "what survived, what holds the machine, what to do next",
        (),
        lambda seen: {
            "params": seen.params("target", "store.data_root", "store.name"),
            "interrupted attempts": digest(seen.run.interrupted()),
        },
        lambda seen: {
            "recovery.json": seen.file("recovery.json"),
            "damage in the store": digest(seen.inventory.damage if seen.inventory else []),
        },
    ),
    Stage(
        "02_extract",
        "conversations to samples, samples to the target's hidden states",
        (),
        lambda seen: {
            "params": seen.params(
                "target",
                "samples.max_length",
                "samples.answer_tokens",
                "store.data_root",
                "store.name",
                "draft.vocab_size",
            ),
            "conversations": seen.file(resolve(seen.run.params.samples.conversations)),
            "target": seen.target,
        },
        lambda seen: seen.data,
    ),
    Stage(
        "03_verify",
        "every stored byte read again, and the alignment proved by the target itself",
        ("02_extract",),
        lambda seen: seen.data,
        lambda seen: {"verification.json": seen.file("verification.json")},
    ),
    Stage(
        "04_inspect_freeze",
        "what trains, what stays frozen, and the plan a person approves",
        ("02_extract", "03_verify"),
        lambda seen: {
            **seen.data,
            "params": seen.params("target", "draft", "training", "gate"),
            "verification.json": seen.file("verification.json"),
        },
        lambda seen: {"freeze_table.json": seen.file("freeze_table.json"), "plan.json": seen.file("plan.json")},
    ),
    Stage(
        "05_train",
        "the approved plan, launched outside the kernel and watched",
        ("02_extract", "03_verify", "04_inspect_freeze"),
        lambda seen: {"plan.json": seen.file("plan.json")},
        lambda seen: {"training/result.json": seen.file("training/result.json"), "checkpoint": seen.checkpoint},
    ),
    Stage(
        "06_evaluate",
        "export, then what the draft is worth",
        ("02_extract", "04_inspect_freeze", "05_train"),
        lambda seen: {
            "training/result.json": seen.file("training/result.json"),
            "params": seen.params("evaluation"),
            "prompts": seen.file(resolve(seen.run.params.evaluation.prompts)),
        },
        lambda seen: {
            "export": seen.export,
            "evaluation/summary.json": seen.file("evaluation/summary.json"),
            "evaluation/prompts.jsonl": seen.file("evaluation/prompts.jsonl"),
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
    """`state` is "done", "stale", "to do" or "cannot tell", `reason` says why; `receipt` is there if it is whole."""

    name: str
    state: str
    reason: str
    receipt: dict | None

    @property
    def done(self) -> bool:
        return self.state == "done"


def stage_states(run: Run, hashing: bool = False) -> dict[str, StageState]:
    """The state of every stage, by name, from one look at the disk. Without `hashing` it is quick and changes nothing."""
    seen, states = Evidence(run, hashing), {}
    for stage in STAGES:
        try:
            states[stage.name] = _judge(stage, seen, states)
        except (Refusal, OSError) as error:
            states[stage.name] = StageState(stage.name, "cannot tell", str(error), None)
    return states


def stage_state(run: Run, stage: Stage, seen: Evidence | None = None) -> StageState:
    """The state of one stage, by what was `seen` or by a new look at the disk. Raises what looking raises."""
    return _judged(seen or Evidence(run, hashing=True), STAGES[: STAGES.index(stage) + 1])[stage.name]


def _judged(seen: Evidence, stages: list[Stage]) -> dict[str, StageState]:
    """Of `stages`, the first ones in order, from one look."""
    states = {}
    for stage in stages:
        states[stage.name] = _judge(stage, seen, states)
    return states


def _judge(stage: Stage, seen: Evidence, states: dict[str, StageState]) -> StageState:
    receipt = seen.run.receipt(stage.name)
    if receipt is None:
        damaged = seen.run.receipt_file(stage.name).exists()
        return StageState(stage.name, "to do", "its receipt is damaged" if damaged else "no receipt yet", None)
    reads, writes = stage.reads(seen), stage.writes(seen)
    if stage.name == "02_extract" and reads["target"] is None and not seen.hashing:
        return StageState(stage.name, "cannot tell", "the target's weights changed and are not hashed yet", receipt)
    changed = [
        name
        for kind, there in (("inputs", reads), ("outputs", writes))
        for name in {**receipt[kind], **there}
        if receipt[kind].get(name) != there.get(name)
    ]
    if changed:
        return StageState(stage.name, "stale", f"changed since: {', '.join(dict.fromkeys(changed))}", receipt)
    undone = [name for name in stage.rests_on if not states[name].done]
    if undone:
        return StageState(stage.name, "stale", f"rests on {undone[0]}, which is {states[undone[0]].state}", receipt)
    return StageState(stage.name, "done", f"receipt of {receipt['ended'][:19]} UTC", receipt)


def status_table(run: Run) -> Table:
    rows = [[state.name, state.state, state.reason] for state in stage_states(run).values()]
    return Table(["stage", "state", "why"], rows, f"run {run.id}")


def require_target(run: Run) -> Target:
    """Raises BadParams for a target that is not there or has too few layers, before anything is loaded or written."""
    target = Target(run.params.target)
    target.require()
    target.boundaries  # noqa: B018 (raises)
    return target


def require_foundations(run: Run, stage: Stage) -> None:
    """Raises CheckRefused unless the stages that `stage` rests on are done, saying which to run."""
    states = _judged(Evidence(run, hashing=True), STAGES[: STAGES.index(stage)])
    undone = [states[name] for name in stage.rests_on if not states[name].done]
    if undone:
        raise CheckRefused(
            f"{stage.name} rests on {', '.join(f'{state.name}, which is {state.state} ({state.reason})' for state in undone)}.",
            f"Run {undone[0].name} first (eagle3-runbook run --from {undone[0].name}).",
        )
