"""Training-time test (TTT) on a packed batch: states, loss and counts of S steps in one forward.

At step i a row's query sees the keys of step 0 of its document up to its own position, and its own keys of steps 1..i; its
position is t + i. So with one decoder layer a row's states of steps >= 1 matter to no other row, and keys and values of step 0
need no attention. Hence, exactly: fc, norms, K and V of step 0 run on all rows; queries, attention, MLP and head only on the
rows that are supervised at this step or a later one.

A row is *supervised* at a step where its mask says so (batches.py), and *learned* where also the target's own first choice, over
its whole vocabulary, lies in the draft vocabulary. Other supervised rows are left out of the loss, and are wrong in the accuracy.

Legend: R rows, S steps, H hidden, D draft vocabulary, V vocabulary, N query heads, G key/value heads, E head width, A active rows.
"""

import dataclasses

import torch

from eagle3_helpers.draft.model import Draft
from eagle3_helpers.training.batches import Batch
from eagle3_helpers.training.even_rows import ROWS, even
from eagle3_helpers.training.loss import soft_cross_entropy

CHUNK_LOGITS = 1 << 24  # target logits held at a time
OUTSIDE = -1


class Teacher:
    """The target's head: what it would say after each stored last state."""

    def __init__(self, head: torch.Tensor, d2t: torch.Tensor, dtype: torch.dtype, device: str | torch.device):
        """head [V, H]; d2t int64 [D], so that draft id k is target id k + d2t[k]."""
        ids = d2t + torch.arange(len(d2t))
        self.dtype, self.device = dtype, torch.device(device)
        self.head_VH = head.to(device=device, dtype=dtype)
        self.head_DH = self.head_VH[ids.to(device)]
        self.draft_id_V = torch.full((len(head),), OUTSIDE, device=device)
        self.draft_id_V[ids.to(device)] = torch.arange(len(ids), device=device)

    @torch.no_grad()
    def choice(self, last: torch.Tensor) -> torch.Tensor:
        """last [n, H] -> the likeliest of all V tokens as a draft id [n], OUTSIDE where the draft lacks it."""
        ids = [(part @ self.head_VH.T).max(-1).indices for part in self._parts(last, self.head_VH)]
        return self.draft_id_V[torch.cat(ids)[: len(last)]] if ids else self.draft_id_V[:0]

    @torch.no_grad()
    def probabilities(self, last: torch.Tensor) -> torch.Tensor:
        """last [n, H] -> [n, D]: softmax over the draft vocabulary, taken in float32, kept in the compute dtype."""
        wide = torch.promote_types(self.dtype, torch.float32)
        out = torch.empty(len(even(last)), len(self.head_DH), dtype=self.dtype, device=last.device)
        start = 0
        for part in self._parts(last, self.head_DH):
            out[start : start + len(part)] = torch.softmax((part @ self.head_DH.T).to(wide), -1)
            start += len(part)
        return out[: len(last)]

    def _parts(self, last: torch.Tensor, head: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """`last` with an even number of rows, in pieces whose logits stay below CHUNK_LOGITS."""
        if not len(last):
            return ()
        return even(last.to(self.dtype)).split(max(1, CHUNK_LOGITS // len(head) // ROWS) * ROWS)


@dataclasses.dataclass(frozen=True)
class Exam:
    """A batch on the training device with what is asked of it."""

    batch: Batch
    truth: torch.Tensor  # [R] draft id of the target's first choice at entry r, OUTSIDE where none or not supervised
    supervised: torch.Tensor  # [S, R] bool
    learned: torch.Tensor  # [S, R] bool


def set_exam(batch: Batch, teacher: Teacher, steps: int) -> Exam:
    """Moves the batch to the teacher's device and finds what is supervised and learned."""
    move = {name: getattr(batch, name).to(teacher.device) for name in ("tokens", "mask", "positions", "last")}
    batch = dataclasses.replace(batch, aux=batch.aux.to(teacher.device, teacher.dtype), **move)
    supervised = batch.supervised(steps).to(teacher.device)
    truth = torch.full_like(batch.tokens, OUTSIDE)
    truth[batch.mask] = teacher.choice(batch.last[batch.mask])
    learned = torch.zeros_like(supervised)
    for i in range(min(steps, batch.rows)):
        learned[i, : batch.rows - i] = supervised[i, : batch.rows - i] & (truth[i:] != OUTSIDE)
    return Exam(batch, truth, supervised, learned)


def row_weights(learned: torch.Tensor, learned_counts: torch.Tensor, decay: float) -> torch.Tensor:
    """[S, R] float32: decay^i / (learned rows of the whole optimizer step at step i), 0 for rows that are not learned."""
    step_decay = decay ** torch.arange(len(learned), device=learned.device, dtype=torch.float32)
    return learned * (step_decay / learned_counts.clamp(min=1))[:, None]


def ttt_hidden(draft: Draft, batch: Batch, supervised: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For each step: the active rows [A] (supervised now or later) and their output before the last norm [A, H]."""
    needed = supervised.flip(0).cumsum(0).flip(0) > 0  # [S, R]
    first_RH = draft.fuse(even(batch.aux))
    inputs = draft.layer_input(draft.embed(even(batch.tokens)), first_RH)
    k_RGE, v_RGE = draft.keys_values(inputs, even(batch.positions))
    states, own = [], []
    hidden_AH = first_RH
    active = torch.arange(batch.rows, device=batch.tokens.device)
    for i in range(len(needed)):
        kept = needed[i][active].nonzero().squeeze(1)
        active, hidden_AH = active[kept], hidden_AH[kept]
        n, positions = len(active), even(batch.positions[active] + i)
        if i == 0:
            q_ANE = draft.queries(even(inputs[active]), positions)[:n]
        else:
            own = [(k[kept], v[kept]) for k, v in own]
            embeds = draft.embed(even(batch.tokens[active + i]))
            q_ANE, k, v = (part[:n] for part in draft.qkv(embeds, even(hidden_AH), positions))
            own.append((k, v))
        attended = _attend(q_ANE, k_RGE, v_RGE, own, active, batch.lengths)
        hidden_AH = draft.finish(even(hidden_AH), even(attended))[:n]
        states.append((active, hidden_AH))
    return states


def _attend(q_ANE, k_RGE, v_RGE, own, active, lengths) -> torch.Tensor:
    """One softmax over the causal keys of step 0 and the row's own keys of later steps -> [A, N*E]. Documents stay apart.

    In float32 throughout: a small part of the work, and of as many shapes as there are documents (see even_rows.py).
    """
    dtype = q_ANE.dtype
    wide = torch.promote_types(dtype, torch.float32)
    with torch.autocast(q_ANE.device.type, enabled=False):
        own = [(k.to(wide), v.to(wide)) for k, v in own]
        return _attend_wide(q_ANE.to(wide), k_RGE.to(wide), v_RGE.to(wide), own, active, lengths).to(dtype)


def _attend_wide(q_ANE, k_RGE, v_RGE, own, active, lengths) -> torch.Tensor:
    A, N, E = q_ANE.shape
    G = k_RGE.shape[1]
    q = q_ANE.view(A, G, N // G, E) * E**-0.5
    diagonal = [(q * k[:, :, None]).sum(-1) for k, _ in own]  # each [A, G, N/G]
    diagonal = torch.stack(diagonal, -1) if own else q.new_empty(A, G, N // G, 0)
    starts = torch.tensor([0, *lengths]).cumsum(0)
    cuts = torch.searchsorted(active.cpu(), starts).tolist()
    outs, shares = [], []
    for start, length, a, b in zip(starts.tolist(), lengths, cuts, cuts[1:], strict=False):
        if a == b:
            continue
        keys, values = k_RGE[start : start + length], v_RGE[start : start + length]
        queries = q[a:b].permute(1, 2, 0, 3).reshape(G, -1, E)  # [G, N/G * a, E]
        scores = (queries @ keys.permute(1, 2, 0)).view(G, N // G, b - a, length)
        future = torch.arange(length, device=active.device) > (active[a:b] - start)[:, None]
        scores = scores.masked_fill(future, float("-inf"))
        share = torch.softmax(torch.cat((scores, diagonal[a:b].permute(1, 2, 0, 3)), -1), -1)
        out = share[..., :length].reshape(G, -1, length) @ values.permute(1, 0, 2)
        outs.append(out.view(G, N // G, b - a, E).permute(2, 0, 1, 3))
        shares.append(share[..., length:].permute(2, 0, 1, 3))
    if not outs:
        return q.reshape(A, N * E)
    out = torch.cat(outs)
    share = torch.cat(shares)
    for i, (_, v) in enumerate(own):
        out = out + share[..., i, None] * v[:, :, None]
    return out.reshape(A, N * E)


@dataclasses.dataclass
class Sums:
    """What is added up over the batches of a step or an evaluation; every field is a float64 [S] on the CPU."""

    loss: torch.Tensor  # cross entropy over learned rows
    learned: torch.Tensor  # rows
    supervised: torch.Tensor  # rows
    correct: torch.Tensor  # supervised rows where the draft's first choice is the target's
    chains: torch.Tensor  # rows supervised at steps 0..i and right at steps 0..i-1
    chains_correct: torch.Tensor  # of these, right at step i too

    @classmethod
    def zero(cls, steps: int) -> "Sums":
        return cls(*(torch.zeros(steps, dtype=torch.float64) for _ in dataclasses.fields(cls)))

    def __add__(self, other: "Sums") -> "Sums":
        return Sums(*(getattr(self, f.name) + getattr(other, f.name) for f in dataclasses.fields(Sums)))

    @property
    def loss_per_step(self) -> list[float]:
        return _ratio(self.loss, self.learned)

    @property
    def accuracy_per_step(self) -> list[float]:
        return _ratio(self.correct, self.supervised)

    @property
    def conditional_accuracy(self) -> list[float]:
        """a_i: right at step i, of the rows that were right at all steps before."""
        return _ratio(self.chains_correct, self.chains)

    @property
    def simulated_acceptance_length(self) -> float:
        """1 + a_0 + a_0 a_1 + ...: tokens a verification round, with the target's bonus token, as SGLang counts them."""
        length, reached = 1.0, 1.0
        for share in self.conditional_accuracy:
            reached *= share
            length += reached
        return length


def _ratio(above: torch.Tensor, below: torch.Tensor) -> list[float]:
    return (above / below.clamp(min=1)).tolist()


@dataclasses.dataclass(frozen=True)
class Graded:
    """Result of a forward: `total` carries the gradient; `not_finite` names documents with a NaN or inf in their loss."""

    total: torch.Tensor
    sums: Sums
    not_finite: list[str]


def grade(draft: Draft, exam: Exam, teacher: Teacher, weights: torch.Tensor) -> Graded:
    """The loss of a batch: sum over steps and rows of weights [S, R] times cross entropy."""
    states = ttt_hidden(draft, exam.batch, exam.supervised)
    picks = [(i, rows, exam.supervised[i, rows].nonzero().squeeze(1)) for i, (rows, _) in enumerate(states)]
    hidden = torch.cat([states[i][1][pick] for i, _, pick in picks])
    rows_of = [rows[pick] for _, rows, pick in picks]
    entry = torch.cat([rows + i for i, rows in enumerate(rows_of)])
    place = exam.batch.mask.cumsum(0) - 1  # of an entry among the supervised ones
    losses = soft_cross_entropy(
        draft.norm(hidden),
        draft.lm_head.weight,
        teacher.probabilities(exam.batch.last[exam.batch.mask]),
        place[entry],
        torch.cat([weights[i, rows] for i, rows in enumerate(rows_of)]),
    )
    right = torch.zeros_like(exam.supervised)
    sums = Sums.zero(len(states))
    parts = losses.cross_entropy.split([len(rows) for rows in rows_of])
    for i, (rows, loss) in enumerate(zip(rows_of, parts, strict=True)):
        sums.loss[i] = loss[exam.learned[i, rows]].double().sum()
    where = torch.cat([rows + i * exam.batch.rows for i, rows in enumerate(rows_of)])
    right.view(-1)[where] = losses.predicted == exam.truth[entry]
    _count(sums, exam, right)
    bad = where[~losses.cross_entropy.isfinite()] % max(exam.batch.rows, 1)
    return Graded(losses.total, sums, _owners(exam.batch, bad))


def _count(sums: Sums, exam: Exam, right: torch.Tensor) -> None:
    on_chain = torch.ones_like(right[0])
    for i in range(len(right)):
        on_chain = on_chain & exam.supervised[i]
        sums.learned[i] = exam.learned[i].sum()
        sums.supervised[i] = exam.supervised[i].sum()
        sums.correct[i] = right[i].sum()
        sums.chains[i] = on_chain.sum()
        on_chain = on_chain & right[i]
        sums.chains_correct[i] = on_chain.sum()


def _owners(batch: Batch, rows: torch.Tensor) -> list[str]:
    ends = torch.tensor(batch.lengths).cumsum(0)
    owners = torch.searchsorted(ends, rows.unique().cpu(), right=True)
    return [batch.sample_ids[k] for k in owners.unique().tolist()]
