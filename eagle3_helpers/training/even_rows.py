"""Row counts rounded up, so that few shapes occur.

Which rows of a packed batch are computed differs from step to step, and a library that builds a kernel for each shape of a
matrix product (oneDNN for bfloat16 on a CPU, a compiler on a GPU) would build new ones at every step. Products therefore run
on a multiple of ROWS rows; the zero rows at the end are cut off again and change no number.
"""

import torch
import torch.nn.functional as F

ROWS = 64


def even(x: torch.Tensor) -> torch.Tensor:
    """x [n, ...] with zero rows added behind up to a multiple of ROWS."""
    missing = -len(x) % ROWS
    return F.pad(x, (0, 0) * (x.dim() - 1) + (0, missing)) if missing else x
