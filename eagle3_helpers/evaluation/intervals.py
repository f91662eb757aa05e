"""How sure a ratio of sums is: a percentile bootstrap over prompts.

Acceptance length is sum(tokens) / sum(steps) over prompts, never the mean of per-prompt ratios: a short answer must not
weigh as much as a long one. Tokens of one prompt depend on each other, so whole prompts are drawn, with replacement.
"""

import numpy as np

from eagle3_helpers.errors import CheckRefused

BLOCK = 2_000_000  # drawn indices held at once


def ratio_of_sums(tokens, steps) -> float:
    """sum(tokens) / sum(steps). Raises CheckRefused where no step was taken: nothing was measured, which is not 0 or 1."""
    total = int(np.sum(steps))
    if total == 0:
        raise CheckRefused(
            "no prompt took a verification step, so there is no acceptance length.",
            "Raise evaluation.answer_tokens to 2 or more, or look at why every answer ends at its first token.",
        )
    return float(np.sum(tokens)) / total


def bootstrap_interval(tokens, steps, seed: int, resamples: int = 2000, level: float = 0.95) -> list[float]:
    """[low, high]: the middle `level` of the ratio over `resamples` draws of n prompts out of n.

    `tokens` and `steps` are counts, one a prompt. A draw without any step is left out. Equal arguments give equal bounds.
    """
    tokens, steps = np.asarray(tokens, np.float64), np.asarray(steps, np.float64)
    ratio_of_sums(tokens, steps)
    count = len(tokens)
    generator = np.random.default_rng(seed)
    ratios = []
    for start in range(0, resamples, max(1, BLOCK // count)):
        drawn = generator.integers(0, count, (min(max(1, BLOCK // count), resamples - start), count))
        sums = steps[drawn].sum(1)
        ratios.append((tokens[drawn].sum(1) / np.where(sums, sums, 1))[sums > 0])
    outside = (1 - level) / 2
    return [float(bound) for bound in np.quantile(np.concatenate(ratios), [outside, 1 - outside])]
