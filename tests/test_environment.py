"""environment.yml is pyproject.toml with reasons: name by name and range by range."""

import re
import tomllib
from pathlib import Path

import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]


def pyproject_requirements() -> dict:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    found = [Requirement(text) for text in [*project["dependencies"], *extras["demo"], *extras["test"]]]
    return {requirement.name: requirement.specifier for requirement in found}


def test_its_pip_part_is_the_projects_requirements():
    parts = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    listed = [Requirement(text) for part in parts if isinstance(part, dict) for text in part["pip"]]
    assert len({requirement.name for requirement in listed}) == len(listed)
    assert {requirement.name: requirement.specifier for requirement in listed} == pyproject_requirements()


def test_every_pip_package_has_its_reason():
    lines = (ROOT / "environment.yml").read_text().split("- pip:")[1].splitlines()
    packages = [line for line in lines if line.strip().startswith("- ")]
    assert packages
    assert [line for line in packages if not re.search(r"  # \S+", line)] == []


def test_its_python_is_the_projects():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (
        f"python{project['requires-python']}" in yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    )
