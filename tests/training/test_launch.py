import multiprocessing
import os
import subprocess
import sys

import psutil
import pytest

from eagle3_helpers.durable import digest, read_json, write_json
from eagle3_helpers.errors import CheckRefused, StageFailed
from eagle3_helpers.training import launch as module
from eagle3_helpers.training.launch import launch, launch_lock, needs_launch, stop_trainer, trainer_status
from eagle3_helpers.training.monitor import _Panel, attach, status_line, training_checks


def trainers_of(run) -> list[int]:
    found = []
    for process in psutil.process_iter(["pid", "cmdline", "status"]):
        if str(run.plan_file) in (process.info["cmdline"] or []) and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process.info["pid"])
    return found


def test_two_launches_at_once_start_one_trainer_that_can_be_stopped_and_resumed(tiny_run, capsys):
    run = tiny_run()
    blocked = run.block(step=3)
    context = multiprocessing.get_context("fork")
    twins = [context.Process(target=launch, args=(run.run, run.redeem)) for _ in range(2)]
    for twin in twins:
        twin.start()
    for twin in twins:
        twin.join()
    assert [twin.exitcode for twin in twins] == [0, 0]
    kinds = [event["kind"] for event in run.run.events()]
    assert sorted(kinds) == ["attached to the trainer", "trainer launched"]
    assert len(trainers_of(run)) == 1
    blocked.reached()
    status = trainer_status(run.folder)
    assert (status.state, [status.pid]) == ("running", trainers_of(run))
    trainer = psutil.Process(status.pid)
    assert os.getsid(status.pid) == status.pid
    assert "asked process" in stop_trainer(run.folder)
    blocked.restore()
    trainer.wait(timeout=60)
    assert trainer_status(run.folder).state == "stopped"
    with pytest.raises(StageFailed, match="stopped at step"):
        attach(run.run.folder)

    assert launch(run.run, run.redeem).state == "running"
    result = attach(run.run.folder)
    assert result == read_json(run.folder / "result.json")
    assert training_checks(run.run.folder, result).ok
    assert launch(run.run, refuse).state == "finished"  # nothing to start, so no approval is used
    assert "trainer finished: step 10 of 10" in capsys.readouterr().out


def failed_checks(run, result: dict) -> dict:
    """{name: remedy}"""
    items = training_checks(run.run.folder, result).items
    return {item["check"]: item["remedy"] for item in items if not item["ok"]}


def test_the_same_spec_under_a_new_plan_is_done_without_another_approval_and_keeps_its_record(finished):
    before = finished.result
    finished.write_plan(code={"commit": "another"})
    assert not needs_launch(finished.run)
    assert launch(finished.run, refuse).state == "finished"
    assert attach(finished.run.folder) == before
    assert failed_checks(finished, before) == {}
    assert before["plan_digest"] != digest(finished.plan)


def test_a_result_counts_whatever_became_of_the_process_after_it_was_written(finished):
    write_json(finished.folder / "process.json", {"status": "running"})
    assert trainer_status(finished.folder).state == "failed"
    assert launch(finished.run, refuse).state == "finished"
    assert attach(finished.run.folder) == finished.result


def test_another_spec_needs_a_launch_and_its_result_is_not_taken_for_it(finished):
    spec = finished.spec.model_dump(mode="json")
    finished.write_plan({**spec, "training": {**spec["training"], "lr": 0.5}})
    assert needs_launch(finished.run)
    assert list(failed_checks(finished, finished.result)) == ["trained by the plan's spec"]


def test_a_finished_training_whose_chosen_checkpoint_is_damaged_is_launched_again_and_mended(finished):
    before = finished.result
    chosen = finished.folder / before["checkpoint"] / "optimizer.safetensors"
    chosen.write_bytes(chosen.read_bytes()[:-1])
    assert needs_launch(finished.run)
    [(check, remedy)] = failed_checks(finished, before).items()
    assert check == "best checkpoint reads back" and "goes on from the newest whole checkpoint" in remedy
    assert launch(finished.run, finished.redeem).state == "running"
    mended = attach(finished.run.folder)
    assert failed_checks(finished, mended) == {}
    assert not needs_launch(finished.run)


