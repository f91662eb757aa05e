"""Whether the installed packages are those that the runbook was written for.

The ranges are read from the runbook's own metadata (pyproject.toml at install time), so they are written down once.
"""

import platform
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from eagle3_helpers.display import Checks

RUNBOOK = "eagle3-runbook"


def check_installs(distribution: str = RUNBOOK) -> Checks:
    """STOP for Python or a core package that is missing or outside its range. Optional extras are not looked at."""
    checks = Checks("packages")
    try:
        about = metadata.metadata(distribution)
    except metadata.PackageNotFoundError:
        return checks.add(distribution, False, "not installed", "installed", "Install it: pip install -e .")
    python = SpecifierSet(about["Requires-Python"] or "")
    checks.add(
        "python", python.contains(platform.python_version()), platform.python_version(), python, "Use that Python."
    )
    for line in metadata.requires(distribution) or []:
        needed = Requirement(line)
        if needed.marker and not needed.marker.evaluate({"extra": ""}):
            continue
        version = _installed(needed.name)
        checks.add(
            needed.name,
            version is not None and needed.specifier.contains(version, prereleases=True),
            version or "not installed",
            needed.specifier,
            f"pip install '{needed.name}{needed.specifier}'",
        )
    return checks


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
