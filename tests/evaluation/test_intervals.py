"""The interval is of the ratio of sums, over prompts, and reproducible."""

import numpy as np
import pytest

from eagle3_helpers.errors import CheckRefused
from eagle3_helpers.evaluation import intervals
from eagle3_helpers.evaluation.intervals import bootstrap_interval, ratio_of_sums


def test_the_ratio_is_of_sums_not_a_mean_of_ratios():
    assert ratio_of_sums([100, 4], [50, 1]) == 104 / 51


def test_nothing_measured_is_refused_and_not_zero():
    with pytest.raises(CheckRefused, match="no prompt took a verification step"):
        ratio_of_sums([1, 1], [0, 0])


def test_the_interval_holds_the_ratio_and_narrows_with_more_prompts():
    generator = np.random.default_rng(0)
    steps = generator.integers(10, 40, 400)
    tokens = np.round(steps * generator.normal(2.0, 0.4, 400))
    few, many = bootstrap_interval(tokens[:20], steps[:20], 1), bootstrap_interval(tokens, steps, 1)
    assert few[0] < ratio_of_sums(tokens[:20], steps[:20]) < few[1]
    assert many[0] < ratio_of_sums(tokens, steps) < many[1]
    assert many[1] - many[0] < 0.5 * (few[1] - few[0])


def test_the_interval_is_that_of_the_normal_approximation_for_equal_steps():
    tokens = np.random.default_rng(2).normal(30, 3, 200)
    low, high = bootstrap_interval(tokens, np.full(200, 10), 0, resamples=8000)
    half = 1.96 * tokens.std() / np.sqrt(200) / 10
    assert abs((high - low) / 2 - half) < 0.05 * half


def test_equal_seeds_give_equal_bounds_at_any_block_size(monkeypatch):
    tokens, steps = list(range(10, 40)), list(range(5, 35))
    bounds = bootstrap_interval(tokens, steps, 5)
    assert bootstrap_interval(tokens, steps, 5) == bounds != bootstrap_interval(tokens, steps, 6)
    monkeypatch.setattr(intervals, "BLOCK", 100)
    assert bootstrap_interval(tokens, steps, 5) == bounds


def test_one_prompt_and_prompts_without_steps_are_no_obstacle():
    assert bootstrap_interval([20], [10], 0) == [2.0, 2.0]
    low, high = bootstrap_interval([1, 20], [0, 10], 0)
    assert 2.0 <= low <= high
