"""Stored states against a real (tiny, random) target, and the mistakes that only a recomputation can see."""

import re

import pytest
import torch

from eagle3_helpers.capture.transformers_backend import capture, capture_record
from eagle3_helpers.durable import append_lines
from eagle3_helpers.errors import CheckRefused
from eagle3_helpers.params import load_params
from eagle3_helpers.states.alignment_proof import prove_alignment
from eagle3_helpers.states.format import State, encode_state, read_state
from eagle3_helpers.states.manifest import new_entry, new_manifest_file
from eagle3_helpers.states.store import Store
from eagle3_helpers.states.verify import verify_store
from eagle3_helpers.target import Target
from tests.makers import make_home
from tests.states.conftest import make_table, table_of

LENGTHS = (9, 30, 17, 30, 24, 5, 12)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    make_home(home)
    return home


@pytest.fixture
def captured(home, tmp_path):
    """(store, table, target)"""
    (tmp_path / "data").mkdir()
    params = load_params(home / "params" / "tiny.yaml", {"store.data_root": str(tmp_path / "data")})
    target, table = Target(params.target), make_table(LENGTHS)
    store = Store.create(params.store_folder, capture_record(params, target))
    capture(params, target, store, table, table.sample_ids)
    return store, table, target


def rewrite(store, sample_id, change):
    """Replaces a sample's states by change(state), listed and hashed as if a faulty backend had stored them."""
    state = change(read_state(store.state_file(sample_id), store.record.digest))
    content = encode_state(state, sample_id, store.record.digest)
    store.state_file(sample_id).write_bytes(content)
    append_lines(new_manifest_file(store), [new_entry(sample_id, len(state.input_ids), content)._asdict()])


def test_true_states_are_proved_with_numbers_for_a_plot(captured):
    store, table, target = captured
    proof = prove_alignment(store, table, target, count=4)
    assert proof.ok and proof.findings == []
    assert list(proof.numbers["slots"]) == ["h_2", "h_4", "h_5", "last"]
    for slot in proof.numbers["slots"].values():
        assert slot["own"] > 0.9999 > slot["below"] and slot["relative_error"] < 1e-4
    assert proof.numbers["slots"]["last"]["above"] is None
    assert proof.numbers["head_agreement"] == 1.0
    assert 0 <= proof.numbers["next_token_rate"] < 0.3
    assert "shifted by one" in repr(proof) and "<table>" in proof._repr_html_()


def test_text_of_the_targets_own_is_recognised_and_shifted_rows_are_not(captured, home, tmp_path):
    store, _, target = captured
    model = target.load_model("float32", "cpu")
    torch.manual_seed(0)
    ids = model.generate(
        torch.randint(0, 300, (4, 4)), max_new_tokens=30, min_new_tokens=30, do_sample=False, pad_token_id=0
    )
    table = table_of([row.int().numpy() for row in ids])
    params = load_params(home / "params" / "tiny.yaml", {"store.data_root": str(tmp_path / "data")})
    capture(params, target, store, table, table.sample_ids)
    numbers = prove_alignment(store, table, target, count=4).numbers
    assert numbers["next_token_rate"] > 0.85 > 0.6 > numbers["next_token_rate_shifted"]


def test_swapped_states_of_equal_length_are_both_named_though_every_file_verifies(captured):
    store, table, target = captured
    one, other = table.sample_ids[1], table.sample_ids[3]
    states = {name: read_state(store.state_file(name), store.record.digest) for name in (one, other)}
    rewrite(store, one, lambda state: State(state.input_ids, states[other].aux, states[other].last))
    rewrite(store, other, lambda state: State(state.input_ids, states[one].aux, states[one].last))
    assert verify_store(store, table).ok
    proof = prove_alignment(store, table, target, count=len(table))
    assert {finding.sample_id for finding in proof.findings} == {one, other}
    assert all("nothing of this sample" in finding.detail for finding in proof.findings)
    with pytest.raises(CheckRefused, match=f"{min(one, other)}|{max(one, other)}"):
        proof.checks.require()


def test_swapped_files_are_both_named(captured):
    store, table, target = captured
    one, other = store.state_file(table.sample_ids[1]), store.state_file(table.sample_ids[3])
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)
    proof = prove_alignment(store, table, target, count=len(table))
    assert {f.sample_id: f.kind for f in proof.findings} == {
        table.sample_ids[1]: "wrong tokens",
        table.sample_ids[3]: "wrong tokens",
    }


@torch.inference_mode()
def hidden_states(target, state):
    """h_0..h_N of the sample, and its state before the final norm."""
    model, caught = target.load_model("float32", "cpu"), []
    model.model.norm.register_forward_pre_hook(lambda _module, args: caught.append(args[0][0]))
    out = model(input_ids=state.input_ids[None].long(), output_hidden_states=True)
    return [hidden[0] for hidden in out.hidden_states], caught[0]


@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        ("layers one too high", "h_2 looks like h_3"),
        ("layers one too low", "h_4 looks like h_3"),
        ("rows moved down", r"h_2 looks like h_2 moved by \+1 row"),
        ("last is the layer below", "last looks like h_7"),
        ("last before the norm", "last looks like (h_7|nothing)"),
    ],
)
def test_each_usual_mistake_is_found_and_said(captured, mistake, says):
    store, table, target = captured
    hidden, before_norm = hidden_states(target, read_state(store.state_file(table.sample_ids[1]), store.record.digest))
    changes = {
        "layers one too high": lambda s: State(s.input_ids, torch.cat([hidden[k + 1] for k in (2, 4, 5)], 1), s.last),
        "layers one too low": lambda s: State(s.input_ids, torch.cat([hidden[k - 1] for k in (2, 4, 5)], 1), s.last),
        "rows moved down": lambda s: State(s.input_ids, s.aux.roll(1, 0), s.last.roll(1, 0)),
        "last is the layer below": lambda s: State(s.input_ids, s.aux, hidden[7]),
        "last before the norm": lambda s: State(s.input_ids, s.aux, before_norm),
    }
    rewrite(store, table.sample_ids[1], changes[mistake])
    proof = prove_alignment(store, table, target, count=len(table))
    assert [finding.sample_id for finding in proof.findings] == [table.sample_ids[1]]
    assert re.search(says, proof.findings[0].detail)


def test_samples_of_different_lengths_are_chosen_and_the_seed_decides(captured):
    store, table, target = captured
    proofs = [prove_alignment(store, table, target, count=3, seed=seed).numbers["tokens"] for seed in (0, 0, 1)]
    assert proofs[0] == proofs[1] != proofs[2]


def test_an_empty_store_proves_nothing(captured, tmp_path):
    store, _, target = captured
    with pytest.raises(CheckRefused, match="lists none"):
        prove_alignment(store, make_table((4, 4), seed=9), target, count=2)
