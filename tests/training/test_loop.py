"""The trainer on real files, partly as a real process that is stopped and killed at a known step."""

import json
import signal
import time

import pytest
import torch
from filelock import FileLock
from safetensors.torch import load

from eagle3_helpers.durable import append_lines, digest, file_digest, read_lines, write_json
from eagle3_helpers.errors import CheckRefused
from eagle3_helpers.states.format import State, encode_state
from eagle3_helpers.states.manifest import new_entry, new_manifest_file, read_manifest
from eagle3_helpers.training import trainer_process
from eagle3_helpers.training.checkpoints import load_result
from eagle3_helpers.training.loop import main
from tests.training.conftest import rewrite_state

STEPS = 10


def losses(run) -> list[float]:
    return [record["loss"] for record in run.metrics if "loss" in record]


def events(run, kind: str) -> list[dict]:
    return [event for event in read_lines(run.folder / "events.jsonl") if event["kind"] == kind]


def assert_same_training(run, straight) -> None:
    assert run.weights(STEPS) == straight.weights(STEPS)
    assert run.moments(STEPS) == straight.moments(STEPS)
    keep = ("step", "epoch", "loss", "loss_per_step", "accuracy_per_step", "lr", "grad_norm", "held_out")
    assert [{k: v for k, v in m.items() if k in keep} for m in run.metrics] == [
        {k: v for k, v in m.items() if k in keep} for m in straight.metrics
    ]
    assert run.result["draft_digest"] == straight.result["draft_digest"]
    assert run.result["best_simulated_acceptance"] == straight.result["best_simulated_acceptance"]


def test_a_run_does_the_planned_steps_learns_and_names_its_best_checkpoint(straight):
    result = straight.result
    assert straight.spec.optimizer_steps == STEPS
    assert [record["step"] for record in straight.metrics if "loss" in record] == list(range(1, STEPS + 1))
    assert losses(straight)[-1] < losses(straight)[0]
    held_out = {record["step"]: record["held_out"] for record in straight.metrics if "held_out" in record}
    assert sorted(held_out) == [4, 8, 10]
    values = {step: numbers["simulated_acceptance_length"] for step, numbers in held_out.items()}
    assert result["best_simulated_acceptance"] == max(values.values()) > 1
    assert values[result["step"]] == result["best_simulated_acceptance"]
    assert result["frozen_unchanged"] is True
    assert result["plan_digest"] == file_digest(straight.plan_file)
    folder = straight.folder / result["checkpoint"]
    assert result["draft_digest"] == file_digest(folder / "draft.safetensors")
    weights, config = load_result(straight.folder)
    assert "embed_tokens.weight" not in weights and config.draft_vocab_size == 128
    kept = {path.name for path in (straight.folder / "checkpoints").iterdir()}
    assert kept == {"step-000009", "step-000010", folder.name}


def test_a_finished_run_has_nothing_to_do(straight):
    before = {path: path.stat().st_mtime_ns for path in straight.folder.rglob("*.safetensors")}
    assert straight.train() == 0
    assert {path: path.stat().st_mtime_ns for path in straight.folder.rglob("*.safetensors")} == before


def test_sigterm_ends_with_a_checkpoint_and_the_resumed_run_equals_the_straight_one(tiny_run, straight):
    run = tiny_run()
    blocked = run.block(step=4)
    process = run.start()
    blocked.reached()
    process.send_signal(signal.SIGTERM)
    blocked.restore()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 143, output
    stopped_at = run.metrics[-1]["step"]
    assert stopped_at in (4, 5)  # the signal came before or in the step that the pipe held up
    assert (run.folder / "checkpoints" / f"step-{stopped_at:06d}" / "complete.json").is_file()
    assert run.result is None
    assert run.train() == 0
    assert events(run, "resumed")[0]["step"] == stopped_at
    assert_same_training(run, straight)


def test_kill_9_loses_only_the_steps_since_the_last_checkpoint_and_changes_nothing(tiny_run, straight):
    run = tiny_run(checkpoint_every=1)
    blocked = run.block(step=4)
    process = run.start()
    blocked.reached()
    marker = run.folder / "checkpoints" / "step-000004" / "complete.json"
    while not marker.exists():  # the reader is one step ahead of the trainer, which gets no further than this
        time.sleep(0.01)
    process.kill()
    process.communicate()
    blocked.drop()
    marker.unlink()  # as if it had died while writing the newest
    assert run.train() == 0
    assert [event["checkpoint"] for event in events(run, "checkpoint passed over")] == ["step-000004"]
    assert [event["step"] for event in events(run, "resumed")] == [3]
    assert_same_training(run, straight)


