"""What a training run costs: hours, energy, money and disk.

Time comes from a warm-up that was timed on this machine, never from a table of speeds: optimizer steps, held-out evaluations and
checkpoints, each as often as the plan has them; starting up is not counted. Energy and money are what the params say a GPU
hour takes; on a CPU both are 0.
"""

import math
import shutil
from pathlib import Path

from eagle3_helpers.draft.model import EMBEDDING
from eagle3_helpers.errors import BadParams
from eagle3_helpers.params import GateParams


def estimate(gate: GateParams, spec: dict, gpus: int, warmup: dict) -> dict:
    """`warmup` holds seconds_per_step, seconds_per_evaluation and seconds_per_checkpoint; its other numbers are carried along.

    Raises BadParams where one of the three is not a time.
    """
    for name in ("seconds_per_step", "seconds_per_evaluation", "seconds_per_checkpoint"):
        pace = warmup.get(name)
        least = 0 if name != "seconds_per_step" else math.ulp(0.0)
        if not isinstance(pace, int | float) or not least <= pace < math.inf:
            raise BadParams(f"the warm-up measured {pace!r} {name}.", "Run the warm-up again.")
    evaluations, checkpoints = occasions(spec)
    seconds = (
        spec["optimizer_steps"] * warmup["seconds_per_step"]
        + evaluations * warmup["seconds_per_evaluation"]
        + checkpoints * warmup["seconds_per_checkpoint"]
    )
    gpu_hours = seconds / 3600 * gpus
    return {
        "evaluations": evaluations,
        "checkpoints": checkpoints,
        "seconds": seconds,
        "hours": seconds / 3600,
        "gpu_hours": gpu_hours,
        "kwh": gpu_hours * gate.gpu_watts / 1000,
        "cost": gpu_hours * gate.cost_per_gpu_hour,
        "from": warmup,
    }


def occasions(spec: dict) -> tuple[int, int]:
    """How many held-out evaluations, and how many checkpoints at most: each evaluation may be the best so far."""
    steps, training = spec["optimizer_steps"], spec["training"]
    evaluated, saved = (
        {*range(every, steps, every), steps} for every in (training["evaluate_every"], training["checkpoint_every"])
    )
    if not spec["held_out"]:
        evaluated = set()
    return len(evaluated), len(saved | evaluated)


def checkpoint_bytes(freeze_table: dict, kept: int) -> int:
    """All kept checkpoints, the best one, and the one being written before the oldest goes.

    Each holds float32 weights without the embedding (it is the target's), and two float32 moments of what trains.
    """
    rows = [row for row in freeze_table["rows"] if row["tensor"] != EMBEDDING]
    one = sum((12 if row["trainable"] else 4) * row["count"] for row in rows)
    return one * (kept + 2)


def free_bytes(folder: Path) -> int:
    """Free bytes for this user where `folder` is or will be."""
    while not folder.is_dir():
        folder = folder.parent
    return shutil.disk_usage(folder).free
