"""The frozen plan: everything that decides what a training run costs and becomes, in one file that a person approves.

plan.json is canonical JSON and the sha256 of its bytes is what gets approved: change one byte and the approval is void. The
trainer reads nothing but this file (`plan["spec"]`) and is told its sha256, so what was approved is what runs. The estimate, the
free disk space, the date and files outside the package are told too, for the person who decides; they alone never make a new
plan, so building it twice changes nothing.
"""

import html
import json
import os
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from eagle3_helpers.display import Table, bytes_text, seconds_text
from eagle3_helpers.durable import canonical_json, digest, write_bytes
from eagle3_helpers.errors import CheckRefused
from eagle3_helpers.gate.cost import checkpoint_bytes, estimate, free_bytes
from eagle3_helpers.gate.plan_contents import Contents
from eagle3_helpers.recover.gpus import describe_gpus
from eagle3_helpers.runs import Run, code_commit, now, versions
from eagle3_helpers.samples.table import load_samples
from eagle3_helpers.states.manifest import manifest_digest, read_manifest
from eagle3_helpers.states.store import Store
from eagle3_helpers.training.differences import differences, dotted
from eagle3_helpers.training.launch import launch_lock, trainer_status

ENVIRONMENT = (  # what the trainer takes from it; a plan names those that are set, never their values
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_DEVICE_ORDER",
    "CUDA_VISIBLE_DEVICES",
    "MKL_NUM_THREADS",
    "NCCL_ALGO",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
)
INFORMATION = ("created", "estimate", "disk.free", "code.dirty")  # fields that alone make no new plan


@dataclass(frozen=True)
class Plan:
    """`values` is what plan.json holds; `digest` is the sha256 of its bytes."""

    values: dict

    @cached_property
    def digest(self) -> str:
        return digest(self.values)

    def table(self) -> Table:
        v, spec = self.values, self.values["spec"]
        data, totals, estimate, disk, code = v["data"], v["freeze_table"], v["estimate"], v["disk"], v["code"]
        training = spec["training"]
        paces = estimate["from"]
        how_long = (
            f"{seconds_text(estimate['seconds'])}: {spec['optimizer_steps']:,} steps of {paces['seconds_per_step']:.3g} s, "
            f"{estimate['evaluations']:,} held-out evaluations of {paces['seconds_per_evaluation']:.3g} s, up to "
            f"{estimate['checkpoints']:,} checkpoints of {paces['seconds_per_checkpoint']:.3g} s, as measured; without starting up"
        )
        verdict = "OK" if disk["free"] > disk["needed"] else "STOP"
        rows = [
            ["what runs", " ".join(v["argv"])],
            ["on", ", ".join([v["device"], *v["gpus"]])],
            ["code", f"{code_text(code)}; " + ", ".join(f"{name} {version}" for name, version in v["versions"].items())],
            ["target", spec["target"]["path"]],
            ["data", f"{data['samples']:,} samples, {data['tokens']:,} tokens, {bytes_text(data['bytes'])} in {spec['store']}"],
            ["held out of training", f"{len(spec['held_out']):,} samples"],
            ["trainable", f"{totals['trainable']:,} parameters"],
            ["frozen", f"{totals['frozen']:,} parameters"],
            ["optimizer steps", f"{spec['optimizer_steps']:,} ({training['epochs']} epochs of {spec['steps_per_epoch']:,})"],
            ["hyperparameters", ", ".join(f"{name} {value}" for name, value in training.items())],
            ["how long", how_long],
            ["GPU hours", f"{estimate['gpu_hours']:.3g}, {estimate['kwh']:.3g} kWh, cost {estimate['cost']:,.2f}"],
            ["disk", f"{verdict}: {bytes_text(disk['needed'])} needed, {bytes_text(disk['free'])} free"],
            ["checkpoints", v["checkpoints"]],
            ["stops when", "; ".join(v["stop_rules"])],
            ["undo", v["undo"]],
            ["made", v["created"]],
            ["sha256", self.digest],
        ]  # fmt: skip
        return Table(["field", "value"], rows, f"plan {self.digest[:12]} of run {v['run_id']}")

    def __repr__(self) -> str:
        return repr(self.table())

    def _repr_html_(self) -> str:
        return f"<div title='sha256 {html.escape(self.digest)}'>{self.table()._repr_html_()}</div>"


def plan_file(run: Run) -> Path:
    return run.folder / "plan.json"


def approval_file(run: Run) -> Path:
    return run.folder / "approval.json"


def approvals_folder(run: Run) -> Path:
    """Plans that were approved or rejected, by digest, and approvals that a newer plan set aside."""
    return run.folder / "approvals"


