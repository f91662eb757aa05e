import pytest

from eagle3_helpers.errors import CheckRefused
from eagle3_helpers.training.spec import read_spec
from eagle3_helpers.training.warmup import certify_on_data, measure


def snapshot(folder) -> dict:
    return {path: path.is_file() and (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.rglob("*")}


def test_the_warm_up_measures_and_certifies_and_leaves_no_file_behind(tiny_run):
    run = tiny_run()
    before = snapshot(run.home)
    numbers = measure(run.spec)
    certificate = certify_on_data(run.spec)
    assert snapshot(run.home) == before
    assert numbers["seconds_per_step"] > 0 and numbers["peak_bytes"] > 0 and numbers["steps"] == 3
    assert numbers["tokens_per_step"] * 3 == pytest.approx(
        numbers["tokens_per_second"] * 3 * numbers["seconds_per_step"], rel=3
    )
    assert numbers["seconds_per_evaluation"] > 0 and numbers["seconds_per_checkpoint"] > 0
    assert certificate.ok, certificate


def test_without_held_out_samples_an_evaluation_takes_no_time(tiny_run):
    run = tiny_run(held_out_fraction=0.0)
    assert measure(run.spec, steps=1)["seconds_per_evaluation"] == 0


def test_a_plan_without_a_readable_spec_is_refused_by_field(tiny_run):
    values = tiny_run().spec.model_dump(mode="json")
    assert read_spec({"spec": values}).digest == read_spec({"spec": dict(reversed(values.items()))}).digest
    with pytest.raises(CheckRefused, match="no training spec"):
        read_spec({})
    with pytest.raises(CheckRefused, match="optimizer_steps"):
        read_spec({"spec": {**values, "optimizer_steps": 0}})
