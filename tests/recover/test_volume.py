import os
from pathlib import Path

import pytest

from eagle3_helpers.errors import CheckRefused
from eagle3_helpers.recover.volume import check_volumes, describe_volumes, look_at


def test_a_link_is_followed_to_where_the_bytes_go(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    volume = look_at("data root", tmp_path / "link")
    assert volume.resolved == volume.there == (tmp_path / "real").resolve()
    assert volume.write_error == ""
    assert list((tmp_path / "real").iterdir()) == []  # the probe is gone


def test_sizes_and_inodes_are_those_of_the_filesystem(tmp_path):
    volume, size = look_at("x", tmp_path), os.statvfs(tmp_path)
    assert volume.total == size.f_blocks * size.f_frsize
    assert volume.total_inodes == size.f_files
    assert 0 < volume.free <= volume.total
    assert tmp_path.is_relative_to(volume.mount)
    assert look_at("x", Path("/proc/self")).mount == "/proc"
    assert look_at("x", Path("/proc/self")).filesystem == "proc"


def test_a_folder_that_is_not_there_yet_is_looked_at_where_it_would_be(run, tmp_path):
    volume = look_at("x", tmp_path / "not" / "yet")
    assert volume.there == tmp_path.resolve()
    assert "data (not there yet)" in repr(describe_volumes(run))


def test_a_good_pair_of_volumes_passes(run, tmp_path):
    (tmp_path / "data").mkdir()
    checks = check_volumes(run)
    assert checks.ok, checks
    names = [item["check"] for item in checks.items]
    assert names[:3] == ["data root is there", "data root can be written", "data root has room"]


def test_a_data_root_that_does_not_exist_stops(run, tmp_path):
    with pytest.raises(CheckRefused, match=f"{tmp_path / 'data'} does not exist"):
        check_volumes(run).require()


def test_a_data_root_that_takes_no_file_stops_with_the_reason(run):
    run.params = run.params.model_copy(update={"store": run.params.store.model_copy(update={"data_root": "/proc"})})
    with pytest.raises(CheckRefused, match=r"data root can be written: no: .*;") as refusal:
        check_volumes(run).require()
    assert "findmnt" in refusal.value.remedy


def test_less_free_than_the_reserve_stops(run):
    run.params = run.params.model_copy(update={"store": run.params.store.model_copy(update={"reserve_gb": 1e9})})
    with pytest.raises(CheckRefused, match=r"data root has room: .* \(expected more than 1000000.00 TB\)"):
        check_volumes(run).require()
