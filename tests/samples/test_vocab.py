"""The draft vocabulary: which tokens, in which order, and that its two maps agree."""

import numpy as np
import pytest
import safetensors.torch
import torch

from eagle3_helpers.errors import BadParams, CheckRefused
from eagle3_helpers.samples.table import build_samples
from eagle3_helpers.samples.vocab import DraftVocab, choose_draft_vocab, coverage_curve, load_draft_vocab
from tests.makers import make_conversations


@pytest.fixture
def table(tmp_path, params, target):
    return build_samples(params(), target, make_conversations(tmp_path / "c.jsonl", 12))


def test_the_most_frequent_supervised_tokens_are_chosen_with_ties_to_the_smaller_id(table, target):
    counts = np.bincount(table.flat_ids[table.flat_mask == 1], minlength=384)
    special = [0, 1, 2]
    rest = sorted((token for token in range(384) if token not in special), key=lambda token: (-counts[token], token))
    vocab = choose_draft_vocab(table, 20, target)
    assert vocab.target_ids.tolist() == sorted([*special, *rest[:17]])
    assert vocab.coverage == counts[vocab.target_ids].sum() / counts.sum()
    assert torch.equal(vocab.t2d.nonzero().flatten(), vocab.d2t + torch.arange(20))
    assert (vocab.d2t.dtype, vocab.t2d.dtype, len(vocab.t2d)) == (torch.int64, torch.bool, 384)


def test_stop_and_special_tokens_are_always_in(table, target):
    target.tokenizer.add_special_tokens({"extra_special_tokens": ["<|tool|>"]})
    added = target.tokenizer.convert_tokens_to_ids("<|tool|>")
    vocab = choose_draft_vocab(table, 4, target)
    assert vocab.target_ids.tolist() == [0, 1, 2, added]
    assert set(target.stop_ids) <= set(vocab.target_ids.tolist())


def test_tokens_that_never_occur_fill_up_by_id(table, target):
    used = set(np.unique(table.flat_ids[table.flat_mask == 1]).tolist()) | {0, 1, 2}
    unused = [token for token in range(384) if token not in used]
    vocab = choose_draft_vocab(table, len(used) + 5, target)
    assert vocab.target_ids.tolist() == sorted([*used, *unused[:5]])
    assert vocab.coverage == 1


def test_the_whole_vocabulary_maps_to_itself(table, target):
    vocab = choose_draft_vocab(table, 384, target)
    assert not vocab.d2t.any() and vocab.t2d.all()


@pytest.mark.parametrize("size", [385, 0, -1, 2])
def test_a_size_that_cannot_be_is_refused_by_the_name_of_its_field(table, target, size):
    with pytest.raises(BadParams, match=rf"draft\.vocab_size {size} "):
        choose_draft_vocab(table, size, target)


def test_the_coverage_curve_is_what_each_size_would_have(table, target):
    sizes, fractions = coverage_curve(table, target, points=12)
    assert fractions.tolist() == [choose_draft_vocab(table, int(size), target).coverage for size in sizes]
    assert (sizes[0], sizes[-1], fractions[-1]) == (3, 384, 1)


def test_a_saved_vocabulary_is_loaded_as_it_was(table, target, tmp_path):
    vocab = choose_draft_vocab(table, 50, target)
    vocab.save(tmp_path / "draft_vocab.safetensors")
    loaded = load_draft_vocab(tmp_path / "draft_vocab.safetensors")
    assert torch.equal(loaded.d2t, vocab.d2t) and torch.equal(loaded.t2d, vocab.t2d)
    assert loaded.coverage == vocab.coverage
    assert repr(loaded).startswith("draft vocabulary: 50 of 384 tokens")


@pytest.mark.parametrize("d2t", [[3, 7], [0, 0], [3, 6, 0], [3, 20], [-9, 6]])
def test_a_map_of_absolute_ids_or_zeros_is_refused_on_load(tmp_path, d2t):
    t2d = torch.zeros(12, dtype=torch.bool)
    t2d[[3, 7]] = True
    good = DraftVocab(torch.tensor([3, 6]), t2d, 1.0)
    good.save(tmp_path / "good.safetensors")
    assert load_draft_vocab(tmp_path / "good.safetensors").target_ids.tolist() == [3, 7]
    DraftVocab(torch.tensor(d2t), t2d, 1.0).save(tmp_path / "bad.safetensors")
    with pytest.raises(CheckRefused, match="must hold offsets"):
        load_draft_vocab(tmp_path / "bad.safetensors")


def test_files_without_maps_or_of_other_types_are_refused(tmp_path):
    path = tmp_path / "v.safetensors"
    with pytest.raises(CheckRefused, match="cannot be read"):
        load_draft_vocab(path)
    path.write_bytes(b"\0" * 40)
    with pytest.raises(CheckRefused, match="cannot be read"):
        load_draft_vocab(path)
    safetensors.torch.save_file({"lm_head.weight": torch.zeros(2, 2)}, path)
    with pytest.raises(CheckRefused, match="d2t"):
        load_draft_vocab(path)
    safetensors.torch.save_file({"d2t": torch.zeros(2, dtype=torch.int32), "t2d": torch.zeros(4)}, path)
    with pytest.raises(CheckRefused, match=r"d2t is torch\.int32 \[2\]"):
        load_draft_vocab(path)
