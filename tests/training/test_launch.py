import multiprocessing
import os
import subprocess
import sys

import psutil
import pytest

from eagle3_helpers.durable import read_json, write_json
from eagle3_helpers.errors import StageFailed
from eagle3_helpers.training.launch import launch, stop_trainer, trainer_status
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
