import pytest
import torch

from eagle3_helpers.training.batches import Order, hold_out, micro_batches, pack, steps_per_epoch
from tests.training.tiny import tiny_document

IDS = [f"{number:016x}" for number in range(10)]


def test_rows_are_fed_and_asked_one_token_later_than_they_read():
    first, second = tiny_document("a", 5, 2), tiny_document("b", 4, 1)
    batch = pack([first, second])
    assert batch.lengths == [4, 3]
    assert torch.equal(batch.aux, torch.cat([first.aux[:4], second.aux[:3]]))
    assert batch.tokens.tolist() == [*first.input_ids[1:].tolist(), *second.input_ids[1:].tolist()]
    assert torch.equal(batch.last, torch.cat([first.last[1:], second.last[1:]]))
    assert batch.positions.tolist() == [0, 1, 2, 3, 0, 1, 2]


def test_a_row_is_supervised_by_the_mask_of_the_token_it_is_fed_and_never_beyond_its_document():
    table = pack([tiny_document("a", 5, 2), tiny_document("b", 4, 1)]).supervised(3)
    assert table.int().tolist() == [
        [0, 1, 1, 1, 1, 1, 1],
        [1, 1, 1, 0, 1, 1, 0],
        [1, 1, 0, 0, 1, 0, 0],
    ]


def test_documents_shorter_than_the_steps_do_not_leak_into_the_next():
    assert pack([tiny_document("a", 2, 0), tiny_document("b", 3, 0)]).supervised(3).int().tolist() == [
        [1, 1, 1],
        [0, 1, 0],
        [0, 0, 0],
    ]


@pytest.mark.parametrize(("max_rows", "expected"), [(1, [[11], [6], [8]]), (17, [[11, 6], [8]]), (99, [[11, 6, 8]])])
def test_micro_batches_keep_order_and_cut_no_document(max_rows, expected):
    documents = [tiny_document("a", 12, 5), tiny_document("b", 7, 1), tiny_document("c", 9, 9)]
    assert [batch.lengths for batch in micro_batches(documents, max_rows)] == expected


def test_every_epoch_uses_every_sample_once_in_another_order_and_steps_on_the_rest():
    order = Order(IDS, seed=3, samples_per_step=4)
    assert order.steps_per_epoch == steps_per_epoch(10, 4) == 3
    epochs = [[order.step(3 * epoch + place)[2] for place in range(3)] for epoch in range(2)]
    for epoch in epochs:
        assert [len(ids) for ids in epoch] == [4, 4, 2]
        assert sorted(name for ids in epoch for name in ids) == IDS
    assert epochs[0] != epochs[1]
    assert order.step(4)[:2] == (1, 4)


def test_the_order_depends_on_seed_and_epoch_alone():
    assert Order(IDS[::-1], 3, 4).step(5) == Order(IDS, 3, 4).step(5)
    assert Order(IDS, 4, 4).step(5) != Order(IDS, 3, 4).step(5)


def test_held_out_samples_stay_held_out_when_others_are_added():
    few = hold_out(IDS[2:], 0.25)
    assert few == IDS[2:4]
    assert set(hold_out([*IDS, "ffff"], 0.4)) >= set(few)
    assert hold_out(IDS, 0.001) == IDS[:1]
    assert hold_out(IDS, 0.0) == hold_out(IDS[:1], 0.5) == []
