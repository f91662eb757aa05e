import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest

from eagle3_helpers.durable import canonical_json, digest, read_lines, write_json
from eagle3_helpers.errors import BadParams, CheckRefused, NotApproved
from eagle3_helpers.gate import approval_record, live_checks
from eagle3_helpers.gate.approval import approval_status, approve, auto_approve, redeem, reject, require_approval
from eagle3_helpers.gate.approval_record import last_decided
from eagle3_helpers.gate.plan import plan_file
from eagle3_helpers.runs import Run
from eagle3_helpers.samples.table import load_samples
from eagle3_helpers.states.store import Store
from eagle3_helpers.training.checkpoints import Checkpoints
from tests.gate.conftest import list_states, written_plan
from tests.gate.test_plan import locked
from tests.recover.fake_nvml import GIB, device, shown_gpus


@pytest.fixture
def run(open_run):
    return open_run()


@pytest.fixture
def plan(run):
    return written_plan(run)


def record_of(run) -> dict:
    return json.loads((run.folder / "approval.json").read_bytes())


def rewrite(run, **changes) -> None:
    """approval.json with other fields and a digest that fits them, as only a forger or another program writes it."""
    record = record_of(run) | changes
    body = {name: value for name, value in record.items() if name not in ("digest", "redeemed_at")}
    write_json(run.folder / "approval.json", record | {"digest": digest(body)})


def test_an_approved_plan_may_be_launched(run, plan):
    approve(run, plan.digest, " Ada ", "the table is right", "command")
    assert require_approval(run).values == plan.values
    record = record_of(run)
    assert record["approver"] == "Ada"
    assert record["redeemed_at"] is None
    expires, time = (datetime.fromisoformat(record[name]) for name in ("expires", "time"))
    assert expires - time == timedelta(hours=4)
    assert list(read_lines(run.folder / "approvals.jsonl")) == [record]


def test_without_an_approval_the_refusal_gives_the_exact_command(run, plan):
    with pytest.raises(NotApproved, match="is not approved") as refusal:
        require_approval(run)
    command = f"eagle3-runbook approve --run {run.id} --digest {plan.digest} --name YOUR_NAME --reason WHY"
    assert refusal.value.remedy.endswith(command)
    assert refusal.value.exit_code == 3


def test_an_approval_for_another_plan_is_refused_and_the_changed_field_named(open_run, run, plan):
    approve(run, plan.digest, "Ada", "ok", "command")
    approved = record_of(run)
    changed = open_run(training__lr=0.001)
    new = written_plan(changed)
    sentence = (
        f"the approval is for plan {plan.digest[:12]}…, the current plan is {new.digest[:12]}… "
        r"\(changed: spec.training.lr 0.003 -> 0.001\)"
    )
    with pytest.raises(NotApproved, match=sentence):  # it was set aside with its plan
        require_approval(changed)
    write_json(run.folder / "approval.json", approved)
    with pytest.raises(NotApproved, match=sentence):  # and putting it back does not help
        redeem(changed)
    with pytest.raises(CheckRefused, match=f"given is {plan.digest}, the current plan is {new.digest} .*lr 0.003"):
        approve(changed, plan.digest, "Ada", "ok", "command")


def test_a_long_list_of_changes_is_cut(open_run, run, plan):
    approve(run, plan.digest, "Ada", "ok", "command")
    changed = open_run(
        training__lr=0.001, training__epochs=5, training__seed=3, training__clip_norm=1.0, training__max_skips=9
    )
    written_plan(changed)
    with pytest.raises(NotApproved, match=r"spec.optimizer_steps 8 -> 20.*, \d more\)"):
        require_approval(changed)


def test_an_expired_approval_is_refused(run, plan):
    approve(run, plan.digest, "Ada", "ok", "command")
    past = datetime.now(UTC) - timedelta(minutes=1)
    rewrite(run, expires=past.isoformat())
    with pytest.raises(NotApproved, match=f"by Ada .* expired at {past:%Y-%m-%d %H:%M} UTC"):
        require_approval(run)


