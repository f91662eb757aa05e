"""The draft vocabulary: the D tokens that the draft can propose, out of the V that the target knows.

The draft's head is the largest thing it multiplies, and few tokens make up nearly all text. So the tokens that the
target wrote most often in the supervised positions are kept; ties go to the smaller id, tokens that never occurred fill
up by id. Tokens that end a turn and special tokens are always in: a draft that cannot propose the end runs past it.

    d2t int64 [D]   draft id k is target id k + d2t[k]; the ids rise strictly
    t2d bool  [V]   whether a target id is in the draft vocabulary
    nonzero(t2d) == arange(D) + d2t

d2t holds offsets, as the servers read it; a map of absolute ids, or of zeros, breaks that equation and is refused.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors
import safetensors.torch
import torch

from eagle3_helpers.durable import write_bytes
from eagle3_helpers.errors import BadParams, CheckRefused
from eagle3_helpers.samples.table import SampleTable
from eagle3_helpers.target import Target


@dataclass(frozen=True)
class DraftVocab:
    d2t: torch.Tensor  # int64 [D]
    t2d: torch.Tensor  # bool [V]
    coverage: float  # fraction of the supervised tokens whose id is inside

    @property
    def size(self) -> int:
        return len(self.d2t)

    @property
    def target_ids(self) -> torch.Tensor:
        """int64 [D]: the target's id of each draft id."""
        return self.d2t + torch.arange(self.size)

    def save(self, path: Path) -> None:
        tensors = {"d2t": self.d2t, "t2d": self.t2d}
        write_bytes(path, safetensors.torch.save(tensors, metadata={"coverage": repr(self.coverage)}))

    def __repr__(self) -> str:
        return (
            f"draft vocabulary: {self.size:,} of {len(self.t2d):,} tokens, {self.coverage:.2%} of the supervised text"
        )


def choose_draft_vocab(table: SampleTable, size: int, target: Target) -> DraftVocab:
    """The `size` tokens that the samples' answers use most. Raises BadParams for a size that cannot be."""
    order, counts, always = _ranking(table, target)
    if not 0 < size <= len(counts):
        raise BadParams(
            f"draft.vocab_size {size} is not in 1..{len(counts)}, the target's vocabulary.",
            "Set another draft.vocab_size.",
        )
    if size < always:
        raise BadParams(
            f"draft.vocab_size {size} does not hold the {always} stop and special tokens of the target.",
            f"Set draft.vocab_size to {always} or more.",
        )
    ids = torch.from_numpy(np.sort(order[:size]))
    t2d = torch.zeros(len(counts), dtype=torch.bool)
    t2d[ids] = True
    coverage = counts[order[:size]].sum() / counts.sum()
    return DraftVocab(ids - torch.arange(size), t2d, float(coverage))


def coverage_curve(table: SampleTable, target: Target, points: int = 200) -> tuple[np.ndarray, np.ndarray]:
    """(sizes int64 [P], fractions float64 [P]): the coverage that each size of draft vocabulary would have."""
    order, counts, always = _ranking(table, target)
    covered = np.cumsum(counts[order]) / counts.sum()
    sizes = np.unique(np.geomspace(max(always, 1), len(counts), points).round().astype(np.int64))
    return sizes, covered[sizes - 1]


def load_draft_vocab(path: Path) -> DraftVocab:
    """Raises CheckRefused where the file is damaged or its maps contradict each other."""
    remedy = "Choose the draft vocabulary again (stage extract)."
    try:
        with safetensors.safe_open(path, "pt") as file:
            coverage = float((file.metadata() or {}).get("coverage", "nan"))
            d2t, t2d = file.get_tensor("d2t"), file.get_tensor("t2d")
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckRefused(f"draft vocabulary {path} cannot be read: {error}.", remedy) from error
    if d2t.dtype != torch.int64 or t2d.dtype != torch.bool or d2t.dim() != 1 or t2d.dim() != 1:
        raise CheckRefused(
            f"{path}: d2t is {d2t.dtype} {list(d2t.shape)} and t2d {t2d.dtype} {list(t2d.shape)}, "
            "not int64 [D] and bool [V].",
            remedy,
        )
    ids = d2t + torch.arange(len(d2t))
    if not torch.equal(ids, t2d.nonzero().flatten()):
        raise CheckRefused(
            f"{path}: d2t names target ids {ids[:4].tolist()} ..., t2d marks {t2d.nonzero().flatten()[:4].tolist()} ... "
            f"({len(ids)} and {int(t2d.sum())} of {len(t2d)}).",
            f"d2t must hold offsets (target id minus draft id), not ids. {remedy}",
        )
    return DraftVocab(d2t, t2d, coverage)


def _ranking(table: SampleTable, target: Target) -> tuple[np.ndarray, np.ndarray, int]:
    """All V target ids, the first to be chosen first; the supervised count of each id; how many are always in."""
    size = target.shape.vocab_size
    counts = np.bincount(table.flat_ids[table.flat_mask == 1], minlength=size)
    always = np.zeros(size, bool)
    always[[token for token in _always_in(target) if token < size]] = True
    return np.lexsort((np.arange(size), -counts, ~always)), counts, int(always.sum())


def _always_in(target: Target) -> list[int]:
    added = getattr(target.tokenizer, "added_tokens_decoder", {})
    special = {token for token, entry in added.items() if entry.special}
    return sorted({*target.stop_ids, *target.tokenizer.all_special_ids, *special})
