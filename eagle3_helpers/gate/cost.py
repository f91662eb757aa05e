"""What a training run costs: hours, energy, money and disk.

Time comes from a warm-up that was timed on this machine, never from a table of speeds. Energy and money are what the params say
a GPU hour takes; on a CPU both are 0.
"""

import math
import shutil
from pathlib import Path

from eagle3_helpers.draft.model import EMBEDDING
from eagle3_helpers.errors import BadParams
from eagle3_helpers.params import GateParams


def estimate(gate: GateParams, optimizer_steps: int, gpus: int, warmup: dict) -> dict:
    """`warmup["seconds_per_step"]` in s per optimizer step; its other numbers are carried along. Raises BadParams without it."""
    pace = warmup.get("seconds_per_step")
    if not isinstance(pace, int | float) or not math.isfinite(pace) or pace <= 0:
        raise BadParams(f"the warm-up took {pace!r} seconds a step.", "Run the warm-up again.")
    seconds = pace * optimizer_steps
    gpu_hours = seconds / 3600 * gpus
    return {
        "seconds": seconds,
        "hours": seconds / 3600,
        "gpu_hours": gpu_hours,
        "kwh": gpu_hours * gate.gpu_watts / 1000,
        "cost": gpu_hours * gate.cost_per_gpu_hour,
        "from": warmup,
    }


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
