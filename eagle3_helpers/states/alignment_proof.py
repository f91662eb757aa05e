"""Proof that the stored numbers are what they are called: the target alone recomputes a few samples, and each block is compared.

For a stored h_k the recomputed h_k must be closer than its neighbours h_(k-1) and h_(k+1), with cosine above 0.99, and at
least twice as close as its own neighbour rows: in many models a few huge channels make all rows alike, so a high cosine alone
would pass another sample's states. `last` must be the post-norm state, so that the target's head alone gives the target's
own next token. That finds layer ids that are off by one, rows that are shifted, padding that leaked in, and files whose
states belong to another sample of equal length, none of which a count or a hash can see.

How often the head's choice is the token that really follows says whether the text is the target's own; shifted by one row it
must fall. On text that the target did not write (or with a random target) the rate means nothing, so it decides nothing.
"""

import itertools
import random
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.nn.functional import cosine_similarity

from eagle3_helpers.display import Checks, Table
from eagle3_helpers.errors import CheckRefused
from eagle3_helpers.progress import Progress
from eagle3_helpers.states.check_file import examine
from eagle3_helpers.states.format import Damage
from eagle3_helpers.states.inventory import Finding
from eagle3_helpers.states.manifest import read_manifest
from eagle3_helpers.states.store import Store

COSINE = 0.99  # of own block, mean over rows: rounding in bf16 stays above, another layer or sample does not
HEAD_AGREEMENT = 0.95  # rows whose head(last) names the target's own first choice; the rest are near ties in bf16


class _Compared(NamedTuple):
    """One stored block of one sample against the recomputed ones; below and above are NaN where there is no neighbour."""

    slot: str
    own: float  # mean cosine of rows
    below: float
    above: float
    error: float  # median over rows of |stored - own| / |own|
    ok: bool
    looks_like: str


class Proof:
    """`ok`, `checks`, `findings` (samples that do not match), and `numbers` (plain values for receipts and plots):

    numbers["slots"][slot] = {"own", "below", "above": mean cosines, "relative_error"}; numbers["head_agreement"],
    numbers["next_token_rate"], numbers["next_token_rate_shifted"] are fractions of rows, None where there are none.
    """

    def __init__(self, checks: Checks, numbers: dict, findings: list[Finding]):
        self.checks, self.numbers, self.findings = checks, numbers, findings

    @property
    def ok(self) -> bool:
        return self.checks.ok

    def _tables(self) -> list:
        numbers = self.numbers
        slots = Table(
            ["block", "cosine own", "cosine below", "cosine above", "relative error"],
            [[slot, n["own"], n["below"], n["above"], n["relative_error"]] for slot, n in numbers["slots"].items()],
            f"{numbers['samples']} samples ({numbers['tokens']:,} tokens) recomputed by the target alone",
        )
        rate, shifted = numbers["next_token_rate"], numbers["next_token_rate_shifted"]
        follows = Table(
            ["rows", "the head's choice is the token that follows"],
            [["as stored", rate], ["shifted by one", shifted]],
            "For information: supervised tokens; near zero for a random target",
        )
        bad = Table(
            ["sample", "class", "detail"], [[f.sample_id, f.kind, f.detail] for f in self.findings], "Not matching"
        )
        return [self.checks, slots, follows, *([bad] if self.findings else [])]

    def __repr__(self) -> str:
        return "\n\n".join(map(repr, self._tables()))

    def _repr_html_(self) -> str:
        return "".join(table._repr_html_() for table in self._tables())


def prove_alignment(store: Store, table, target, count: int = 8, device: str = "cpu", seed: int = 0) -> Proof:
    """Recomputes `count` listed samples of different lengths, chosen by `seed`, one at a time and without padding.

    Raises CheckRefused where the store lists none of the table's samples. Damaged or swapped files become findings.
    """
    manifest = read_manifest(store)
    chosen = _choose([s for s in table.sample_ids if s in manifest], table, count, seed)
    if not chosen:
        raise CheckRefused(f"{store.folder} lists none of these samples.", "Run 02_extract first.")
    model = target.load_model(store.record.dtype, device)
    compared: list[_Compared] = []
    findings: list[Finding] = []
    choices: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]] = []
    with Progress("recompute", len(chosen), "samples") as progress:
        for sample_id in chosen:
            try:
                input_ids = torch.from_numpy(table.input_ids(sample_id).copy())
                state = examine(store, sample_id, input_ids, manifest[sample_id]).state
                hidden, own_choice = _recompute(model, input_ids)
                blocks = list(_compare(store.record, state, hidden))
                head_choice = _head(model, state.last)
                loss_mask = torch.from_numpy(table.loss_mask(sample_id).copy()).bool()
                choices.append((head_choice, own_choice, input_ids, loss_mask))
                compared += blocks
                wrong = [block for block in blocks if not block.ok]
                if wrong:
                    detail = "; ".join(f"{b.slot} looks like {b.looks_like} (cosine {b.own:.4f})" for b in wrong)
                    raise Damage("states of something else", detail)
            except Damage as damage:
                path = str(store.state_file(sample_id))
                findings.append(Finding(sample_id, damage.kind, damage.detail, path, manifest[sample_id].bytes))
            progress.add()
    numbers = {"samples": len(chosen), "tokens": sum(len(ids) for _, _, ids, _ in choices), **_rates(choices)}
    numbers["slots"] = _slots(store.record.slots, compared)
    return Proof(_checks(numbers, findings), numbers, findings)


