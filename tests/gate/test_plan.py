import json
import os
import subprocess
import sys

import psutil
import pytest

from eagle3_helpers.durable import canonical_json, file_digest, write_json
from eagle3_helpers.errors import BadParams, CheckRefused
from eagle3_helpers.gate.approval import approve
from eagle3_helpers.gate.cost import checkpoint_bytes, estimate
from eagle3_helpers.gate.plan import build_plan, compare, plan_file, read_plan, write_plan
from eagle3_helpers.params import GateParams
from eagle3_helpers.runs import code_commit
from eagle3_helpers.states.store import Store
from tests.gate.conftest import FREEZE_TABLE, WARMUP, list_states, make_plan, written_plan
from tests.recover.fake_nvml import error, shown_gpus


def test_the_digest_of_a_plan_is_the_sha256_of_its_file(open_run):
    run = open_run()
    plan = written_plan(run)
    assert file_digest(plan_file(run)) == plan.digest == read_plan(run).digest
    assert plan_file(run).read_bytes() == canonical_json(plan.values)
    assert plan_file(run).stat().st_mode & 0o222 == 0


def test_a_plan_names_what_runs_on_what_and_what_it_takes(open_run):
    values = make_plan(open_run(training__epochs=3)).values
    assert values["argv"] == [sys.executable, "-m", "eagle3_helpers.training.loop", values["argv"][3]]
    assert values["argv"][3].endswith("/plan.json")
    assert (values["device"], values["gpus"]) == ("cpu", [])
    assert values["data"] | {"capture_record": "", "bytes": 0} == {
        "samples": 3,
        "tokens": 30,
        "bytes": 0,
        "capture_record": "",
    }
    assert values["estimate"]["seconds"] == 12 * 0.5 + 3 * 0.25 + 6 * 2
    assert values["estimate"]["gpu_hours"] == values["estimate"]["cost"] == 0
    assert values["disk"]["needed"] == (2 + 2) * (4 * 100 + 12 * 1000)


def costs(
    warmup: dict, steps: int = 7190, evaluate_every: int = 900, checkpoint_every: int = 600, held_out=("a",)
) -> dict:
    training = {"evaluate_every": evaluate_every, "checkpoint_every": checkpoint_every}
    spec = {"optimizer_steps": steps, "training": training, "held_out": list(held_out)}
    return estimate(GateParams(cost_per_gpu_hour=2.5, gpu_watts=300.0), spec, 4, warmup)


def test_gpu_hours_energy_and_cost_follow_from_the_warm_up():
    found = costs({"seconds_per_step": 5, "seconds_per_evaluation": 2.25, "seconds_per_checkpoint": 2})
    assert (found["evaluations"], found["checkpoints"]) == (8, 16)  # each evaluation may be the best, and is then saved
    assert (found["hours"], found["gpu_hours"], found["kwh"], found["cost"]) == (10, 40, 12, 100)


def test_without_held_out_samples_no_evaluation_is_counted():
    found = costs({"seconds_per_step": 1, "seconds_per_evaluation": 9, "seconds_per_checkpoint": 3}, held_out=())
    assert (found["evaluations"], found["checkpoints"], found["seconds"]) == (0, 12, 7190 + 36)


def test_checkpoints_hold_weights_and_moments_but_not_the_embedding():
    rows = [{"tensor": "embed_tokens.weight", "count": 1_174_405_120, "trainable": False}]
    rows += [{"tensor": "everything else", "count": 1_190_948_864, "trainable": True}]
    assert checkpoint_bytes({"rows": rows}, kept=2) == 4 * 12 * 1_190_948_864


@pytest.mark.parametrize("pace", [None, 0, -1.0, float("nan"), float("inf"), "0.5"])
def test_a_warm_up_without_a_time_makes_no_plan(open_run, pace):
    with pytest.raises(BadParams, match="seconds_per_step"):
        costs(WARMUP | {"seconds_per_step": pace})
    if pace != 0:  # nothing is held out, so it takes no time
        with pytest.raises(BadParams, match="seconds_per_evaluation"):
            costs(WARMUP | {"seconds_per_evaluation": pace})


