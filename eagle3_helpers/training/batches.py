"""Which samples a step trains on, and THE convention of what a row is fed, asked and weighed by.

x_t token, a_t aux state at t, y_t last (post-norm) state at t, m_t loss mask of x_t. Training-time test (TTT) has S steps.

    row t of a sample, step i:   fed x_{t+1+i}    asked softmax(head(y_{t+1+i}))    weighed by m_{t+1+i}

    t            0    1    2    3    4    5    6        prompt x_0 x_1 x_2, answer x_3 x_4 x_5 x_6
    x_t          p    p    p    A    B    C    D
    m_t          0    0    0    1    1    1    1
    step 0 fed   x_1  x_2  x_3  x_4  x_5  x_6  -        row 2 is the first round of serving: the target sampled x_3 = A, the
           mask  0    0    1    1    1    1    -        draft is fed A with a_2, and must say what follows A
    step 1 fed   x_2  x_3  x_4  x_5  x_6  -    -
           mask  0    1    1    1    1    -    -        row 1 step 0 is not trained itself, but step 1 builds on it

The hidden of row t is fc(a_t) at step 0, and its own output of step i-1 afterwards. Rows past the end (-) do not exist: a row
is fed only tokens of its own sample, however samples are packed. So tokens, last and mask are shifted by one here, when a
batch is packed, and everywhere else step i of row r simply reads entry r + i.
"""

import dataclasses
import functools

import torch


@dataclasses.dataclass(frozen=True)
class Document:
    """One sample as stored: input_ids [L] and loss_mask [L] integers, aux [L, 3H] and last [L, H] in the target's dtype."""

    sample_id: str
    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    aux: torch.Tensor
    last: torch.Tensor

    @property
    def rows(self) -> int:
        """Rows that have a token to be fed: all but the last."""
        return len(self.input_ids) - 1


@dataclasses.dataclass(frozen=True)
class Batch:
    """Documents in one line of R rows, already shifted; row r of a document that starts at s has position r - s."""

    sample_ids: list[str]
    lengths: list[int]  # rows of each document, sum R
    aux: torch.Tensor  # [R, 3H]  a_t
    tokens: torch.Tensor  # [R]     x_{t+1}
    last: torch.Tensor  # [R, H]  y_{t+1}
    mask: torch.Tensor  # [R] bool m_{t+1}
    positions: torch.Tensor  # [R]  t

    @property
    def rows(self) -> int:
        return len(self.tokens)

    def supervised(self, steps: int) -> torch.Tensor:
        """[S, R] bool: row r counts at step i if entry r + i is of its own document and its mask is set."""
        table = torch.zeros(steps, self.rows, dtype=torch.bool)
        start = 0
        for length in self.lengths:
            for i in range(min(steps, length)):
                table[i, start : start + length - i] = self.mask[start + i : start + length]
            start += length
        return table


def pack(documents: list[Document]) -> Batch:
    """Documents one after the other, tokens, last and mask shifted by one. No padding."""
    documents = [document for document in documents if document.rows > 0]
    return Batch(
        sample_ids=[document.sample_id for document in documents],
        lengths=[document.rows for document in documents],
        aux=torch.cat([document.aux[:-1] for document in documents]),
        tokens=torch.cat([document.input_ids[1:].long() for document in documents]),
        last=torch.cat([document.last[1:] for document in documents]),
        mask=torch.cat([document.loss_mask[1:].bool() for document in documents]),
        positions=torch.cat([torch.arange(document.rows) for document in documents]),
    )


def micro_batches(documents: list[Document], max_rows: int) -> list[Batch]:
    """The documents of an optimizer step in their order, cut where the next would exceed `max_rows`.

    A document longer than that makes a batch of its own: it is never cut, so the split changes no number.
    """
    groups: list[list[Document]] = []
    used = 0
    for document in documents:
        if not groups or used + document.rows > max_rows:
            groups.append([])
            used = 0
        groups[-1].append(document)
        used += document.rows
    return [pack(group) for group in groups]


def hold_out(sample_ids: list[str], fraction: float) -> list[str]:
    """The samples kept for held-out evaluation: those with the smallest ids, which are hashes of the tokens.

    So the choice needs no seed, and a sample stays held out when others are added around it. At least one where fraction > 0
    and there are two samples or more.
    """
    count = round(fraction * len(sample_ids))
    if fraction > 0 and len(sample_ids) > 1:
        count = min(max(count, 1), len(sample_ids) - 1)
    return sorted(sample_ids)[:count]


def steps_per_epoch(samples: int, samples_per_step: int) -> int:
    """Optimizer steps an epoch, the last one with what is left: no sample is dropped or repeated."""
    return -(-samples // samples_per_step)


class Order:
    """Which samples each optimizer step takes: one global permutation an epoch, from seed and epoch alone.

    It is the same on every machine and for every number of machines, in whatever order the samples are listed.
    """

    def __init__(self, sample_ids: list[str], seed: int, samples_per_step: int):
        self.sample_ids, self.seed, self.samples_per_step = sorted(sample_ids), seed, samples_per_step
        self.steps_per_epoch = steps_per_epoch(len(sample_ids), samples_per_step)

    @functools.lru_cache(maxsize=2)  # noqa: B019 (an order lives as long as its training)
    def epoch(self, epoch: int) -> list[str]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        return [self.sample_ids[k] for k in torch.randperm(len(self.sample_ids), generator=generator).tolist()]

    def step(self, step: int) -> tuple[int, int, list[str]]:
        """Of optimizer step `step`, counted from 0 over all epochs: epoch, cursor in samples at its start, sample ids."""
        epoch, place = divmod(step, self.steps_per_epoch)
        cursor = place * self.samples_per_step
        return epoch, cursor, self.epoch(epoch)[cursor : cursor + self.samples_per_step]
