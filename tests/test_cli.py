"""The command, in this process: exit codes, sentences, new-params and freeze-table."""

import json
import sys
from pathlib import Path

import pytest
import yaml
from filelock import Timeout

from eagle3_helpers import cli, runs
from eagle3_helpers.draft.freeze import freeze_table
from eagle3_helpers.draft.model import DraftConfig
from eagle3_helpers.params import load_params
from eagle3_helpers.target import Target

KIMI = Path(__file__).resolve().parents[1] / "params" / "kimi_k2.yaml"


@pytest.fixture
def command(monkeypatch, capsys):
    """command(*words) -> (exit code, stdout, stderr)"""

    def call(*words) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["eagle3-runbook", *map(str, words)])
        with pytest.raises(SystemExit) as left:
            cli.main()
        return (left.value.code or 0, *capsys.readouterr())

    return call


@pytest.mark.parametrize(
    "setting", ["training.lr=[1", "run_id=!!python/name:os.system", "run_id=2024-13-45", "a=&b [*b"]
)
def test_a_setting_that_is_no_yaml_exits_2_with_a_sentence(command, setting):
    code, _, said = command("run", "-p", KIMI, "--set", setting)
    assert code == 2
    assert f"--set {setting!r} is not YAML" in said


def test_a_setting_without_a_value_exits_2(command):
    assert command("run", "-p", KIMI, "--set", "training.lr")[0] == 2


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (PermissionError(13, "Permission denied", "/x/outputs"), 4, "/x/outputs: Permission denied."),
        (OSError(28, "No space left on device"), 4, "No space left on device."),
        (OSError("the hub cannot be reached"), 4, "the hub cannot be reached."),
        (Timeout("/x/lock"), 4, "another process holds /x/lock."),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_what_the_machine_refuses_is_a_sentence_and_an_exit_code(command, monkeypatch, error, code, words):
    def fail(run_id):
        raise error

    monkeypatch.setattr(runs, "reopen_run", fail)
    found, _, said = command("status", "--run", "x")
    assert found == code
    assert words in said


def new_params(command, path) -> tuple[int, str, str]:
    options = ("--target=t", "--conversations=c", "--prompts=p", "--data-root=d")
    return command("new-params", path, *options)


def test_new_params_writes_where_it_is_called_and_says_the_absolute_path(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, said, _ = new_params(command, "my folder/mine.yaml")
    path = tmp_path / "my folder" / "mine.yaml"
    assert code == 0
    assert said == f"{path} written; next: eagle3-runbook run -p '{path}'\n"
    assert load_params(path).run_id == "mine"
    code, _, said = new_params(command, path)
    assert (code, f"{path} exists" in said) == (2, True)


def test_new_params_refuses_a_name_that_names_no_run_and_leaves_no_file(command, tmp_path):
    code, _, said = new_params(command, tmp_path / "my params.yaml")
    assert code == 2
    assert "nothing written" in said and "run_id = 'my params'" in said
    assert list(tmp_path.iterdir()) == []


def test_the_kimi_preset_has_its_published_numbers_without_its_model(command):
    code, said, _ = command("freeze-table", "-p", KIMI, "--json")
    table = json.loads(said)
    assert (code, table["trainable"], table["frozen"]) == (0, 1190948864, 1174405120)
    assert table["memory"]["gradients"] == 4 * 1190948864
    code, said, _ = command("freeze-table", "-p", KIMI)
    assert code == 0
    assert "trainable 1,190,948,864; frozen 1,174,405,120" in said
    assert "57,344 bytes a token" in said


def test_the_kimi_preset_with_8_key_value_heads_and_its_states():
    params = load_params(KIMI, {"draft.num_key_value_heads": 8, "draft.expect_trainable": 985427968})
    target = Target(params.target)
    table = freeze_table(DraftConfig.from_params(params.draft, target), params.draft)
    assert (table.trainable, table.frozen) == (985427968, 1174405120)
    assert round(87.8e6 * target.bytes_per_token / 1e12, 2) == 5.03


def test_a_freeze_table_of_a_target_that_is_nowhere_exits_2(command, tmp_path):
    values = yaml.safe_load(KIMI.read_text())
    del values["target"]["shape"]
    (tmp_path / "p.yaml").write_text(yaml.safe_dump(values))
    code, _, said = command("freeze-table", "-p", tmp_path / "p.yaml")
    assert (code, "/models/Kimi-K2-Instruct does not exist" in said) == (2, True)