def build_plan(run: Run, spec: dict, freeze_table: dict, draft_config: dict, warmup: dict) -> Plan:
    """The plan of a training run; nothing is written.

    spec: a TrainingSpec as plain values. freeze_table: FreezeTable.to_dict().
    warmup: numbers of the timed warm-up, of which those in seconds make the estimate.
    Raises CheckRefused where spec and draft_config disagree, the store changed, or no GPU is visible; BadParams for a
    warm-up without a time.
    """
    if spec["draft"] != draft_config:
        raise CheckRefused(
            "the training spec describes another draft than the freeze table.", "Run 04_inspect_freeze again."
        )
    training = spec["training"]
    gpus = _gpus(run) if training["device"] == "cuda" else []
    checkpoints = Path(spec["folder"]) / "checkpoints"
    values = {
        "run_id": run.id,
        "argv": [sys.executable, "-m", "eagle3_helpers.training.loop", str(plan_file(run))],
        "environment": [name for name in ENVIRONMENT if name in os.environ],
        "device": training["device"],
        "gpus": gpus,
        "code": code_commit(),
        "versions": versions(),
        "data": _data(spec),
        "freeze_table": {
            "digest": digest(freeze_table),
            "trainable": freeze_table["trainable"],
            "frozen": freeze_table["frozen"],
        },
        "spec": spec,
        "estimate": estimate(run.params.gate, spec, len(gpus), warmup),
        "disk": {
            "needed": checkpoint_bytes(freeze_table, training["keep_checkpoints"]),
            "free": free_bytes(checkpoints),
        },
        "checkpoints": str(checkpoints),
        "stop_rules": [
            f"more than {training['max_skips']} optimizer steps with a NaN or inf in loss or gradient",
            "the disk has no room for a checkpoint",
            f"`eagle3-runbook stop --run {run.id}` or SIGTERM: a checkpoint first, then the end",
        ],
        "undo": "Nothing outside the training folder changes; to undo, stop the trainer and move that folder away.",
        "created": now(),
    }
    return Plan(json.loads(canonical_json(values)))  # as it will be read back: lists, not tuples


def write_plan(run: Run, plan: Plan) -> Plan:
    """Keeps plan.json where its deciding fields are those of `plan`, else replaces it; returns the one on disk.

    A plan that is replaced takes its approval with it: that is moved to approvals/, and said so. Raises CheckRefused while a
    trainer works by the old plan or is being launched by it.
    """
    try:
        old = read_plan(run)
    except CheckRefused:
        old = None
    if old and deciding(old.values) == deciding(plan.values):
        return old
    folder = run.folder / "training"
    with launch_lock(folder, 0):
        if trainer_status(folder).state == "running":
            raise CheckRefused(
                f"the trainer of run {run.id} works by the present plan, and the new one differs.",
                f"Stop it (eagle3-runbook stop --run {run.id}), or use another run id.",
            )
        _set_approval_aside(run, plan)
        write_bytes(plan_file(run), canonical_json(plan.values))
        plan_file(run).chmod(0o444)
    run.event("plan written", plan=plan.digest, replaces=old and old.digest)
    return plan


def _set_approval_aside(run: Run, new: Plan) -> None:
    if approval_file(run).exists():
        aside = approvals_folder(run) / f"set-aside-{now().replace(':', '')}.json"
        aside.parent.mkdir(exist_ok=True)
        approval_file(run).rename(aside)
        run.event("approval set aside", file=aside.name, new_plan=new.digest)
        print(f"The plan changed, so its approval no longer counts; it was moved to {aside}.", flush=True)


def read_plan(run: Run) -> Plan:
    """The plan on disk. Raises CheckRefused where it is missing, not as it was written, or of another run."""
    path, again = plan_file(run), "Run 04_inspect_freeze: it writes the plan."
    try:
        return parse_plan(path.read_bytes(), run.id)
    except FileNotFoundError as error:
        raise CheckRefused(f"run {run.id} has no plan ({path} is not there).", again) from error
    except (OSError, ValueError) as error:
        raise CheckRefused(f"{path} is not a plan as it was written: {error}.", again) from error


def parse_plan(content: bytes, run_id: str) -> Plan:
    """Raises ValueError unless `content` is, byte for byte, the canonical JSON of a plan of this run."""
    values = json.loads(content)
    if canonical_json(values) != content:
        raise ValueError("its bytes are not canonical JSON")
    Contents.model_validate_json(content)  # a ValidationError is a ValueError
    if values["run_id"] != run_id:
        raise ValueError(f"it belongs to run {values['run_id']}")
    return Plan(values)


def deciding(values: dict) -> dict:
    """{dotted field: value} of what decides cost and result."""
    return {name: value for name, value in dotted(values).items() if not _informs(name)}


def compare(plan_a: Plan, plan_b: Plan) -> list[tuple]:
    """(dotted field, value in a, value in b) of every difference; None where one has no such field. Deciding fields first."""
    return sorted(differences(plan_a.values, plan_b.values), key=lambda change: _informs(change[0]))


def code_text(code: dict) -> str:
    """Which code, as a person reads it."""
    changes = f" with changes {code['diff'][:12]} that are not committed" if code.get("diff") else ""
    return f"{(code['commit'] or 'not in git')[:12]}{changes}"


def _informs(name: str) -> bool:
    return any(name == field or name.startswith(f"{field}.") for field in INFORMATION)


def _gpus(run: Run) -> list[str]:
    """The one GPU that the trainer will use: the first that CUDA shows."""
    found = describe_gpus(run)
    if not found.visible():
        raise CheckRefused(
            f"training.device is cuda and no GPU is visible. {found.sentence}".strip(),
            "Run 01_recover to see the GPUs, or set training.device: cpu.",
        )
    return [found.visible()[0].uuid]


def _data(spec: dict) -> dict:
    store, names = Store.open(Path(spec["store"])), load_samples(Path(spec["samples"])).sample_ids
    if manifest_digest(store, names) != spec["manifest_digest"]:
        raise CheckRefused(
            f"{store.folder} changed since the training spec was made.", "Run 03_verify and 04_inspect_freeze again."
        )
    listed = read_manifest(store)
    entries = [listed[name] for name in names if name in listed]
    return {
        "capture_record": store.record.digest,
        "samples": len(entries),
        "tokens": sum(entry.n_tokens for entry in entries),
        "bytes": sum(entry.bytes for entry in entries),
    }
