import signal
import subprocess
import sys
import textwrap

import pytest

from eagle3_helpers.durable import TEMPORARY
from eagle3_helpers.errors import CheckRefused
from eagle3_helpers.states.adopt import adopt
from eagle3_helpers.states.inventory import take_inventory
from eagle3_helpers.states.manifest import read_manifest
from eagle3_helpers.states.quarantine import quarantine
from eagle3_helpers.states.store import Store
from eagle3_helpers.states.verify import verify_store
from eagle3_helpers.states.writer import StateWriter
from tests.states.conftest import make_record, make_state, make_table, put_all


def files(store):
    return {path.name: path.stat().st_mtime_ns for path in store.states.rglob("*") if path.is_file()}


def test_what_is_put_is_stored_listed_and_counted(store, table):
    writer = put_all(store, table)
    assert (writer.samples, writer.tokens) == (len(table), table.tokens)
    manifest = read_manifest(store)
    assert {name: entry.n_tokens for name, entry in manifest.items()} == dict(
        zip(table.sample_ids, table.lengths.tolist(), strict=True)
    )
    assert writer.bytes == sum(store.state_file(name).stat().st_size for name in table.sample_ids)
    assert verify_store(store, table).ok


@pytest.mark.parametrize("threads", [1, 3])
def test_a_disk_that_fills_up_leaves_whole_files_and_the_rest_is_done_later(small_disk, threads):
    disk = small_disk("size=400k")
    ballast = disk / "ballast"
    store = Store.create(disk / "tiny", make_record(hidden_size=256))
    table = make_table([20] * 10)  # 20 tokens x 4 x 256 x 2 bytes: 41 kB a sample
    ballast.write_bytes(bytes(150_000))
    with pytest.raises(CheckRefused, match=r"No space left on device; needed \d.* bytes, free \d.* bytes") as refusal:
        put_all(store, table, threads=threads)
    assert str(store.states) in refusal.value.what
    kept = files(store)
    assert 3 <= len(kept) < 10 and not any(name.startswith(TEMPORARY) for name in kept)
    inventory = take_inventory(store, table)
    assert len(inventory.ok) + inventory.counts["unlisted"] == len(kept) and len(inventory.ok) >= 3
    ballast.unlink()
    subprocess.run(["mount", "-o", "remount,size=2m", disk], check=True)
    adopt(store, table, inventory.findings)  # another thread's line may have found the disk full after its file
    put_all(store, table, inventory.missing)
    assert verify_store(store, table).ok
    assert kept.items() <= files(store).items()


def test_the_reserve_stays_free(small_disk):
    disk = small_disk("size=400k")
    store, table = Store.create(disk / "tiny", make_record(hidden_size=256)), make_table([20] * 10)
    with pytest.raises(CheckRefused, match=r"250\.00 kB must stay free"):
        put_all(store, table, reserve=250_000)
    assert 0 < len(files(store)) < 5


def test_a_volume_that_turns_read_only_stops_the_writer(small_disk, table):
    disk = small_disk("size=1m")
    store = Store.create(disk / "tiny", make_record())
    put_all(store, table, table.sample_ids[:2])
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    with pytest.raises(CheckRefused, match="Read-only"):
        put_all(store, table, table.sample_ids[2:])
    assert len(files(store)) == 2


def test_a_failure_of_the_caller_leaves_what_was_put(store, table):
    state = make_state(table, table.sample_ids[0])
    with pytest.raises(ZeroDivisionError), StateWriter(store, 1, 0) as writer:
        writer.put(table.sample_ids[0], state.input_ids, state.aux, state.last)
        _ = 1 / 0
    assert take_inventory(store, table).ok == table.sample_ids[:1]


KILLED = """
    import os, signal, sys
    from pathlib import Path
    from eagle3_helpers.states import writer
    from eagle3_helpers.states.store import Store
    from tests.states.conftest import make_table, put_all

    def deadly(call, allowed):
        calls = iter(range(allowed))
        def killing(*args, **kwargs):
            if next(calls, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)
        return killing

    if sys.argv[2] == "before the rename":
        os.rename = deadly(os.rename, 3)
    else:
        writer.append_lines = deadly(writer.append_lines, 3)
    put_all(Store.open(Path(sys.argv[1])), make_table(), threads=1)
"""


@pytest.mark.parametrize(
    ("moment", "left_over"), [("before the rename", "unfinished write"), ("before the line", "unlisted")]
)
def test_a_writer_killed_in_the_middle_is_mended_and_resumed(store, table, moment, left_over):
    child = subprocess.run([sys.executable, "-c", textwrap.dedent(KILLED), store.folder, moment])
    assert child.returncode == -signal.SIGKILL
    before, inventory = files(store), take_inventory(store, table)
    assert inventory.ok == table.sample_ids[:3]
    assert [(f.sample_id, f.kind) for f in inventory.findings] == [(table.sample_ids[3], left_over)]
    adoption = adopt(store, table, inventory.findings)
    assert [entry.sample_id for entry in adoption.adopted] == table.sample_ids[3:4] * (left_over == "unlisted")
    quarantine(store, [finding for finding in inventory.findings if finding.kind != "unlisted"])
    inventory = take_inventory(store, table)
    assert inventory.findings == []
    put_all(store, table, inventory.missing)
    assert verify_store(store, table).ok
    after = files(store)
    assert all(after[name] == mtime for name, mtime in before.items() if not name.startswith(TEMPORARY))
