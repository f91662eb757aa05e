import pytest

from eagle3_helpers.durable import append_lines
from eagle3_helpers.errors import CheckRefused
from eagle3_helpers.states.inventory import take_inventory
from eagle3_helpers.states.manifest import manifest_digest, new_entry, new_manifest_file, read_manifest
from eagle3_helpers.states.store import Store
from tests.states.conftest import make_record, make_table, put_all


def one_manifest(store):
    (path,) = (store.folder / "manifest").glob("*.jsonl")
    return path


def test_a_torn_last_line_is_dropped_and_nothing_is_glued_to_it(store):
    table = make_table([4] * 42)
    put_all(store, table, table.sample_ids[:41])
    path = one_manifest(store)
    with open(path, "a") as file:
        file.write('{"sample_id": "0123456789abcdef", "n_to')
    assert len(read_manifest(store)) == 41
    assert take_inventory(store, table).missing == table.sample_ids[41:]
    append_lines(path, [new_entry(table.sample_ids[41], 4, b"x")._asdict()])
    assert len(read_manifest(store)) == 42


def test_a_bad_line_in_the_middle_is_an_error_with_its_number(filled):
    path = one_manifest(filled)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:2], '{"sample_id": "01\n', *lines[2:]]))
    with pytest.raises(CheckRefused, match=f"{path.name}, line 3"):
        read_manifest(filled)
    path.write_text("".join([*lines[:3], '{"sample_id": "01"}\n', *lines[3:]]))
    with pytest.raises(CheckRefused, match=f"{path.name}, line 4"):
        read_manifest(filled)


def test_the_latest_entry_counts_and_a_cancelled_one_does_not(store):
    first = new_entry("ab" * 8, 3, b"one")
    second = new_entry("ab" * 8, 3, b"two", first)
    assert second.time > first.time
    append_lines(new_manifest_file(store), [second._asdict()])
    append_lines(new_manifest_file(store), [first._asdict()])
    assert read_manifest(store) == {second.sample_id: second}
    append_lines(new_manifest_file(store), [{"sample_id": "ab" * 8, "removes": second.time, "reason": "r", "time": 1}])
    assert read_manifest(store) == {first.sample_id: first}


def test_a_new_entry_is_later_than_the_old_one_even_if_the_clock_went_back():
    old = new_entry("a", 1, b"")._replace(time=2**62)
    assert new_entry("a", 1, b"", old).time == 2**62 + 1


def test_the_digest_follows_what_is_stored_and_not_order_or_history(filled, table, tmp_path):
    digest = manifest_digest(filled)
    other = Store.create(tmp_path / "data" / "other", make_record())
    for sample_id in reversed(table.sample_ids):
        put_all(other, table, [sample_id])
    gone = new_entry("ab" * 8, 3, b"gone")
    append_lines(new_manifest_file(other), [gone._asdict()])
    assert manifest_digest(other) != digest
    append_lines(new_manifest_file(other), [{"sample_id": gone.sample_id, "removes": gone.time, "time": 2}])
    assert manifest_digest(other) == digest
