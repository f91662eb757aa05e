import json
import os

import pytest

from eagle3_helpers.errors import CheckRefused
from eagle3_helpers.states.inventory import take_inventory
from eagle3_helpers.states.manifest import read_manifest
from eagle3_helpers.states.quarantine import quarantine
from eagle3_helpers.states.verify import verify_store
from tests.states.conftest import put_all


def test_a_bad_file_is_moved_with_its_reason_and_captured_again(filled, table):
    bad = table.sample_ids[2]
    content = filled.state_file(bad).read_bytes()[:-7]
    filled.state_file(bad).write_bytes(content)
    moved = quarantine(filled, take_inventory(filled, table).findings)
    assert (moved.files, moved.bytes) == (1, len(content))
    assert (moved.folder / f"{bad}.safetensors").read_bytes() == content
    (reason,) = map(json.loads, (moved.folder / "reasons.jsonl").read_text().splitlines())
    assert (reason["sample_id"], reason["kind"]) == (bad, "truncated")
    assert bad in repr(moved) and bad not in read_manifest(filled)
    assert take_inventory(filled, table).missing == [bad]
    put_all(filled, table, [bad])
    assert verify_store(filled, table).ok


def test_a_lost_file_is_only_taken_off_the_list(filled, table):
    filled.state_file(table.sample_ids[0]).unlink()
    moved = quarantine(filled, take_inventory(filled, table).findings)
    assert moved.files == 0
    inventory = take_inventory(filled, table)
    assert inventory.missing == table.sample_ids[:1] and inventory.findings == []


def test_nothing_to_move_makes_no_folder(filled, table):
    assert quarantine(filled, take_inventory(filled, table).findings).folder is None
    assert not (filled.folder / "quarantine").exists()


def test_a_crash_between_move_and_list_reads_as_missing(filled, table, monkeypatch):
    bad = table.sample_ids[2]
    filled.state_file(bad).write_bytes(b"")
    findings = take_inventory(filled, table).findings

    def crash(*_):
        raise KeyboardInterrupt

    from eagle3_helpers.states import quarantine as module

    append = module.append_lines
    monkeypatch.setattr(module, "append_lines", lambda path, rows: append(path, rows) if "kind" in rows[0] else crash())
    with pytest.raises(KeyboardInterrupt):
        quarantine(filled, findings)
    assert take_inventory(filled, table).missing == [bad]


def test_a_move_to_another_filesystem_is_refused_and_not_turned_into_a_copy(filled, table, small_disk):
    bad = table.sample_ids[2]
    filled.state_file(bad).write_bytes(b"short")
    findings = take_inventory(filled, table).findings
    os.symlink(small_disk("size=1m"), filled.folder / "quarantine")
    with pytest.raises(CheckRefused, match="cross-device"):
        quarantine(filled, findings)
    assert filled.state_file(bad).read_bytes() == b"short"
