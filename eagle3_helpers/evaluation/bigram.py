"""The simplest draft: after each token, the token that most often follows it in the training text.

A trained draft that does not beat this table has learned nothing that needs hidden states. The table is counted on
supervised tokens only (what the target wrote), and judged with the same arithmetic as the draft: because greedy
verification always yields the target's own answer, replaying that answer gives the counts without a forward.
"""

import numpy as np

from eagle3_helpers.errors import CheckRefused

BLOCK = 4_000_000  # pairs held before they are merged into counts: a table of 88 million tokens needs little memory


def count_bigram(samples, vocab_size: int) -> np.ndarray:
    """int64 [V]: the most frequent supervised successor of each token (the lower id on a tie).

    A token that was never followed by a supervised one gets the most frequent supervised token. `samples` is a
    SampleTable. Raises CheckRefused where nothing is supervised.
    """
    pairs, counts = np.zeros(0, np.int64), np.zeros(0, np.int64)
    block: list[np.ndarray] = []
    held = 0
    for sample_id in samples.sample_ids:
        ids = np.asarray(samples.input_ids(sample_id), np.int64)
        follows = np.flatnonzero(np.asarray(samples.loss_mask(sample_id))[1:])
        block.append(ids[follows] * vocab_size + ids[follows + 1])
        held += len(follows)
        if held > BLOCK:
            pairs, counts = _merge(pairs, counts, block)
            block, held = [], 0
    pairs, counts = _merge(pairs, counts, block)
    if not len(pairs):
        raise CheckRefused("the samples have no supervised token, so there is no bigram table.", "Look at the masks.")
    before, after = pairs // vocab_size, pairs % vocab_size
    totals = np.bincount(after, weights=counts, minlength=vocab_size)
    following = np.full(vocab_size, int(totals.argmax()), np.int64)
    order = np.lexsort((after, -counts, before))
    first = order[np.flatnonzero(np.diff(before[order], prepend=-1))]
    following[before[first]] = after[first]
    return following


def _merge(pairs: np.ndarray, counts: np.ndarray, block: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    new, new_counts = np.unique(np.concatenate([*block, np.zeros(0, np.int64)]), return_counts=True)
    merged, place = np.unique(np.concatenate([pairs, new]), return_inverse=True)
    return merged, np.bincount(place, np.concatenate([counts, new_counts]), len(merged)).astype(np.int64)


def replay(following: np.ndarray, answer: list[int], draft_tokens: int) -> int:
    """Verification steps that chains of `draft_tokens` from the table would need for `answer`.

    Counted as `reference.decode` counts: the answer's first token comes from the prompt's forward and needs no step.
    """
    known, steps = 1, 0
    while known < len(answer):
        drafted, accepted = answer[known - 1], 0
        while accepted < draft_tokens and known + accepted < len(answer):
            drafted = int(following[drafted])
            if drafted != answer[known + accepted]:
                break
            accepted += 1
        known += accepted + 1
        steps += 1
    return steps