def test_making_the_same_plan_again_changes_nothing(open_run):
    run = open_run()
    first = written_plan(run)
    approve(run, first.digest, "Ada", "looks right", "command")
    again = make_plan(run)
    again.values["estimate"]["seconds"] *= 1.1
    again.values["disk"]["free"] -= 1
    assert again.digest != first.digest
    assert write_plan(run, again).digest == first.digest == read_plan(run).digest
    assert (run.folder / "approval.json").exists()


def test_another_plan_replaces_the_file_and_sets_its_approval_aside(open_run, capsys):
    old = written_plan(open_run())
    approve(open_run(), old.digest, "Ada", "looks right", "command")
    run = open_run(training__lr=0.001)
    new = written_plan(run)
    assert read_plan(run).digest == new.digest != old.digest
    assert not (run.folder / "approval.json").exists()
    aside = list((run.folder / "approvals").glob("set-aside-*.json"))
    assert len(aside) == 1
    assert json.loads(aside[0].read_bytes())["plan_sha256"] == old.digest
    assert str(aside[0]) in capsys.readouterr().out


def test_a_plan_is_not_replaced_under_a_running_trainer(open_run):
    run = open_run()
    kept = written_plan(run)
    with locked(run.folder / "training" / "lock"):
        assert written_plan(run).digest == kept.digest
        with pytest.raises(CheckRefused, match="works by the present plan"):
            written_plan(open_run(training__lr=0.001))
    assert read_plan(run).digest == kept.digest


def test_a_plan_is_not_replaced_while_a_trainer_is_being_launched_by_it(open_run):
    run = open_run()
    kept = written_plan(run)
    with locked(run.folder / "training" / "launch.lock"):
        assert written_plan(run).digest == kept.digest
        with pytest.raises(CheckRefused, match="a launch, or a change of the plan, is in progress"):
            written_plan(open_run(training__lr=0.001))
    assert read_plan(run).digest == kept.digest
    assert written_plan(open_run(training__lr=0.001)).digest != kept.digest


def test_a_plan_is_not_replaced_under_a_trainer_that_has_no_lock_yet(open_run):
    run = open_run()
    kept = written_plan(run)
    me = {"pid": os.getpid(), "created": psutil.Process().create_time()}
    write_json(run.folder / "training" / "process.json", {"status": "launching", **me})
    with pytest.raises(CheckRefused, match="works by the present plan"):
        written_plan(open_run(training__lr=0.001))
    assert read_plan(run).digest == kept.digest


