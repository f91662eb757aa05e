import subprocess
import sys

import pytest
import yaml

from eagle3_helpers.params import load_params
from eagle3_helpers.runs import Run
from tests.makers import params_values


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run whose params point into tmp_path; target and data are not needed here."""
    monkeypatch.setenv("EAGLE3_RUNBOOK_HOME", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    path = tmp_path / "params.yaml"
    path.write_text(yaml.safe_dump(params_values(tmp_path)))
    folder = tmp_path / "outputs" / "tiny"
    folder.mkdir(parents=True)
    return Run(folder, load_params(str(path)))


@pytest.fixture
def start():
    """start(*arguments, **options): a real process that says "ready" and lives until its input closes."""
    started = []

    def start_it(*arguments: str, **options) -> subprocess.Popen:
        process = subprocess.Popen(
            arguments,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            **{"executable": sys.executable, **options},
        )
        started.append(process)
        assert process.stdout.readline() == "ready\n"
        return process

    yield start_it
    for process in started:
        process.communicate()


WAIT = "import sys; print('ready', flush=True); sys.stdin.read()"