def _choose(sample_ids: list[str], table, count: int, seed: int) -> list[str]:
    """One of each of `count` groups of similar length, so that short and long samples are both seen."""
    ordered = sorted(sample_ids, key=lambda sample_id: (int(table.lengths[table.row(sample_id)]), sample_id))
    count = min(count, len(ordered))
    edges = [len(ordered) * n // count for n in range(count + 1)] if count else []
    dice = random.Random(seed)
    return [dice.choice(ordered[start:end]) for start, end in itertools.pairwise(edges)]


@torch.inference_mode()
def _recompute(model, input_ids: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    """hidden_states h_0..h_N as [L, H] float32 (the last one post-norm), and the target's first choice per row [L]."""
    out = model(input_ids=input_ids.long()[None].to(model.device), output_hidden_states=True, use_cache=False)
    return [hidden[0].float().cpu() for hidden in out.hidden_states], out.logits[0].argmax(dim=-1).cpu()


@torch.inference_mode()
def _head(model, last: torch.Tensor) -> torch.Tensor:
    """[L]: first choice of the target's head on stored last states."""
    return model.get_output_embeddings()(last.to(model.device)).argmax(dim=-1).cpu()


def _compare(record, state, hidden: list[torch.Tensor]) -> Iterator[_Compared]:
    blocks = [*state.aux.split(record.hidden_size, dim=1), state.last]
    for slot, k, block in zip(record.slots, [*record.boundaries, len(hidden) - 1], blocks, strict=True):
        block = block.float()
        near = {n: hidden[n] for n in (k - 1, k, k + 1) if 0 <= n < len(hidden)}
        cosines = {n: float(cosine_similarity(block, other, dim=1).mean()) for n, other in near.items()}
        error = _error(block, hidden[k])
        layers = [_error(block, other) for n, other in near.items() if n != k]
        rows = [_error(block, hidden[k], shift) for shift in (-1, 1) if len(block) > 1]
        ok = cosines[k] > COSINE and error < min(layers) and all(error * 2 < other for other in rows)
        nan = float("nan")
        looks_like = slot if ok else _looks_like(block, hidden, error)
        yield _Compared(slot, cosines[k], cosines.get(k - 1, nan), cosines.get(k + 1, nan), error, ok, looks_like)


def _error(block: torch.Tensor, other: torch.Tensor, shift: int = 0) -> float:
    """Median relative distance of rows; with shift +1, row t + 1 of `block` is compared with row t of `other`."""
    mine = block[max(0, shift) : len(block) + min(0, shift)]
    theirs = other[max(0, -shift) : len(other) + min(0, -shift)]
    return float(((mine - theirs).norm(dim=1) / theirs.norm(dim=1).clamp_min(1e-12)).median())


def _looks_like(block: torch.Tensor, hidden: list[torch.Tensor], error: float) -> str:
    """The recomputed state, at this row or one off, that `block` is much closer to than its own: the likely mistake."""
    best, name = error / 2, "nothing of this sample"
    for k, other in enumerate(hidden):
        for shift in (-1, 0, 1) if len(block) > 1 else (0,):
            there = _error(block, other, shift)
            if there < best:
                best, name = there, f"h_{k}" if k < len(hidden) - 1 else "last"
                name += f" moved by {shift:+d} row" if shift else ""
    return name


def _rates(choices: list[tuple]) -> dict[str, float | None]:
    """Row t's choice against the target's own, against x_(t+1), and, one row off either way, against x_(t+1) again."""
    agreed = rows = 0
    hits, supervised = [0, 0, 0], 0
    for head_choice, own_choice, input_ids, loss_mask in choices:
        agreed += int((head_choice == own_choice).sum())
        rows += len(input_ids)
        inner = torch.arange(2, len(input_ids) - 1)  # tokens whose previous row and both of its neighbours exist
        tokens = inner[loss_mask[inner]] if len(inner) else inner
        supervised += len(tokens)
        for n, shift in enumerate((-1, -2, 0)):
            hits[n] += int((head_choice[tokens + shift] == input_ids[tokens]).sum())
    rates = [hit / supervised if supervised else None for hit in hits]
    return {
        "head_agreement": agreed / rows if rows else None,
        "next_token_rate": rates[0],
        "next_token_rate_shifted": max(rates[1:]) if supervised else None,
    }


def _slots(names: list[str], compared: list[_Compared]) -> dict[str, dict[str, float | None]]:
    """Means over samples; None (JSON knows no NaN) where a block has no such neighbour."""
    slots = {}
    for name in names:
        mine = [one for one in compared if one.slot == name]
        means = {
            field: sum(getattr(one, field) for one in mine) / len(mine) if mine else float("nan")
            for field in ("own", "below", "above", "error")
        }
        means["relative_error"] = means.pop("error")
        slots[name] = {field: value if value == value else None for field, value in means.items()}
    return slots


def _checks(numbers: dict, findings: list[Finding]) -> Checks:
    named = ", ".join(finding.sample_id for finding in findings[:6]) + (" ..." if len(findings) > 6 else "")
    checks = Checks("Alignment of states and text")
    checks.add(
        "samples that the target reproduces",
        not findings,
        f"{numbers['samples'] - len(findings)} of {numbers['samples']}" + (f"; not {named}" if findings else ""),
        f"all: own layer and row closest, cosine above {COSINE}",
        "See below what the blocks look like; quarantine those samples and capture them again.",
    )
    agreement = numbers["head_agreement"]
    checks.add(
        "head(last) names the target's own choice",
        agreement is not None and agreement >= HEAD_AGREEMENT,
        agreement if agreement is not None else "no sample could be read",
        f"{HEAD_AGREEMENT} of rows or more",
        "`last` is not the post-norm state of this target.",
    )
    return checks