def test_a_second_trainer_is_refused_with_exit_4(tiny_run, capsys, monkeypatch):
    monkeypatch.setattr(trainer_process, "LOCK_SECONDS", 0.1)
    run = tiny_run()
    run.folder.mkdir(parents=True)
    with FileLock(run.folder / "lock"):
        assert run.train() == 4
    assert "another trainer holds" in capsys.readouterr().err
    assert not (run.folder / "process.json").exists()


@pytest.mark.parametrize("field", ["manifest_digest", "samples_digest", "draft_vocab_digest"])
def test_data_that_is_not_what_the_plan_says_is_refused_before_anything_starts(tiny_run, capsys, field):
    run = tiny_run()
    run.write_plan({**run.spec.model_dump(mode="json"), field: "0" * 64})
    assert run.train() == 4
    assert "000000000000" in capsys.readouterr().err
    assert not (run.folder / "checkpoints").exists()


def test_a_plan_that_was_not_approved_is_refused_with_exit_4_before_anything(tiny_run, capsys):
    run = tiny_run()
    approved = digest(run.plan)
    run.write_plan({**run.spec.model_dump(mode="json"), "freeze_lm_head": True})  # after the other was redeemed
    assert main([str(run.plan_file), approved]) == 4
    assert f"holds plan {digest(run.plan)}, and {approved} was approved" in capsys.readouterr().err
    assert not run.folder.exists()


def test_a_state_whose_bytes_changed_after_it_was_listed_is_refused_by_file(tiny_run, capsys):
    run = tiny_run()
    path = run.store.state_file(run.samples_of(1)[2])
    content = bytearray(path.read_bytes())
    content[-3] ^= 1  # one bit of one number: it still decodes and is finite
    path.write_bytes(content)
    assert run.train() == 4
    assert f"{path} may not be trained on, checksum mismatch" in capsys.readouterr().err


def test_what_another_run_stores_in_the_same_store_stops_no_training(tiny_run):
    run = tiny_run(epochs=1)
    for foreign in ("00" * 8, "11" * 8):
        run.spec = run.make_spec()
        run.write_plan()
        append_lines(new_manifest_file(run.store), [new_entry(foreign, 5, b"of another run")._asdict()])
    assert run.train() == 0


def flip(path) -> None:
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)


def test_the_same_spec_under_another_plan_is_not_trained_a_second_time(finished, capsys):
    finished.write_plan(code={"commit": "another"})
    assert finished.train() == 0
    assert "nothing to do: finished" in capsys.readouterr().out


def test_a_finished_training_whose_newest_checkpoint_is_damaged_trains_on_from_the_one_before(finished, straight):
    write_json(finished.folder / "result.json", finished.result | {"checkpoint": "checkpoints/step-000010", "step": 10})
    flip(finished.folder / "checkpoints" / "step-000010" / "draft.safetensors")
    assert finished.train() == 0
    assert [event["step"] for event in events(finished, "resumed")] == [9]
    assert_same_training(finished, straight)


def test_a_best_checkpoint_that_was_damaged_since_is_replaced_by_the_newest_whole_one_and_said_so(finished):
    best = finished.folder / "checkpoints" / "step-000009"
    rewrite_state(best.with_name("step-000010"), best={"step": 9, "value": 9.0})
    (finished.folder / "result.json").unlink()
    flip(best / "optimizer.safetensors")
    assert finished.train() == 0
    [event] = events(finished, "best checkpoint damaged")
    assert (event["checkpoint"], event["taken_instead"]) == ("step-000009", "step-000010")
    assert "optimizer.safetensors is not what was written" in event["why"]
    assert finished.result["checkpoint"] == "checkpoints/step-000010"
    [held_out] = [m["held_out"] for m in finished.metrics if "held_out" in m and m["step"] == 10]
    assert finished.result["best_simulated_acceptance"] == held_out["simulated_acceptance_length"]
    load_result(finished.folder)


