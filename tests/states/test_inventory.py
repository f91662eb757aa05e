import os
import socket
import subprocess
import sys

import pytest

from eagle3_helpers.durable import append_lines
from eagle3_helpers.errors import CheckRefused
from eagle3_helpers.states.inventory import check_complete, check_usable, take_inventory
from eagle3_helpers.states.manifest import new_entry, new_manifest_file, read_manifest
from eagle3_helpers.states.quarantine import quarantine
from tests.states.conftest import make_table, put_all, table_of


def kinds(inventory):
    return {(finding.sample_id, finding.kind) for finding in inventory.findings}


def test_every_class_is_found_and_the_classes_add_up(store, table):
    a, b, c, d, e, f = table.sample_ids
    other = make_table([4], seed=1)
    put_all(store, table, [a, b, c, d, e])
    put_all(store, other)
    with open(store.state_file(b), "ab") as file:
        file.truncate(100)
    store.state_file(c).unlink()
    (store.folder / "manifest").rename(store.folder / "away")
    for path in (store.folder / "away").glob("*.jsonl"):
        lines = [line for line in path.read_text().splitlines(keepends=True) if e not in line]
        (store.folder / "manifest").mkdir(exist_ok=True)
        (store.folder / "manifest" / path.name).write_text("".join(lines))
    entry = read_manifest(store)[d]
    append_lines(new_manifest_file(store), [entry._replace(n_tokens=99, time=entry.time + 1)._asdict()])
    stale = store.state_file(f).parent / f".writing-{f}.safetensors~{socket.gethostname()}~999999999~00"
    stale.parent.mkdir(exist_ok=True)
    stale.write_bytes(b"half")

    inventory = take_inventory(store, table)
    assert inventory.ok == [a] and inventory.missing == [c, f]
    assert kinds(inventory) == {
        (b, "truncated"),
        (c, "missing"),
        (d, "wrong length"),
        (e, "unlisted"),
        (f, "unfinished write"),
        (other.sample_ids[0], "orphan"),
    }
    assert not inventory.complete
    counts = inventory.counts
    assert sum(counts[kind] for kind in ("ok", "missing", "truncated", "wrong length", "unlisted")) == len(table)
    assert "1 of 6 samples are stored" in repr(inventory) and "truncated" in inventory._repr_html_()


def test_a_lost_manifest_means_neither_all_done_nor_start_again(filled, table):
    (path,) = (filled.folder / "manifest").glob("*.jsonl")
    path.write_bytes(b"")
    inventory = take_inventory(filled, table)
    assert inventory.ok == inventory.missing == []
    assert inventory.counts["unlisted"] == len(table)


def test_missing_samples_can_be_captured_but_a_damaged_one_stands_in_the_way(store, table):
    put_all(store, table, table.sample_ids[:4])
    inventory = take_inventory(store, table)
    assert check_usable(inventory).ok
    with pytest.raises(CheckRefused, match=r"samples stored: 4 \(expected 6\)"):
        check_complete(inventory).require()
    put_all(store, table)
    assert check_complete(take_inventory(store, table)).ok
    store.state_file(table.sample_ids[0]).write_bytes(b"short")
    with pytest.raises(CheckRefused, match=r"truncated: 1 .*01_recover"):
        check_usable(take_inventory(store, table)).require()


def test_an_empty_store_misses_everything_and_a_full_one_nothing(store, table):
    assert take_inventory(store, table).missing == table.sample_ids
    put_all(store, table)
    assert take_inventory(store, table).complete


def test_reordered_or_fewer_samples_find_their_own_files(filled, table):
    order = [3, 1, 0]
    moved = table_of([table.input_ids(table.sample_ids[n]) for n in order])
    inventory = take_inventory(filled, moved)
    assert inventory.ok == [table.sample_ids[n] for n in order]
    assert inventory.counts["orphan"] == 3


def test_a_temporary_file_of_a_running_writer_is_let_be(store, table):
    folder = store.state_file(table.sample_ids[0]).parent
    folder.mkdir(parents=True)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    path = folder / f".writing-{table.sample_ids[0]}.safetensors~{socket.gethostname()}~{child.pid}~00"
    path.write_bytes(b"half")
    try:
        assert take_inventory(store, table).findings == []
        os.utime(path, (1, 1))  # older than that process: of an earlier one with the same number
        assert take_inventory(store, table).counts["unfinished write"] == 1
    finally:
        child.communicate(b"\n")
    os.utime(path)
    assert take_inventory(store, table).counts["unfinished write"] == 1


def test_a_fresh_temporary_file_of_another_host_is_let_be(store, table):
    folder = store.state_file(table.sample_ids[0]).parent
    folder.mkdir(parents=True)
    path = folder / f".writing-{table.sample_ids[0]}.safetensors~elsewhere~{os.getpid()}~00"
    path.write_bytes(b"half")
    assert take_inventory(store, table).findings == []
    os.utime(path, (1, 1))
    assert take_inventory(store, table).counts["unfinished write"] == 1


def test_orphans_stay_where_they_are(filled, table):
    few = make_table([4], seed=1)
    inventory = take_inventory(filled, few)
    assert inventory.counts["orphan"] == len(table)
    assert quarantine(filled, inventory.findings).files == 0
    assert take_inventory(filled, table).complete


@pytest.mark.parametrize("name", ["note.txt", "ffffffffffffffff.safetensors"])
def test_a_stray_file_is_an_orphan(filled, table, name):
    folder = filled.state_file(table.sample_ids[0]).parent
    folder.joinpath(name).write_bytes(b"x")
    inventory = take_inventory(filled, table)
    assert inventory.complete
    assert [(f.kind, f.path) for f in inventory.findings] == [("orphan", str(folder / name))]


def test_an_entry_without_a_file_and_without_a_sample_is_nothing(filled, table):
    append_lines(new_manifest_file(filled), [new_entry("ab" * 8, 3, b"x")._asdict()])
    inventory = take_inventory(filled, table)
    assert inventory.complete and inventory.findings == []
