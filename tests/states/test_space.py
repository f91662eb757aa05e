import subprocess

import pytest

from eagle3_helpers.errors import CheckRefused
from eagle3_helpers.states.space import forecast


def verdicts(checks):
    return {item["check"]: item["ok"] for item in checks.items}


def test_the_forecast_shows_need_speed_and_time_and_leaves_nothing_behind(tmp_path):
    checks = forecast(tmp_path / "data" / "tiny", 1000, 57344, reserve=0, files=10)
    assert checks.ok
    assert "57.34 MB" in repr(checks) and "B/s" in repr(checks) and f"{tmp_path} decides" in repr(checks)
    assert list(tmp_path.iterdir()) == []


def test_space_is_checked_where_a_link_leads(tmp_path, small_disk):
    disk = small_disk("size=1m")
    (tmp_path / "data").symlink_to(disk)
    assert forecast(tmp_path / "data" / "tiny", 10, 50_000, reserve=0).ok
    checks = forecast(tmp_path / "data" / "tiny", 10, 50_000, reserve=600_000)
    assert verdicts(checks)["free space"] is False
    with pytest.raises(CheckRefused, match=r"1\.05 MB free \(expected 500\.00 kB .* \+ 600\.00 kB reserve\)"):
        checks.require()


def test_too_few_inodes_and_a_read_only_volume_are_refused(small_disk):
    disk = small_disk("size=1m,nr_inodes=20")
    assert verdicts(forecast(disk / "tiny", 10, 1000, reserve=0, files=100))["free inodes"] is False
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    with pytest.raises(CheckRefused, match=f"writable: {disk}: Read-only"):
        forecast(disk / "tiny", 10, 1000, reserve=0).require()
