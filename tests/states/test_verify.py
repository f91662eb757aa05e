import json

import numpy as np
import pytest
import torch

from eagle3_helpers.durable import append_lines
from eagle3_helpers.errors import CheckRefused
from eagle3_helpers.states.format import State, encode_state
from eagle3_helpers.states.inventory import take_inventory
from eagle3_helpers.states.manifest import manifest_digest, new_entry, new_manifest_file
from eagle3_helpers.states.quarantine import quarantine
from eagle3_helpers.states.store import Store
from eagle3_helpers.states.verify import verify_store
from tests.states.conftest import make_record, make_state, make_table, put_all, table_of


def found(verification):
    return {finding.sample_id: finding.kind for finding in verification.findings}


def replace(store, sample_id, content: bytes, n_tokens: int):
    """Puts other bytes under a sample's name, and lists them as if the writer had made them."""
    store.state_file(sample_id).write_bytes(content)
    append_lines(new_manifest_file(store), [new_entry(sample_id, n_tokens, content)._asdict()])


def put_state(store, sample_id, state):
    replace(store, sample_id, encode_state(state, sample_id, store.record.digest), len(state.input_ids))


def test_a_sound_store_passes_and_the_numbers_are_kept(filled, table, tmp_path):
    verification = verify_store(filled, table)
    assert verification.ok and verification.findings == []
    assert verification.totals["tokens"] == table.tokens and verification.totals["files"] == len(table)
    assert verification.totals["bytes"] == sum(filled.state_file(name).stat().st_size for name in table.sample_ids)
    states = [make_state(table, name) for name in table.sample_ids]
    expected = torch.cat([state.last for state in states]).float().norm(dim=1).mean()
    assert verification.norms["last"]["mean"] == pytest.approx(float(expected), rel=1e-5)
    expected = torch.cat([state.aux[:, 8:16] for state in states]).float().norm(dim=1)
    assert verification.norms["h_2"]["p50"] == pytest.approx(float(expected.median()), rel=0.05)
    assert list(verification.norms) == ["h_1", "h_2", "h_4", "last"]
    verification.save(tmp_path / "verification.json")
    saved = json.loads((tmp_path / "verification.json").read_text())
    assert saved["manifest_digest"] == manifest_digest(filled)
    assert set(saved) == {"checks", "totals", "norms", "findings", "manifest_digest"}
    assert "mean norm" in repr(verification) and "<table>" in verification._repr_html_()


def test_seven_ways_to_cut_a_file_are_one_class_and_the_other_files_are_read(store):
    table = make_table([5] * 9)
    put_all(store, table)
    whole = store.state_file(table.sample_ids[0]).read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    shapes = [b"", whole[:4], whole[:40], whole[:header], whole[:-1], whole + b"x", bytes(len(whole))]
    for sample_id, content in zip(table.sample_ids, shapes, strict=False):
        store.state_file(sample_id).write_bytes(content)
    verification = verify_store(store, table)
    assert found(verification) == dict.fromkeys(table.sample_ids[:7], "corrupt")
    assert verification.totals["samples"] == 2
    with pytest.raises(CheckRefused, match="corrupt: 7"):
        verification.checks.require()
    quarantine(store, verification.findings)
    put_all(store, table, take_inventory(store, table).missing)
    assert verify_store(store, table).ok


@pytest.mark.parametrize("place", [-1, -100])
def test_a_flipped_byte_is_found_by_the_hash(filled, table, place):
    path = filled.state_file(table.sample_ids[2])
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    assert take_inventory(filled, table).complete
    assert found(verify_store(filled, table)) == {table.sample_ids[2]: "checksum mismatch"}


def test_two_swapped_files_of_equal_length_are_both_named(filled, table):
    one, other = table.sample_ids[0], table.sample_ids[4]
    first, second = filled.state_file(one).read_bytes(), filled.state_file(other).read_bytes()
    replace(filled, one, second, 5)
    replace(filled, other, first, 5)
    assert take_inventory(filled, table).complete
    assert found(verify_store(filled, table)) == {one: "wrong tokens", other: "wrong tokens"}


def test_states_of_a_prefix_or_of_other_tokens_are_named(filled, table):
    a, b, c, *_ = table.sample_ids
    state = make_state(table, a)
    put_state(filled, a, State(state.input_ids[:3], state.aux[:3], state.last[:3]))
    state = make_state(table, b)
    put_state(filled, b, State(state.input_ids + 1, state.aux, state.last))
    state = make_state(table, c)
    put_state(filled, c, State(state.input_ids, state.aux[-4:], state.last[-4:]))
    assert found(verify_store(filled, table)) == {a: "wrong length", b: "wrong tokens", c: "wrong length"}


def test_nan_inf_other_widths_and_other_captures_are_named(filled, table):
    a, b, c, d, *_ = table.sample_ids
    for sample_id, value in ((a, torch.nan), (b, torch.inf)):
        state = make_state(table, sample_id)
        state.last[1, 3] = value
        put_state(filled, sample_id, state)
    state = make_state(table, c)
    put_state(filled, c, State(state.input_ids, state.last, state.last))
    state = make_state(table, d)
    replace(filled, d, encode_state(state, d, make_record(backend_version="0").digest), 7)
    kinds = {a: "non-finite", b: "non-finite", c: "wrong shape", d: "wrong capture"}
    assert found(verify_store(filled, table)) == kinds


def test_rows_that_no_layer_computes_are_named(filled, table):
    a, b, c, *_ = table.sample_ids
    for sample_id, spoil in (
        (a, lambda state: state.aux[2, 8:16].fill_(0)),
        (b, lambda state: state.last[1].fill_(0.5)),
        (c, lambda state: state.aux[:, :8].copy_(state.aux[:1, :8].clone())),
    ):
        state = make_state(table, sample_id)
        spoil(state)
        put_state(filled, sample_id, state)
    verification = verify_store(filled, table)
    assert found(verification) == dict.fromkeys((a, b, c), "dead rows")
    assert "h_2 is zero" in repr(verification) and "h_1 is the same" in repr(verification)


def test_a_zero_row_of_the_embedding_is_allowed(tmp_path, table):
    (tmp_path / "data").mkdir()
    store = Store.create(tmp_path / "data" / "tiny", make_record(boundaries=[0, 2, 4]))
    put_all(store, table)
    state = make_state(table, table.sample_ids[0])
    state.aux[2, :8] = 0
    put_state(store, table.sample_ids[0], state)
    assert verify_store(store, table).ok


def test_samples_without_entry_or_file_are_missing(filled, table):
    more = table_of([table.input_ids(table.sample_ids[0]), np.arange(4, dtype=np.int32)])
    assert found(verify_store(filled, more)) == {more.sample_ids[1]: "missing"}
    filled.state_file(table.sample_ids[1]).unlink()
    assert found(verify_store(filled, table)) == {table.sample_ids[1]: "missing"}
