"""What cannot be meant, or cannot work, is refused in one sentence, before weights are loaded, with nothing half-written."""

import os
import subprocess

import pytest

from tests.makers import make_conversations, make_target, write_jsonl


def refused(done, code: int, *words: str) -> None:
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    assert [word for word in words if word not in done.stderr] == [], done.stderr


def test_params_faults_exit_2_with_a_sentence(home):
    refused(
        home.run("bad", "--set", "training.epohcs=3"), 2, "training.epohcs is not a known name. Did you mean epochs?"
    )
    refused(home.run("bad", "--set", "training.lr=1e-4"), 2, "training.lr is the text '1e-4', not a number")
    refused(home.run("bad", "--from", "extrakt"), 2, "unknown stage 'extrakt'", "02_extract")
    refused(home.run("bad", "--from", "train", "--to", "extract"), 2, "comes after")
    refused(home.call("status", "--run", "absent"), 2, "no run 'absent'")
    assert not home.out("bad").exists()


def test_a_missing_model_folder_exits_2_and_writes_nothing(home):
    refused(home.run("bad", "--set", "target.path=/no/such/model"), 2, "/no/such/model does not exist")
    assert not home.out("bad").exists()


def test_a_target_with_too_few_layers_needs_explicit_boundaries(home, tmp_path):
    make_target(tmp_path / "shallow", layers=6)
    refused(home.run("bad", "--set", f"target.path={tmp_path / 'shallow'}"), 2, "[2, 3, 3]", "target.boundaries")
    refused(home.run("bad", "--set", "target.boundaries=[2, 9, 11]"), 2, "target.boundaries [2, 9, 11]", "0..7")
    assert not home.out("bad").exists()


def test_a_cut_config_of_the_target_exits_2(home, tmp_path):
    folder = make_target(tmp_path / "cut")
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text[: len(text) // 2])
    refused(home.run("bad", "--set", f"target.path={folder}"), 2, f"{folder / 'config.json'} is damaged")
    assert not home.out("bad").exists()


def test_outputs_that_cannot_be_written_exit_4(home, small_volume):
    subprocess.run(["mount", "-o", "remount,ro", small_volume], check=True)
    home_there = {**home.environment, "EAGLE3_RUNBOOK_HOME": str(small_volume)}
    done = subprocess.run(
        home.command("run", "-p", home.params), env=home_there, capture_output=True, text=True, timeout=240
    )
    refused(done, 4, str(small_volume / "outputs"), "Read-only file system")


def test_an_empty_data_file_exits_4(home, tmp_path):
    empty = write_jsonl(tmp_path / "empty.jsonl", [])
    done = home.run("empty", "--to", "extract", "--set", f"samples.conversations={empty}")
    refused(done, 4, "holds no rows")
    assert home.receipt("empty", "02_extract") is None


def test_a_missing_data_file_exits_2(home):
    done = home.run("nodata", "--to", "extract", "--set", "samples.conversations=/no/such.jsonl")
    refused(done, 2, "/no/such.jsonl is not a file")


def test_a_chat_template_that_supervises_nothing_stops_after_the_first_conversations(home, tmp_path):
    folder = make_target(tmp_path / "mute")
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages if message.role == 'user' %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}"
    )
    data = make_conversations(tmp_path / "many.jsonl", count=40)
    settings = {"target.path": folder, "samples.conversations": data, "store.name": "mute"}
    done = home.run("mute", "--to", "extract", *(f"--set={name}={value}" for name, value in settings.items()))
    refused(done, 4, "the first 32 conversations gave no supervised token with the chat template of", str(folder))
    assert not (home.folder / "data" / "mute").exists()


def test_a_target_without_a_chat_template_exits_2(home, tmp_path):
    folder = make_target(tmp_path / "base")
    (folder / "chat_template.jinja").unlink()
    done = home.run("base", "--to", "extract", "--set", f"target.path={folder}", "--set", "store.name=base")
    refused(done, 2, "no chat template")


def test_a_data_root_that_is_not_there_exits_4(home):
    refused(home.run("noroot", "--set", "store.data_root=/no/such/volume"), 4, "/no/such/volume does not exist")


@pytest.fixture
def small_volume(tmp_path):
    """A real filesystem of 4 MB."""
    folder = tmp_path / "volume"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_read_only_data_root_exits_4(home, small_volume):
    subprocess.run(["mount", "-o", "remount,ro", small_volume], check=True)
    refused(home.run("readonly", "--set", f"store.data_root={small_volume}"), 4, "Read-only file system")
    assert os.listdir(small_volume) == []


def test_too_little_disk_exits_4_before_the_target_is_loaded(home, small_volume):
    done = home.run(
        "full", "--to", "extract", "--set", f"store.data_root={small_volume}", "--set", "store.reserve_gb=0.0035"
    )
    refused(done, 4, "free space")
    assert list(small_volume.rglob("*.safetensors.*")) == []
    assert not list((small_volume / "tiny" / "states").rglob("*.safetensors"))