def test_an_approval_counts_for_one_launch(run, plan):
    approve(run, plan.digest, "Ada", "ok", "command")
    before = record_of(run)
    assert redeem(run).digest == plan.digest
    assert record_of(run)["redeemed_at"]
    with pytest.raises(NotApproved, match=r"was used for a launch at .* it counts once"):
        redeem(run)
    write_json(run.folder / "approval.json", before)
    with pytest.raises(NotApproved, match="it counts once"):  # a copy kept from before the launch is no second approval
        redeem(run)
    approve(run, plan.digest, "Ada", "again, after the crash", "command")
    assert redeem(run).digest == plan.digest


def test_of_many_launches_at_once_one_goes_through(run, plan):
    approve(run, plan.digest, "Ada", "ok", "command")

    def launch(_) -> str:
        try:
            return redeem(run).digest
        except NotApproved as refusal:
            return refusal.what

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(launch, range(8)))
    assert results.count(plan.digest) == 1
    assert sum("counts once" in result for result in results) == 7


def test_one_changed_byte_in_the_plan_voids_the_approval(run, plan):
    approve(run, plan.digest, "Ada", "ok", "command")
    content = plan_file(run).read_bytes()
    plan_file(run).unlink()
    plan_file(run).write_bytes(content.replace(b'"lr":0.003', b'"lr":0.004'))
    with pytest.raises(NotApproved, match=r"changed: spec.training.lr 0.003 -> 0.004"):
        require_approval(run)
    plan_file(run).write_bytes(content.replace(b'"lr":0.003', b'"lr": 0.003'))
    with pytest.raises(CheckRefused, match="not a plan as it was written"):
        require_approval(run)


