"""Whether the world is still the one that the plan was made for, looked at right before a launch."""

import os
from pathlib import Path

from eagle3_helpers.display import Checks, bytes_text
from eagle3_helpers.durable import file_digest
from eagle3_helpers.errors import CheckRefused
from eagle3_helpers.gate.cost import free_bytes
from eagle3_helpers.gate.plan import Plan, code_text, plan_file
from eagle3_helpers.recover.gpus import describe_gpus
from eagle3_helpers.runs import Run, code_commit, versions
from eagle3_helpers.samples.table import load_samples
from eagle3_helpers.states.manifest import manifest_digest
from eagle3_helpers.states.store import Store
from eagle3_helpers.training.checkpoints import Checkpoints
from eagle3_helpers.training.differences import differences, told
from eagle3_helpers.training.launch import trainer_status


def live_checks(run: Run, plan: Plan) -> Checks:
    """Same data, code and versions, a training folder of this plan's own, room in it, no other trainer, the plan's GPUs free.

    What is known to fail later is refused here, before an approval is spent on it.
    """
    checks = Checks("before the launch")
    _same_data(checks, plan)
    _same_code(checks, run, plan)
    _own_folder(checks, run, plan)
    _room(checks, plan)
    training = trainer_status(run.folder / "training").state == "running"
    checks.add(
        "no other trainer of this run",
        not training,
        "one is running" if training else "none",
        "none",
        f"Run 05_train to watch it, or stop it: eagle3-runbook stop --run {run.id}",
    )
    if plan.values["gpus"]:
        _free_gpus(checks, run, plan)
    return checks


def _same_data(checks: Checks, plan: Plan) -> None:
    spec = plan.values["spec"]
    for name, found, planned in (
        ("samples", lambda: file_digest(Path(spec["samples"]) / "samples.safetensors"), spec["samples_digest"]),
        ("states", lambda: _states(spec), spec["manifest_digest"]),
        ("draft vocabulary", lambda: file_digest(Path(spec["draft_vocab"])), spec["draft_vocab_digest"]),
    ):
        try:
            there = found()
            shown = there[:12]
        except (CheckRefused, OSError) as error:
            there, shown = None, str(error)
        checks.add(
            f"{name} as planned",
            there == planned,
            shown,
            planned[:12],
            "Run 03_verify and 04_inspect_freeze again, then approve the new plan.",
        )


def _states(spec: dict) -> str:
    return manifest_digest(Store.open(Path(spec["store"])), load_samples(Path(spec["samples"])).sample_ids)


def _same_code(checks: Checks, run: Run, plan: Plan) -> None:
    """Commit, the package's difference from it, and versions. Outside a git checkout nobody can tell, then and now."""
    again = f"Go back to them, or move {plan_file(run)} aside, run 04_inspect_freeze again and approve the new plan."
    then, found = plan.values["code"], code_commit()
    same = all(found[name] == then.get(name) for name in ("commit", "diff"))
    checks.add("code as planned", same, code_text(found), code_text(then), again)
    changes = differences(plan.values["versions"], versions())
    checks.add("versions as planned", not changes, told(changes) or "the same", "the same", again)


def _own_folder(checks: Checks, run: Run, plan: Plan) -> None:
    """The trainer resumes from the newest checkpoint there, and refuses one of another spec."""
    folder, spec = run.folder / "training", plan.values["spec"]
    found = Checkpoints(folder / "checkpoints").newest_spec()
    changes = differences(found, spec) if found else []
    observed = f"another plan's: {told(changes)}" if changes else "this plan's" if found else "empty"
    if spec["folder"] != str(folder):
        observed = f"{folder}, and the plan trains in {spec['folder']}"
    checks.add(
        "training folder",
        observed in ("empty", "this plan's"),
        observed,
        "empty or this plan's",
        f"Move {folder} aside to train anew, or use another run id, or go back to the plan that it was trained by.",
    )


def _room(checks: Checks, plan: Plan) -> None:
    folder, needed = Path(plan.values["checkpoints"]), plan.values["disk"]["needed"]
    free = free_bytes(folder)
    checks.add(
        "room for checkpoints",
        free > needed,
        f"{bytes_text(free)} free",
        f"more than {bytes_text(needed)}",
        f"Make room where {folder} lies.",
    )


def _free_gpus(checks: Checks, run: Run, plan: Plan) -> None:
    """A GPU that only this very process holds (its own warm-up) counts as free."""
    found = describe_gpus(run)
    by_uuid = {gpu.uuid: gpu for gpu in found.gpus}
    for uuid in plan.values["gpus"]:
        gpu = by_uuid.get(uuid)
        held = gpu and {process.pid for process in gpu.processes}
        checks.add(
            f"GPU {uuid}",
            gpu is not None and (gpu.verdict == "free" or held == {os.getpid()}),
            "; ".join([gpu.verdict, gpu.memory, *map(str, gpu.processes)]) if gpu else f"not found. {found.sentence}",
            "free",
            "01_recover shows what holds it; the kernel of another notebook may.",
        )
