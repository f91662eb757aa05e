"""The command with real kernels, a real tiny target and real signals: what an operator sees, exit code by exit code."""

import json
import os
import re
import signal

import psutil
import pytest

from eagle3_helpers.stages import STAGES
from tests.conftest import until
from tests.makers import make_conversations

NAMES = [stage.name for stage in STAGES]


def contents(folder) -> dict:
    """{path: (time of change, bytes)} of every file that a second run must leave alone."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "events.jsonl"]
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


@pytest.fixture(scope="module")
def planned(home):
    """A run that stopped at the gate, and what it said."""
    return home.run("whole")


def test_without_an_approval_it_stops_before_training_and_says_which_command_approves(home, planned):
    assert planned.returncode == 3, planned.stdout + planned.stderr
    digest = home.digest_of_plan("whole")
    assert f"eagle3-runbook approve --run whole --digest {digest}" in planned.stderr
    assert [name for name in NAMES if home.receipt("whole", name)] == NAMES[:4]
    assert not (home.out("whole") / "training" / "process.json").exists()


def test_only_the_digest_of_the_present_plan_can_be_approved(home, planned):
    who = ["--name", "Ada", "--reason", "read it"]
    other = home.call("approve", "--run", "whole", "--digest", "0" * 64, *who)
    assert other.returncode == 4
    assert home.digest_of_plan("whole") in other.stderr
    short = home.call("approve", "--run", "whole", "--digest", home.digest_of_plan("whole")[:12], *who)
    assert short.returncode == 2
    assert home.run("whole").returncode == 3


@pytest.fixture(scope="module")
def finished(home, planned):
    """The same run, approved by digest and run to its end."""
    digest = home.digest_of_plan("whole")
    approved = home.call("approve", "--run", "whole", "--digest", digest, "--name", "Ada", "--reason", "read it")
    assert approved.returncode == 0, approved.stderr
    return home.run("whole")


def test_an_approved_run_goes_to_its_end_with_a_receipt_of_every_stage(home, finished):
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert [name for name in NAMES if home.receipt("whole", name)] == NAMES
    assert all("nothing to do" in finished.stdout for name in NAMES[:4])
    assert (home.out("whole") / "report.html").stat().st_size > 10_000


def test_it_measures_a_draft_that_learned_and_changed_no_answer(home, finished):
    summary = json.loads((home.out("whole") / "evaluation" / "summary.json").read_text())
    assert summary["acceptance_length"] > summary["acceptance_length_untrained"]
    assert summary["lossless_mismatches"] == 0
    assert summary["n_prompts"] == 6
    low, high = summary["acceptance_interval"]
    assert low <= summary["acceptance_length"] <= high
    assert len(summary["per_position"]) == 3
    assert summary["acceptance_length_bigram"] >= 1


def test_a_second_run_changes_no_file(home, finished):
    before = contents(home.folder)
    again = home.run("whole")
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("nothing to do") == len(NAMES)
    changed = {path for path, content in contents(home.folder).items() if before.get(path) != content}
    assert changed <= {str(home.out("whole") / "report.html")}
    assert (home.out("whole") / "report.html").read_bytes() == before[str(home.out("whole") / "report.html")][1]


def shown(home, run_id: str) -> dict:
    """{stage: state} as the command `status` prints them."""
    done = home.call("status", "--run", run_id)
    assert done.returncode == 0, done.stderr
    return dict(re.findall(r"^(0\d_\w+) +(done|stale|to do|cannot tell) ", done.stdout, re.MULTILINE))


def test_status_shows_every_stage_done(home, finished):
    assert shown(home, "whole") == dict.fromkeys(NAMES, "done")


def test_evaluating_again_by_plain_papermill_leaves_the_numbers_as_they_are(home, finished, tmp_path):
    before = contents(home.out("whole") / "evaluation"), home.receipt("whole", "06_evaluate")
    done = home.papermill("06_evaluate", "whole", tmp_path / "06.ipynb")
    assert done.returncode == 0, done.stderr[-2000:]
    assert (contents(home.out("whole") / "evaluation"), home.receipt("whole", "06_evaluate")) == before


def test_a_changed_setting_makes_the_later_stages_stale_and_needs_a_new_approval(home, finished):
    skipped = home.run("whole", "--set", "training.lr=0.004", "--from", "train")
    assert skipped.returncode == 4, skipped.stdout + skipped.stderr
    assert "05_train rests on 04_inspect_freeze, which is stale (changed since: params)" in skipped.stderr
    changed = home.run("whole", "--set", "training.lr=0.004", "--to", "train")
    assert changed.returncode == 3, changed.stdout + changed.stderr
    assert "spec.training.lr 0.003 -> 0.004" in changed.stderr
    assert "03_verify: nothing to do" in changed.stdout
    assert shown(home, "whole")["06_evaluate"] == "stale"


def test_plain_papermill_gives_the_same_outputs_as_the_runner(home, planned, tmp_path):
    for name in NAMES[:4]:
        done = home.papermill(name, "plain", tmp_path / f"{name}.ipynb")
        assert done.returncode == 0, done.stderr[-2000:]
    for name, outputs in (("02_extract", None), ("04_inspect_freeze", ["freeze_table.json"])):
        plain, ours = home.receipt("plain", name)["outputs"], home.receipt("whole", name)["outputs"]
        assert {key: plain[key] for key in outputs or plain} == {key: ours[key] for key in outputs or ours}
    refused = home.papermill("05_train", "plain", tmp_path / "05.ipynb")
    assert refused.returncode == 1
    assert "eagle3-runbook approve --run plain" in refused.stderr
    assert not (home.out("plain") / "training" / "process.json").exists()


def test_an_expired_approval_is_refused(home, planned):
    short = ["--set", "gate.approval_hours=1.0e-7"]
    assert home.run("late", *short).returncode == 3
    digest = home.digest_of_plan("late")
    assert home.call("approve", "--run", "late", "--digest", digest, "--name", "A", "--reason", "r").returncode == 0
    late = home.run("late", *short)
    assert late.returncode == 3
    assert "expired" in late.stderr


def test_a_file_cut_short_after_it_was_verified_is_found_and_done_again(home):
    own = ["--to", "verify", "--set", "store.name=mended"]
    assert home.run("mended", *own).returncode == 0
    victim = sorted((home.folder / "data" / "mended" / "states").glob("*/*.safetensors"))[0]
    os.truncate(victim, 100)
    assert shown(home, "mended") == dict.fromkeys(NAMES[:3], "stale") | dict.fromkeys(NAMES[3:], "to do")
    again = home.run("mended", *own)
    assert again.returncode == 0, again.stdout + again.stderr
    assert home.receipt("mended", "01_recover")["quarantined"] == 1
    assert [event["samples"] for event in home.events("mended", "capture done")] == [24, 1]
    assert shown(home, "mended") == dict.fromkeys(NAMES[:3], "done") | dict.fromkeys(NAMES[3:], "to do")


LONG = ["--set", "training.epochs=80", "--set", "training.checkpoint_every=10", "--set", "training.evaluate_every=100"]


def steps_done(home, run_id) -> int:
    path = home.out(run_id) / "training" / "metrics.jsonl"
    return path.read_text().count('"loss"') if path.exists() else 0


def trainer(home, run_id) -> psutil.Process:
    return psutil.Process(json.loads((home.out(run_id) / "training" / "process.json").read_text())["pid"])


def test_training_goes_on_when_the_runner_is_terminated_and_a_fresh_run_attaches(home):
    runner = home.start("left", "--approve-as", "Ada", *LONG)
    until(lambda: steps_done(home, "left") > 5)
    process = trainer(home, "left")
    runner.send_signal(signal.SIGTERM)
    said = runner.communicate(timeout=60)[0]
    assert runner.returncode == 143, said
    assert process.is_running()
    assert home.receipt("left", "05_train") is None
    again = home.run("left", "--to", "train", *LONG)
    assert again.returncode == 0, again.stdout + again.stderr
    assert len(home.events("left", "trainer launched")) == 1
    assert home.receipt("left", "05_train")


def test_a_killed_trainer_needs_a_new_approval_and_resumes_from_its_checkpoint(home):
    runner = home.start("killed", "--approve-as", "Ada", *LONG)
    until(lambda: steps_done(home, "killed") > 25)
    trainer(home, "killed").kill()
    said = runner.communicate(timeout=60)[0]
    assert runner.returncode == 1, said
    assert "resumes from the newest" in said
    used = home.run("killed", *LONG)
    assert used.returncode == 3
    assert "it counts once" in used.stderr
    resumed = home.run("killed", "--to", "train", "--approve-as", "Ada", *LONG)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    events = (home.out("killed") / "training" / "events.jsonl").read_text()
    assert '"kind": "resumed"' in events


def test_stop_asks_the_trainer_for_a_checkpoint_and_a_later_run_goes_on(home):
    runner = home.start("stopped", "--approve-as", "Ada", *LONG)
    until(lambda: steps_done(home, "stopped") > 3)
    asked = home.call("stop", "--run", "stopped", "--yes")
    assert asked.returncode == 0, asked.stderr
    said = runner.communicate(timeout=60)[0]
    assert runner.returncode == 1, said
    assert "was stopped at step" in said
    assert home.run("stopped", "--to", "train", "--approve-as", "Ada", *LONG).returncode == 0


def test_a_kernel_killed_while_it_extracts_leaves_no_receipt_and_the_next_run_does_the_rest(home, tmp_path):
    data = make_conversations(tmp_path / "many.jsonl", count=400)
    many = ["--set", f"samples.conversations={data}", "--set", "store.name=many", "--set", "capture.batch_tokens=100"]
    runner = home.start("crash", "--to", "extract", *many)
    states = home.folder / "data" / "many" / "states"
    until(lambda: sum(1 for _ in states.glob("*/*.safetensors")) > 20)
    kernel = home.events("crash", "stage started")[-1]["pid"]
    os.kill(kernel, signal.SIGKILL)
    said = runner.communicate(timeout=60)[0]
    assert runner.returncode == 1, said
    assert "its kernel was killed" in said
    assert home.receipt("crash", "02_extract") is None
    stored = {path: path.stat().st_mtime_ns for path in states.glob("*/*.safetensors") if not path.name.startswith(".")}
    again = home.run("crash", "--to", "verify", *many)
    assert again.returncode == 0, again.stdout + again.stderr
    assert home.receipt("crash", "01_recover")["interrupted"] == ["02_extract-1"]
    receipt = home.receipt("crash", "02_extract")
    assert receipt["stored_before"] == len(stored)
    assert receipt["stored_before"] + receipt["stored_now"] == 400
    assert {path: path.stat().st_mtime_ns for path in stored} == stored