def test_a_result_whose_draft_is_another_one_is_not_loaded(finished):
    write_json(finished.folder / "result.json", finished.result | {"draft_digest": "0" * 64})
    with pytest.raises(
        CheckRefused, match=r"not what was chosen: draft\.safetensors has sha256 .*, result\.json says 0000"
    ):
        load_result(finished.folder)


def test_metrics_without_any_whole_checkpoint_are_moved_aside_and_not_lost(tiny_run):
    run = tiny_run(epochs=1)
    append_lines(run.folder / "metrics.jsonl", [{"step": 1, "loss": 7.0}])
    assert run.train() == 0
    [event] = events(run, "metrics set aside")
    assert list(read_lines(run.folder / event["moved_to"])) == [{"step": 1, "loss": 7.0}]
    assert [record["step"] for record in run.metrics if "loss" in record] == [1, 2, 3, 4, 5]


def test_a_sample_without_states_is_refused_by_name(tiny_run, capsys):
    run = tiny_run()
    lines = [path for path in (run.store.folder / "manifest").glob("*.jsonl")]
    kept = [line for path in lines for line in path.read_text().splitlines(keepends=True)]
    gone = json.loads(kept.pop())["sample_id"]
    for path in lines[1:]:
        path.unlink()
    lines[0].write_text("".join(kept))
    run.spec = run.make_spec()
    run.write_plan()
    assert run.train() == 4
    assert gone in capsys.readouterr().err


def test_checkpoints_of_another_plan_are_refused_with_the_fields_that_differ(tiny_run, capsys):
    run = tiny_run(epochs=1)
    assert run.train() == 0
    spec = run.spec.model_dump(mode="json")
    run.write_plan({**spec, "training": {**spec["training"], "lr": 0.5}})
    assert run.train() == 4
    assert "belongs to another plan: training.lr 0.003 -> 0.5." in capsys.readouterr().err


def poison(run, step: int) -> str:
    """Puts a NaN into the states of one sample of that step, listed as if it had been captured so, and plans anew."""
    name = run.samples_of(step)[1]
    path = run.store.state_file(name)
    tensors = load(path.read_bytes())
    tensors["aux"][0, 0] = float("nan")
    state = State(tensors["input_ids"], tensors["aux"], tensors["last"])
    content = encode_state(state, name, run.store.record.digest)
    path.write_bytes(content)
    entry = new_entry(name, len(state.input_ids), content, earlier=read_manifest(run.store)[name])
    append_lines(new_manifest_file(run.store), [entry._asdict()])
    run.spec = run.make_spec()
    run.write_plan()
    return name


def test_a_sample_with_nan_is_skipped_by_name_and_training_goes_on(tiny_run):
    run = tiny_run(epochs=1)
    name = poison(run, step=2)
    assert run.train() == 0
    [skipped] = events(run, "step skipped")
    assert (skipped["step"], skipped["samples"]) == (3, [name])
    assert [record["step"] for record in run.metrics if "loss" in record] == [1, 2, 4, 5]
    assert (run.result["skips"], run.result["updates"]) == (1, 4)


def test_one_skip_too_many_stops_training_and_names_the_samples(tiny_run, capsys):
    run = tiny_run(epochs=1, max_skips=0)
    name = poison(run, step=2)
    assert run.train() == 1
    assert name in capsys.readouterr().err
    assert run.result is None


def test_a_frozen_head_stays_bit_for_bit_the_targets_rows(tiny_run):
    run = tiny_run(epochs=1)
    spec = {**run.spec.model_dump(mode="json"), "freeze_lm_head": True}
    run.write_plan(spec)
    assert run.train() == 0
    weights, _ = load_result(run.folder)
    t2d = load((run.home / "draft_vocab.safetensors").read_bytes())["t2d"]
    assert torch.equal(weights["lm_head.weight"], run.target.head()[t2d])
    assert set(run.result["frozen"]) == {"embed_tokens.weight", "lm_head.weight"}
    assert "lm_head.weight.exp_avg" not in load(run.moments(run.result["step"]))


def test_a_missing_plan_is_a_usage_error(tmp_path, capsys):
    assert main([str(tmp_path / "plan.json"), "0" * 64]) == 2
    assert main([str(tmp_path / "plan.json")]) == 2
    assert "holds no plan" in capsys.readouterr().err
