import signal
import subprocess
import sys
import textwrap

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3_helpers.capture.transformers_backend import batches, capture, capture_record
from eagle3_helpers.errors import CheckRefused
from eagle3_helpers.states.format import read_state
from eagle3_helpers.states.inventory import take_inventory
from eagle3_helpers.states.quarantine import quarantine
from eagle3_helpers.states.store import Store
from eagle3_helpers.states.verify import verify_store
from eagle3_helpers.target import Target
from tests.makers import make_target


def test_batched_states_are_those_of_each_sample_alone(params, target, store, table):
    numbers = capture(params, target, store, table, table.sample_ids)
    assert (numbers["samples"], numbers["tokens"], numbers["rejected"]) == (len(table), table.tokens, [])
    assert numbers["bytes"] == sum(store.state_file(name).stat().st_size for name in table.sample_ids)
    model = target.load_model("float32", "cpu")
    for sample_id in table.sample_ids:
        ids = torch.from_numpy(table.input_ids(sample_id).copy())
        with torch.inference_mode():
            hidden = model(input_ids=ids[None].long(), output_hidden_states=True).hidden_states
        state = read_state(store.state_file(sample_id), store.record.digest)
        assert torch.equal(state.input_ids, ids)
        torch.testing.assert_close(state.aux, torch.cat([hidden[k][0] for k in (2, 4, 5)], -1), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(state.last, model.model.norm(hidden_before_norm(model, ids)), rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def hidden_before_norm(model, ids):
    """Input of the target's final norm, taken with a hook: shows that `last` is behind it."""
    caught = []
    hook = model.model.norm.register_forward_pre_hook(lambda _module, args: caught.append(args[0][0]))
    model(input_ids=ids[None].long())
    hook.remove()
    return caught[0]


def test_only_what_is_pending_is_captured_and_nothing_pending_loads_no_model(params, target, store, table):
    capture(params, target, store, table, table.sample_ids[:3])
    inventory = take_inventory(store, table)
    assert inventory.ok == table.sample_ids[:3]
    before = {name: store.state_file(name).stat().st_mtime_ns for name in inventory.ok}
    capture(params, target, store, table, inventory.missing)
    assert before == {name: store.state_file(name).stat().st_mtime_ns for name in before}
    assert take_inventory(store, table).complete
    assert capture(params, None, store, table, [])["samples"] == 0


def test_batches_hold_every_sample_once_and_keep_their_padded_size(table):
    found = batches(table.sample_ids, table, 70)
    assert sorted(name for batch in found for name in batch) == sorted(table.sample_ids)
    lengths = [[int(table.lengths[table.row(name)]) for name in batch] for batch in found]
    assert all(len(batch) * max(batch) <= 70 for batch in lengths)
    assert len(found) < len(table)
    assert batches(table.sample_ids[:2], table, 1) == [[table.sample_ids[1]], [table.sample_ids[0]]]


def test_a_sample_with_nan_is_named_and_not_stored(params, table, tmp_path):
    folder = make_target(tmp_path / "spoilt")
    weights = load_file(folder / "model.safetensors")
    spoilt = int(table.input_ids(table.sample_ids[4])[3])
    weights["model.embed_tokens.weight"][spoilt] = torch.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    target = Target(params.target.model_copy(update={"path": str(folder)}))
    store = Store.create(params.store_folder, capture_record(params, target))
    numbers = capture(params, target, store, table, table.sample_ids)
    bad = {name for name in table.sample_ids if spoilt in table.input_ids(name)}
    assert table.sample_ids[4] in bad and len(bad) < len(table)
    assert {item["sample_id"] for item in numbers["rejected"]} == bad
    assert {item["kind"] for item in numbers["rejected"]} == {"non-finite"}
    assert set(take_inventory(store, table).missing) == bad


def test_another_target_or_other_boundaries_never_fill_the_same_store(params, store, table, tmp_path):
    other = Target(params.target.model_copy(update={"path": str(make_target(tmp_path / "target", seed=1))}))
    with pytest.raises(CheckRefused, match="identity"):
        Store.create(store.folder, capture_record(params, other))
    moved = Target(params.target.model_copy(update={"boundaries": [1, 4, 5]}))
    with pytest.raises(CheckRefused, match="boundaries"):
        Store.create(store.folder, capture_record(params, moved))


def test_a_target_that_lacks_a_weight_is_refused(params, store, table, tmp_path):
    folder = make_target(tmp_path / "lacking")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.3.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckRefused, match=r"lacks 1 weights .*layers\.3\.mlp\.up_proj"):
        capture(params, Target(params.target.model_copy(update={"path": str(folder)})), store, table, table.sample_ids)
    assert take_inventory(store, table).missing == table.sample_ids


KILLED = """
    import os, signal, sys
    from eagle3_helpers.capture.transformers_backend import capture
    from eagle3_helpers.params import load_params
    from eagle3_helpers.states.store import Store
    from eagle3_helpers.target import Target
    from tests.capture.conftest import LENGTHS
    from tests.states.conftest import make_table

    rename, calls = os.rename, iter(range(4))
    def deadly(*names):
        if next(calls, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        rename(*names)
    os.rename = deadly
    params = load_params(sys.argv[1], {"store.data_root": sys.argv[2], "capture.batch_tokens": 70})
    table, store = make_table(LENGTHS), Store.open(params.store_folder)
    capture(params, Target(params.target), store, table, table.sample_ids)
"""


def test_a_capture_killed_in_the_middle_goes_on_where_it_was(home, params, target, store, table):
    command = [sys.executable, "-c", textwrap.dedent(KILLED), home / "params" / "tiny.yaml", params.store.data_root]
    assert subprocess.run(command).returncode == -signal.SIGKILL
    inventory = take_inventory(store, table)
    assert 0 < len(inventory.ok) < len(table) and inventory.counts["unfinished write"] >= 1
    unlisted = {finding.sample_id for finding in inventory.findings if finding.kind == "unlisted"}
    before = {name: store.state_file(name).stat().st_mtime_ns for name in inventory.ok}
    quarantine(store, inventory.findings)
    inventory = take_inventory(store, table)
    assert inventory.findings == [] and unlisted <= set(inventory.missing)
    capture(params, target, store, table, inventory.missing)
    assert verify_store(store, table).ok
    assert before == {name: store.state_file(name).stat().st_mtime_ns for name in before}
