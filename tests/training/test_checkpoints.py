import errno

import pytest
import torch

from eagle3_helpers.errors import StageFailed
from eagle3_helpers.training import checkpoints as module
from eagle3_helpers.training.checkpoints import Checkpoints, damage

WEIGHTS, MOMENTS = {"w": torch.arange(4.0)}, {"w.exp_avg": torch.ones(4)}


@pytest.fixture
def three(tmp_path) -> Checkpoints:
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    for step in (2, 4, 10):
        checkpoints.save(step, WEIGHTS, MOMENTS, {"step": step})
    return checkpoints


def test_what_was_saved_comes_back_bit_for_bit(three):
    newest, passed = three.newest()
    assert (newest.step, passed) == (10, [])
    assert newest.state == {"step": 10}
    assert torch.equal(newest.weights()["w"], WEIGHTS["w"])
    assert torch.equal(newest.moments()["w.exp_avg"], MOMENTS["w.exp_avg"])


def test_newest_is_by_number_and_not_by_name_or_time(three):
    three.save(1_000_000, WEIGHTS, MOMENTS, {"step": 1_000_000})
    three.save(5, WEIGHTS, MOMENTS, {"step": 5})
    assert three.newest()[0].step == 1_000_000


@pytest.mark.parametrize("name", ["draft.safetensors", "optimizer.safetensors", "state.json"])
def test_one_flipped_byte_passes_a_checkpoint_over_and_names_the_file(three, name):
    path = three.path(10) / name
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)
    newest, [(folder, why)] = three.newest()
    assert (newest.step, folder.name) == (4, "step-000010")
    assert name in why


def test_a_folder_without_its_marker_is_passed_over_and_kept_aside(three):
    (three.path(10) / "complete.json").unlink()
    newest, [(folder, why)] = three.newest()
    assert newest.step == 4
    assert "cut short" in why
    aside = three.set_aside(folder)
    assert (aside / "draft.safetensors").is_file()
    assert three.newest() == (newest, [])


def test_a_missing_file_is_named(three):
    (three.path(10) / "optimizer.safetensors").unlink()
    assert damage(three.path(10)).startswith("optimizer.safetensors: ")


def test_pruning_keeps_the_newest_and_the_best_and_touches_nothing_unmarked(three, tmp_path):
    half = three.path(1)
    half.mkdir()
    (tmp_path / "checkpoints" / "notes").mkdir()
    assert three.prune(keep=1, best=2) == [4]
    assert sorted(path.name for path in three.folder.iterdir()) == [
        "notes",
        "step-000001",
        "step-000002",
        "step-000010",
    ]
    assert three.prune(keep=2, best=None) == []


def test_a_full_disk_leaves_the_older_checkpoint_and_nothing_half_written_and_says_what_to_do(three, monkeypatch):
    whole = module.write_bytes

    def full(path, content):
        if path.name == "optimizer.safetensors":
            raise OSError(errno.ENOSPC, "No space left on device")
        whole(path, content)

    monkeypatch.setattr(module, "write_bytes", full)
    with pytest.raises(StageFailed, match="No space left"):
        three.save(12, WEIGHTS, MOMENTS, {"step": 12})
    newest, passed = three.newest()
    assert (newest.step, passed) == (10, [])
    assert not three.path(12).exists()


def test_a_full_disk_does_not_make_us_remove_a_folder_that_was_there_before(three, monkeypatch):
    (three.path(12)).mkdir()
    (three.path(12) / "notes").write_text("of somebody")

    def full(path, content):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "write_bytes", full)
    with pytest.raises(StageFailed, match="No space left"):
        three.save(12, WEIGHTS, MOMENTS, {"step": 12})
    assert (three.path(12) / "notes").read_text() == "of somebody"


def test_the_newest_spec_is_that_of_the_newest_folder_with_a_marker(three):
    assert Checkpoints(three.folder / "none").newest_spec() is None
    three.save(11, WEIGHTS, MOMENTS, {"step": 11, "spec": {"a": 1}})
    three.save(12, WEIGHTS, MOMENTS, {"step": 12, "spec": {"a": 2}})
    assert three.newest_spec() == {"a": 2}
    (three.path(12) / "complete.json").unlink()
    assert three.newest_spec() == {"a": 1}