def test_a_plan_that_is_changed_while_it_is_launched_is_not_trained(tiny_run):
    run = tiny_run()

    def redeem(_run):
        approved = run.redeem(_run)
        run.write_plan({**run.spec.model_dump(mode="json"), "freeze_lm_head": True})
        return approved

    launch(run.run, redeem)
    with pytest.raises(StageFailed, match="failed at step 0"):
        attach(run.run.folder)
    assert "was approved" in (run.folder / "log.txt").read_text()
    assert not (run.folder / "checkpoints").exists()


def test_a_launch_says_so_where_another_one_does_not_come_to_its_end(tiny_run, monkeypatch):
    monkeypatch.setattr(module, "LAUNCH_SECONDS", 0.1)
    run = tiny_run()
    with (
        launch_lock(run.folder, 0),
        pytest.raises(CheckRefused, match="a launch, or a change of the plan, is in progress"),
    ):
        launch(run.run, refuse)
    assert trainer_status(run.folder).state == "none"


def test_the_launcher_does_not_overwrite_what_the_trainer_told_already(tiny_run, monkeypatch):
    run = tiny_run()
    start = subprocess.Popen

    def start_and_wait(*arguments, **settings):
        process = start(*arguments, **settings)
        process.wait(timeout=60)  # the trainer is quicker than the launcher
        return process

    run.write_plan({**run.spec.model_dump(mode="json"), "samples_digest": "0" * 64})
    monkeypatch.setattr(module.subprocess, "Popen", start_and_wait)
    status = launch(run.run, run.redeem)
    assert status.state == "failed" and "digests differ" in status.reason


def refuse(_run):
    raise AssertionError("an approval was used up for nothing")


def test_a_killed_trainer_is_failed_and_a_trainer_that_never_was_is_none(tiny_run):
    run = tiny_run()
    assert trainer_status(run.folder).state == "none"
    assert "nothing was signalled" in stop_trainer(run.folder)
    blocked = run.block(step=1)
    pid = launch(run.run, run.redeem).pid
    blocked.reached()
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    blocked.drop()
    status = trainer_status(run.folder)
    assert status.state == "failed" and "without a word" in status.reason
    with pytest.raises(StageFailed, match="failed at step"):
        attach(run.run.folder)


def test_the_training_panel_shows_curves_and_the_status_line(straight):
    page = _Panel(straight.metrics, "trainer finished: step 10")._repr_html_()
    assert "data:image/png;base64," in page and page.endswith("<p>trainer finished: step 10</p>")


def test_a_trainer_that_refuses_shows_its_reason_and_log(tiny_run, capsys):
    run = tiny_run()
    run.write_plan({**run.spec.model_dump(mode="json"), "samples_digest": "0" * 64})
    launch(run.run, run.redeem)
    with pytest.raises(StageFailed, match="digests differ"):
        attach(run.run.folder)
    assert "STOP (CheckRefused)" in capsys.readouterr().err


def test_no_other_process_is_signalled_when_the_id_was_used_again(tmp_path):
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    created = psutil.Process(other.pid).create_time()
    write_json(tmp_path / "process.json", {"status": "running", "pid": other.pid, "created": created - 100})
    assert "nothing was signalled" in stop_trainer(tmp_path)
    assert trainer_status(tmp_path).state == "failed"
    assert other.poll() is None
    other.communicate(b"\n")
    assert other.returncode == 0


def test_the_status_line_tells_step_loss_rate_and_time_left(tmp_path):
    metrics = [{"step": step, "loss": 2.0, "tokens": 100, "seconds": 0.5} for step in range(1, 5)]
    status = trainer_status(tmp_path)
    assert status_line(status, [], 10) == "trainer none: no step done yet"
    running = type(status)("running", 1, 4)
    assert status_line(running, metrics, 10) == "trainer running: step 4 of 10, loss 2.000, 200 tok/s, 3 s left"