def locked(path):
    """A process of its own that holds the lock, as a trainer does."""
    program = (
        "import sys, filelock\nwith filelock.FileLock(sys.argv[1]):\n print('held', flush=True)\n sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    return process  # as a context manager it closes the pipe and waits


def test_a_missing_plan_says_which_stage_writes_it(open_run):
    with pytest.raises(CheckRefused, match=r"no plan.*04_inspect_freeze"):
        read_plan(open_run())


@pytest.mark.parametrize("damage", ["empty", "cut", "spaced", "twice", "field lost", "other run", "text number", "nan"])
def test_a_plan_that_is_not_as_written_is_refused(open_run, damage):
    run = open_run()
    plan = written_plan(run)
    good = plan_file(run).read_bytes()
    values = json.loads(good)
    bad = {
        "empty": lambda: b"",
        "cut": lambda: good[:-20],
        "spaced": lambda: json.dumps(values, sort_keys=True).encode(),
        "twice": lambda: good[:-1] + b',"device":"cpu"}',
        "field lost": lambda: canonical_json({name: values[name] for name in values if name != "undo"}),
        "other run": lambda: canonical_json(values | {"run_id": "other"}),
        "text number": lambda: canonical_json(values | {"estimate": values["estimate"] | {"gpu_hours": "0"}}),
        "nan": lambda: good.replace(b'"gpu_hours":0.0', b'"gpu_hours":NaN'),
    }[damage]()
    assert bad != good
    plan_file(run).unlink()
    plan_file(run).write_bytes(bad)
    with pytest.raises(CheckRefused, match="is not a plan as it was written"):
        read_plan(run)
    assert written_plan(run).digest != plan.digest  # the same run makes a new one in its place
    assert read_plan(run).values["spec"] == plan.values["spec"]


def test_two_plans_are_compared_field_by_field_with_deciding_ones_first(open_run):
    old, new = make_plan(open_run()), make_plan(open_run(training__lr=0.001))
    new.values["estimate"]["seconds"] = 9.0
    changes = compare(old, new)
    assert changes[0] == ("spec.training.lr", 0.003, 0.001)
    assert ("estimate.seconds", 12.5, 9.0) in changes
    assert compare(old, old) == []


def test_a_spec_for_another_draft_than_the_table_shows_makes_no_plan(open_run):
    run = open_run()
    with pytest.raises(CheckRefused, match="another draft"):
        build_plan(run, make_plan(run).values["spec"], FREEZE_TABLE, {"hidden_size": 64}, WARMUP)


def test_a_store_that_changed_since_the_spec_makes_no_plan(open_run):
    run = open_run()
    spec = make_plan(run).values["spec"] | {"manifest_digest": "0" * 64}
    with pytest.raises(CheckRefused, match="changed since the training spec"):
        build_plan(run, spec, FREEZE_TABLE, {"hidden_size": 32}, WARMUP)


def test_what_another_run_stores_in_the_same_store_changes_no_plan(open_run):
    run = open_run()
    plan = written_plan(run)
    list_states(Store.open(run.params.store_folder), ["00" * 8])
    assert written_plan(run).digest == plan.digest


@pytest.mark.parametrize(
    ("changed", "made_anew"),
    [({"dirty": "other"}, False), ({"diff": "d" * 64}, True), ({"commit": "c" * 40}, True)],
)
def test_another_commit_or_an_edited_package_makes_a_new_plan_and_an_edited_notebook_does_not(
    open_run, changed, made_anew
):
    run = open_run()
    plan = written_plan(run)
    other = make_plan(run)
    other.values["code"] |= changed
    assert (write_plan(run, other).digest != plan.digest) == made_anew


def test_two_edits_of_the_package_differ_and_a_saved_notebook_is_no_edit(tmp_path, monkeypatch):
    package = tmp_path / "repo" / "package"
    for folder in (package, tmp_path / "repo" / "notebooks"):
        folder.mkdir(parents=True)
        (folder / "file").write_text("first\n")
    monkeypatch.setattr("eagle3_helpers.runs.__file__", str(package / "runs.py"))
    assert code_commit() == {"commit": None, "dirty": None, "diff": None}
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "first"]):
        subprocess.run(["git", "-C", str(tmp_path / "repo"), *words], check=True)
    clean = code_commit()
    assert (clean["dirty"], clean["diff"]) == (False, None)
    (tmp_path / "repo" / "notebooks" / "file").write_text("outputs\n")
    assert code_commit() == clean | {"dirty": True}
    found = set()
    for text in ("second\n", "third\n"):
        (package / "file").write_text(text)
        found.add(code_commit()["diff"])
    assert len(found) == 2 and None not in found
    assert code_commit() == code_commit()


def test_environment_variables_are_named_and_their_values_kept_out(open_run, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "31415")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    plan = make_plan(open_run())
    assert "OMP_NUM_THREADS" in plan.values["environment"]
    assert b"31415" not in canonical_json(plan.values)
    assert b"hf_secret" not in canonical_json(plan.values)


def test_a_plan_reads_as_a_table_in_text_and_html(open_run):
    plan = make_plan(open_run())
    for text in (repr(plan), plan._repr_html_()):
        for shown in (
            plan.digest[:12],
            plan.digest,
            "1,000 parameters",
            "600 parameters",
            "12 s: 8 steps of 0.5 s, 2 held-out evaluations of 0.25 s, up to 4 checkpoints of 2 s, as measured",
            "OK: 49.60 kB needed",
        ):
            assert shown in text


def test_a_cuda_plan_without_a_gpu_is_refused_with_the_reason(open_run, monkeypatch):
    shown_gpus(monkeypatch)(init_error=error("LIBRARY_NOT_FOUND"))
    with pytest.raises(CheckRefused, match=r"no GPU is visible\. No NVIDIA driver"):
        make_plan(open_run(training__device="cuda"))