def test_one_changed_byte_in_the_approval_voids_it(run, plan):
    approve(run, plan.digest, "Ada", "because", "command", {"data verified": True})
    path = run.folder / "approval.json"
    good = path.read_bytes()
    for old, new in ((b"Ada", b"Eve"), (b"because", b"becausf"), (plan.digest[:4].encode(), b"ffff"), (b"{", b"[")):
        path.write_bytes(good.replace(old, new, 1))
        assert path.read_bytes() != good
        with pytest.raises(NotApproved):
            require_approval(run)
    path.write_bytes(good[: len(good) // 2])
    with pytest.raises(NotApproved, match="is no approval"):
        require_approval(run)
    path.write_bytes(good)
    assert require_approval(run).digest == plan.digest


@pytest.mark.parametrize(
    "word", ["no", "False", "", " yes ", "yes", "Approved", "approved ", True, 1, None, ["approved"]]
)
def test_only_the_exact_word_is_an_approval(run, plan, word):
    approve(run, plan.digest, "Ada", "ok", "command")
    rewrite(run, decision=word)
    with pytest.raises(NotApproved, match="is no approval: decision"):
        require_approval(run)


@pytest.mark.parametrize("tick", ["no", "False", "", "True", 1, False, None])
def test_only_true_is_a_tick(run, plan, tick):
    with pytest.raises(BadParams, match="'cost accepted' is not confirmed"):
        approve(run, plan.digest, "Ada", "ok", "widget", {"cost accepted": tick})
    assert not (run.folder / "approval.json").exists()
    approve(run, plan.digest, "Ada", "ok", "widget", {"cost accepted": True})
    rewrite(run, ticks={"cost accepted": tick})
    with pytest.raises(NotApproved, match=r"is no approval: ticks.cost accepted"):
        require_approval(run)


@pytest.mark.parametrize("text", ["no", "False", "", "12e4567", "inf"])
def test_only_all_64_characters_name_a_plan(run, plan, text):
    for given in (text, plan.digest[:12], plan.digest.upper(), f" {plan.digest}"):
        with pytest.raises(BadParams, match=f"current plan is {plan.digest}"):
            approve(run, given, "Ada", "ok", "command")


@pytest.mark.parametrize(("name", "reason"), [("", "ok"), ("  ", "ok"), ("Ada", ""), ("Ada", "\n")])
def test_an_approval_needs_a_name_and_a_reason(run, plan, name, reason):
    with pytest.raises(BadParams, match="is empty"):
        approve(run, plan.digest, name, reason, "command")
    assert not (run.folder / "approvals.jsonl").exists()


def test_a_rejection_is_recorded_and_ends_an_earlier_approval(run, plan):
    approve(run, plan.digest, "Ada", "ok", "command")
    reject(run, plan.digest, "Grace", "the head should be frozen", "command")
    with pytest.raises(NotApproved, match=r"was rejected by Grace at .*: the head should be frozen"):
        require_approval(run)
    assert [line["decision"] for line in read_lines(run.folder / "approvals.jsonl")] == ["approved", "rejected"]


def test_changed_data_stops_the_launch_and_leaves_the_approval_unused(run, plan):
    approve(run, plan.digest, "Ada", "ok", "command")
    list_states(Store.open(run.params.store_folder), load_samples(run.params.store_folder).sample_ids[:1])
    planned = plan.values["spec"]["manifest_digest"][:12]
    with pytest.raises(
        CheckRefused, match=rf"states as planned: [0-9a-f]{{12}} \(expected {planned}\)\. Run 03_verify"
    ):
        redeem(run)
    assert record_of(run)["redeemed_at"] is None


@pytest.mark.parametrize(("name", "what"), [("samples", "samples"), ("draft_vocab", "draft vocabulary")])
def test_changed_or_missing_samples_and_vocabulary_stop_the_launch(run, plan, name, what):
    approve(run, plan.digest, "Ada", "ok", "command")
    path = run.params.store_folder / f"{name}.safetensors"
    path.write_bytes(b"other")
    with pytest.raises(CheckRefused, match=rf"launch: {what} as planned: [0-9a-f]{{12}} "):
        redeem(run)
    path.unlink()
    with pytest.raises(CheckRefused, match=f"{what} as planned: .*No such file"):
        redeem(run)


def test_a_store_that_is_gone_stops_the_launch(run, plan):
    approve(run, plan.digest, "Ada", "ok", "command")
    (run.params.store_folder / "store.json").unlink()
    with pytest.raises(CheckRefused, match=r"states as planned: .*holds no store\.json"):
        redeem(run)


def test_a_disk_without_room_stops_the_launch_with_both_numbers(run, plan):
    values = plan.values | {"disk": plan.values["disk"] | {"needed": 10**18}}
    plan_file(run).unlink()
    plan_file(run).write_bytes(canonical_json(values))
    approve(run, digest(values), "Ada", "ok", "command")
    with pytest.raises(CheckRefused, match=r"room for checkpoints: .* free \(expected more than 1000000.00 TB\)"):
        require_approval(run)


def test_a_running_trainer_stops_a_second_launch(run, plan):
    approve(run, plan.digest, "Ada", "ok", "command")
    with locked(run.folder / "training" / "lock"), pytest.raises(CheckRefused, match="no other trainer of this run"):
        redeem(run)
    assert redeem(run).digest == plan.digest  # the lock fell with its process


def test_code_that_changed_since_the_plan_stops_the_launch_and_leaves_the_approval_unused(run, plan, monkeypatch):
    approve(run, plan.digest, "Ada", "ok", "command")
    planned = plan.values["code"]
    edited = planned | {"commit": "c" * 40, "diff": "d" * 64}
    monkeypatch.setattr(live_checks, "code_commit", lambda: edited)
    with pytest.raises(CheckRefused, match="code as planned: cccccccccccc with changes dddddddddddd") as refusal:
        redeem(run)
    assert f"move {plan_file(run)} aside, run 04_inspect_freeze again" in refusal.value.remedy
    assert record_of(run)["redeemed_at"] is None
    monkeypatch.setattr(live_checks, "code_commit", lambda: planned | {"dirty": "a notebook was saved"})
    assert redeem(run).digest == plan.digest


def test_another_version_of_a_package_than_planned_stops_the_launch_and_is_named(run, plan, monkeypatch):
    approve(run, plan.digest, "Ada", "ok", "command")
    monkeypatch.setattr(live_checks, "versions", lambda: plan.values["versions"] | {"torch": "9.9"})
    was = plan.values["versions"]["torch"].replace("+", r"\+")
    with pytest.raises(CheckRefused, match=rf"versions as planned: torch {was} -> 9\.9"):
        redeem(run)


def test_outside_a_git_checkout_the_code_passes(open_run, monkeypatch):
    nothing = {"commit": None, "dirty": None, "diff": None}
    monkeypatch.setattr("eagle3_helpers.gate.plan.code_commit", lambda: nothing)
    monkeypatch.setattr(live_checks, "code_commit", lambda: nothing)
    run = open_run()
    approve(run, written_plan(run).digest, "Ada", "ok", "command")
    assert "not in git" in repr(require_approval(run))


def trained_by(run, spec: dict) -> None:
    """A checkpoint of this spec in the run's training folder."""
    Checkpoints(run.folder / "training" / "checkpoints").save(2, {}, {}, {"spec": spec})


def test_a_training_folder_of_another_plan_stops_the_launch_field_by_field_before_the_approval_is_spent(run, plan):
    approve(run, plan.digest, "Ada", "ok", "command")
    spec = plan.values["spec"]
    trained_by(run, spec | {"training": spec["training"] | {"lr": 0.5}, "optimizer_steps": 99})
    with pytest.raises(
        CheckRefused,
        match=r"training folder: another plan's: optimizer_steps 99 -> 8, training\.lr 0\.5 -> 0\.003 \(expected empty",
    ) as refusal:
        redeem(run)
    assert f"Move {run.folder / 'training'} aside to train anew, or use another run id" in refusal.value.remedy
    assert record_of(run)["redeemed_at"] is None
    (run.folder / "training").rename(run.folder / "training-aside")
    assert redeem(run).digest == plan.digest


def test_checkpoints_of_this_plan_let_a_launch_through(run, plan):
    approve(run, plan.digest, "Ada", "ok", "command")
    trained_by(run, plan.values["spec"])
    assert redeem(run).digest == plan.digest


def test_a_run_folder_that_was_moved_stops_the_launch_before_the_approval_is_spent(run, plan):
    approve(run, plan.digest, "Ada", "ok", "command")
    moved = run.folder.with_name(f"{run.id}-moved") / run.id
    moved.parent.mkdir()
    run.folder.rename(moved)
    with pytest.raises(CheckRefused, match=f"and the plan trains in {run.folder / 'training'}"):
        redeem(Run(moved, run.params))


def test_two_decisions_at_once_do_not_mix_and_the_second_says_so(run, plan, monkeypatch):
    monkeypatch.setattr(approval_record, "LOCK_SECONDS", 0.1)
    with (
        locked(run.folder / "approval.lock"),
        pytest.raises(CheckRefused, match=f"another process decides on the plan of run {run.id}"),
    ):
        approve(run, plan.digest, "Ada", "ok", "command")
    assert not (run.folder / "approval.json").exists()


def test_a_gpu_that_somebody_took_stops_the_launch_and_names_the_holder(open_run, monkeypatch):
    show = shown_gpus(monkeypatch)
    run = open_run(training__device="cuda")
    show(device("GPU-a"), device("GPU-b"))
    plan = written_plan(run)
    assert plan.values["gpus"] == ["GPU-a"]
    assert plan.values["estimate"]["gpu_hours"] == plan.values["estimate"]["hours"] > 0
    approve(run, plan.digest, "Ada", "ok", "command")
    show(device("GPU-a", used=39 * GIB), device("GPU-b"))
    with pytest.raises(
        CheckRefused, match=r"GPU GPU-a: occupied, owner unknown; 41.88 GB of 85.90 GB \(expected free\)"
    ):
        redeem(run)
    show(device("GPU-a", used=GIB, processes=[(os.getppid(), GIB)]))
    with pytest.raises(CheckRefused, match=rf"GPU GPU-a: foreign; .*{os.getppid()} "):
        redeem(run)
    show(device("GPU-b"))
    with pytest.raises(CheckRefused, match="GPU GPU-a: not found"):
        redeem(run)
    show(device("GPU-a", used=GIB, processes=[(os.getpid(), GIB)]))  # what this very kernel holds is its own
    assert redeem(run).digest == plan.digest


def test_a_gpu_plan_is_not_approved_by_the_default_limit(open_run, monkeypatch):
    shown_gpus(monkeypatch)(device("GPU-a"))
    run = open_run(training__device="cuda")
    written_plan(run)
    with pytest.raises(NotApproved, match=r"needs 0.00347 GPU hours, .* goes up to .* 0\."):
        auto_approve(run, "demo")


def test_a_cpu_plan_is_approved_as_someone_and_says_so(run, plan):
    auto_approve(run, "demo")
    record = record_of(run)
    assert (record["channel"], record["approver"]) == ("approve-as", "demo")
    assert "0 GPU hours" in record["reason"]
    assert require_approval(run).digest == plan.digest


def test_approve_as_stops_at_its_limit_with_both_numbers(open_run, plan):
    run = open_run(gate__auto_approve_max_gpu_hours=1.5)
    for hours, passes in ((1.5, True), (1.51, False)):
        values = plan.values | {"estimate": plan.values["estimate"] | {"gpu_hours": hours}}
        plan_file(run).unlink()
        plan_file(run).write_bytes(canonical_json(values))
        if passes:
            assert auto_approve(run, "demo").plan_sha256 == digest(values)
        else:
            with pytest.raises(NotApproved, match=r"needs 1.51 GPU hours, .* 1.5"):
                auto_approve(run, "demo")
            assert last_decided(run) != digest(values)


def test_approve_as_does_not_override_a_persons_rejection_of_the_same_plan(open_run, run, plan):
    reject(run, plan.digest, "Grace", "the head should be frozen", "command")
    with pytest.raises(NotApproved, match=r"rejected by Grace at .* UTC: the head should be frozen") as refusal:
        auto_approve(run, "demo")
    assert f"eagle3-runbook approve --run {run.id} --digest {plan.digest}" in refusal.value.remedy
    assert record_of(run)["decision"] == "rejected"

    other = open_run(training__lr=0.001)
    written_plan(other)
    auto_approve(other, "demo")  # another plan was not rejected
    again = written_plan(run)
    assert again.digest != plan.digest  # its date is another
    with pytest.raises(NotApproved, match="rejected by Grace"):
        auto_approve(run, "demo")
    approve(run, again.digest, "Grace", "it may train after all", "command")
    auto_approve(run, "demo")


def test_approve_as_needs_a_name(run, plan):
    with pytest.raises(BadParams, match="name is empty"):
        auto_approve(run, " ")


def test_the_status_tells_each_state_in_words(run):
    assert "has no plan" in repr(approval_status(run))
    plan = written_plan(run)
    assert f"no: plan {plan.digest[:12]} of run {run.id} is not approved." in repr(approval_status(run))
    approve(run, plan.digest, "Ada", "looks right", "command")
    assert "approved by Ada" in repr(approval_status(run))
    assert "yes, one" in repr(approval_status(run))
    redeem(run)
    assert "counts once" in repr(approval_status(run))
    (run.folder / "approval.json").write_bytes(b"yes")
    assert "is no approval" in repr(approval_status(run))


def test_a_process_killed_between_log_and_file_leaves_the_approval_used(run, plan, params_file):
    approve(run, plan.digest, "Ada", "ok", "command")
    program = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from eagle3_helpers import durable\n"
        "from eagle3_helpers.gate.approval import redeem\n"
        "from eagle3_helpers.params import load_params\n"
        "from eagle3_helpers.runs import Run\n"
        "durable.write_json = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "redeem(Run(Path(sys.argv[1]), load_params(sys.argv[2])))\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(run.folder), str(params_file)], check=False)
    assert done.returncode == -9
    assert record_of(run)["redeemed_at"] is None
    with pytest.raises(NotApproved, match="counts once"):
        redeem(run)
