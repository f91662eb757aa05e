"""The bigram table is counted on supervised tokens and judged with the arithmetic of the decoding."""

import numpy as np
import pytest

from eagle3_helpers.errors import CheckRefused
from eagle3_helpers.evaluation.bigram import count_bigram, replay


class Table:
    """The part of a SampleTable that counting reads."""

    def __init__(self, *samples):
        self.samples = {str(n): sample for n, sample in enumerate(samples)}
        self.sample_ids = list(self.samples)

    def input_ids(self, name):
        return np.array(self.samples[name][0], np.int32)

    def loss_mask(self, name):
        return np.array(self.samples[name][1], np.uint8)


def test_the_most_frequent_supervised_successor_wins_and_the_lower_id_on_a_tie():
    table = Table(
        ([1, 2, 1, 3, 1, 3], [0, 1, 1, 1, 1, 1]),
        ([1, 2, 1, 2, 1, 2], [0, 0, 0, 0, 0, 0]),  # not supervised: not counted
        ([4, 6, 4, 5], [0, 1, 1, 1]),
    )
    following = count_bigram(table, 8)
    assert following[[1, 2, 3, 4]].tolist() == [3, 1, 1, 5]
    assert following[[0, 5, 6, 7]].tolist() == [1, 1, 4, 1]  # never followed: the most frequent token, 1


def test_counting_in_blocks_gives_the_same_table(tiny, monkeypatch):
    whole = count_bigram(tiny.samples, 384)
    monkeypatch.setattr("eagle3_helpers.evaluation.bigram.BLOCK", 50)
    assert np.array_equal(count_bigram(tiny.samples, 384), whole)


def test_samples_without_supervision_are_refused():
    with pytest.raises(CheckRefused, match="no supervised token"):
        count_bigram(Table(([1, 2], [0, 0])), 8)


def test_replaying_counts_the_steps_of_the_decoding():
    following = np.array([1, 2, 3, 4, 0])
    assert replay(following, [0], 3) == 0  # the first token needs no step
    assert replay(following, [0, 1, 2, 3, 4], 3) == 1  # three accepted and the bonus
    assert replay(following, [0, 1, 2, 3, 4, 0], 3) == 2
    assert replay(following, [0, 2, 4, 1], 3) == 3  # nothing accepted
    assert replay(following, [0, 1, 3, 4, 2], 3) == 2  # one accepted and the bonus, twice
