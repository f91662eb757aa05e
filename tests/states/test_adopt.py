import shutil

from eagle3_helpers.states.adopt import adopt
from eagle3_helpers.states.format import State, encode_state
from eagle3_helpers.states.inventory import take_inventory
from eagle3_helpers.states.manifest import manifest_digest
from eagle3_helpers.states.quarantine import quarantine
from eagle3_helpers.states.verify import verify_store
from tests.states.conftest import make_state, make_table, put_all


def test_a_store_that_lost_its_manifest_gets_it_back(filled, table):
    digest = manifest_digest(filled)
    shutil.rmtree(filled.folder / "manifest")
    adoption = adopt(filled, table, take_inventory(filled, table).findings)
    assert len(adoption.adopted) == len(table) and adoption.refused == []
    assert manifest_digest(filled) == digest
    assert verify_store(filled, table).ok


def test_more_files_than_lines_at_once_are_all_listed(store):
    table = make_table([3] * 150)
    put_all(store, table)
    shutil.rmtree(store.folder / "manifest")
    adopt(store, table, take_inventory(store, table).findings)
    assert take_inventory(store, table).complete


def test_unlisted_files_that_are_not_the_samples_are_refused_by_class_and_go_to_quarantine(filled, table):
    a, b, c, d, *good = table.sample_ids
    shutil.rmtree(filled.folder / "manifest")
    filled.state_file(a).write_bytes(filled.state_file(a).read_bytes()[:150])
    state = make_state(table, b)
    filled.state_file(b).write_bytes(encode_state(state, b, "f" * 64))
    state = make_state(table, c)
    other_ids = State(state.input_ids + 1, state.aux, state.last)
    filled.state_file(c).write_bytes(encode_state(other_ids, c, filled.record.digest))
    state = make_state(table, d)
    prefix = State(state.input_ids[:4], state.aux[:4], state.last[:4])
    filled.state_file(d).write_bytes(encode_state(prefix, d, filled.record.digest))

    adoption = adopt(filled, table, take_inventory(filled, table).findings)
    assert sorted(entry.sample_id for entry in adoption.adopted) == sorted(good)
    assert {f.sample_id: f.kind for f in adoption.refused} == {
        a: "corrupt",
        b: "wrong capture",
        c: "wrong tokens",
        d: "wrong length",
    }
    assert "not usable" in repr(adoption)
    assert quarantine(filled, adoption.refused).files == 4
    inventory = take_inventory(filled, table)
    assert sorted(inventory.missing) == sorted([a, b, c, d]) and inventory.findings == []
