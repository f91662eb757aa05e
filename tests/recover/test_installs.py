from importlib import metadata

import pytest

from eagle3_helpers.errors import CheckRefused
from eagle3_helpers.recover.installs import check_installs


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """installed(*requirements, python): a package `probe` with this metadata is installed."""

    def install(*requirements: str, python: str = ">=3.11") -> None:
        folder = tmp_path / "probe-1.0.dist-info"
        folder.mkdir()
        lines = ["Metadata-Version: 2.1", "Name: probe", "Version: 1.0", f"Requires-Python: {python}"]
        lines += [f"Requires-Dist: {requirement}" for requirement in requirements]
        (folder / "METADATA").write_text("\n".join(lines) + "\n")
        monkeypatch.syspath_prepend(str(tmp_path))

    return install


def test_the_runbook_s_own_packages_are_in_their_ranges():
    checks = check_installs()
    assert checks.ok, checks
    names = [item["check"] for item in checks.items]
    assert names[0] == "python"
    assert {"torch", "papermill", "nvidia-ml-py"} <= set(names)
    assert "gguf" not in names  # an extra


def test_a_missing_and_an_old_package_stop_with_the_command_that_mends_them(installed):
    installed("probe-absent>=2", "psutil>=99", "filelock>=3", "gone; extra == 'demo'", "gone; python_version < '3'")
    checks = check_installs("probe")
    assert [(item["check"], item["ok"]) for item in checks.items] == [
        ("python", True),
        ("probe-absent", False),
        ("psutil", False),
        ("filelock", True),
    ]
    with pytest.raises(CheckRefused, match=rf"psutil: {metadata.version('psutil')} \(expected >=99\)") as refusal:
        checks.require()
    assert "pip install 'probe-absent>=2'" in refusal.value.remedy


def test_a_python_outside_the_range_stops(installed):
    installed(python=">=99")
    assert not check_installs("probe").ok


def test_a_runbook_that_is_not_installed_stops():
    with pytest.raises(CheckRefused, match="not installed"):
        check_installs("probe-that-nobody-installed").require()
