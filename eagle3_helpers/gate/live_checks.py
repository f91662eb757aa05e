"""Whether the world is still the one that the plan was made for, looked at right before a launch."""

import os
from pathlib import Path

from eagle3_helpers.display import Checks, bytes_text
from eagle3_helpers.durable import file_digest
from eagle3_helpers.errors import CheckRefused
from eagle3_helpers.gate.cost import free_bytes
from eagle3_helpers.gate.plan import Plan
from eagle3_helpers.recover.gpus import describe_gpus
from eagle3_helpers.recover.processes import training_locked
from eagle3_helpers.runs import Run
from eagle3_helpers.states.manifest import manifest_digest
from eagle3_helpers.states.store import Store


def live_checks(run: Run, plan: Plan) -> Checks:
    """Same data, room for the checkpoints, no other trainer of this run, and the plan's GPUs free."""
    checks = Checks("before the launch")
    _same_data(checks, plan)
    _room(checks, plan)
    training = training_locked(run)
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
        ("states", lambda: manifest_digest(Store.open(Path(spec["store"]))), spec["manifest_digest"]),
        ("samples", lambda: file_digest(Path(spec["samples"]) / "samples.safetensors"), spec["samples_digest"]),
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
