import os

import pytest

from eagle3_helpers.durable import write_json
from eagle3_helpers.errors import BadParams
from eagle3_helpers.recover import gpus
from eagle3_helpers.recover.gpus import NOT_VISIBLE, describe_gpus, visible_gpus
from eagle3_helpers.recover.processes import identify
from tests.recover.conftest import WAIT
from tests.recover.fake_nvml import GIB, device, error, shown_gpus


@pytest.fixture
def machine(monkeypatch):
    """machine(*devices): this machine now shows these."""
    shown = shown_gpus(monkeypatch)

    def show(*devices, **options):
        shown(*devices, **options)
        return describe_gpus()

    return show


def no_such_pid() -> int:
    return int(open("/proc/sys/kernel/pid_max").read()) + 1


def test_an_empty_gpu_is_free_and_a_driver_s_few_megabytes_do_not_count(machine):
    found = machine(device("GPU-a"), device("GPU-b", used=3 * 2**20))
    assert [gpu.verdict for gpu in found.gpus] == ["free", "free"]
    assert found.free == found.gpus
    assert found.sentence == ""


@pytest.mark.parametrize("name", ["LIBRARY_NOT_FOUND", "DRIVER_NOT_LOADED"])
def test_no_driver_is_one_sentence(machine, name):
    found = machine(init_error=error(name))
    assert found.gpus == []
    assert found.sentence.startswith("No NVIDIA driver on this machine")
    assert repr(found) == found.sentence
    assert found.sentence in found._repr_html_()


def test_a_driver_and_a_library_that_differ_are_told_with_what_to_do(machine):
    found = machine(init_error=error("LIB_RM_VERSION_MISMATCH"))
    assert "differ in version: reboot, or unload and reload" in found.sentence


def test_memory_that_is_not_supported_is_unknown_and_not_free(machine):
    found = machine(device(used=error("NOT_SUPPORTED"), name="GB10", rate=3))
    assert found.gpus[0].used is None
    assert found.gpus[0].memory == "unknown"
    assert found.free == []
    assert "unified memory; system memory" in repr(found)
    assert "3 %" in repr(found)


def test_a_lost_gpu_is_a_row_of_its_own_and_not_unified_memory(machine):
    found = machine(error("GPU_IS_LOST"), device("GPU-b", used=error("GPU_IS_LOST")), device("GPU-c"))
    assert [gpu.verdict for gpu in found.gpus] == ["unreadable", "unreadable", "free"]
    assert "unified" not in repr(found)
    assert found.free == [found.gpus[2]]


@pytest.mark.parametrize("unknown", [None, 2**64 - 1])
def test_a_process_without_a_memory_figure_is_listed_as_not_available(machine, unknown, start):
    one, two = start("python", "-c", WAIT), start("python", "-c", WAIT)
    found = machine(device(used=error("NOT_SUPPORTED"), processes=[(one.pid, unknown), (two.pid, 2 * GIB)]))
    assert [process.used for process in found.gpus[0].processes] == [None, 2 * GIB]
    assert f"{one.pid} (N/A)" in repr(found)
    assert found.gpus[0].memory == "unknown, at least 2.15 GB"
    assert found.gpus[0].verdict == "foreign"


def test_a_mig_parent_without_permission_shows_its_children(machine):
    children = [device("MIG-1", used=0, total=10 * GIB), device("MIG-2", used=5 * GIB, total=10 * GIB)]
    found = machine(device("GPU-a", used=error("NO_PERMISSION"), mig=children), device("GPU-b"))
    assert [gpu.label for gpu in found.gpus] == ["0", "0.0", "0.1", "1"]
    assert [gpu.verdict for gpu in found.gpus] == ["unreadable", "free", "occupied, owner unknown", "free"]
    assert found.gpus[0].note == "MIG, no permission"


def test_a_process_of_another_namespace_has_no_owner_here(machine, monkeypatch):
    found = machine(device(used=GIB, processes=[(no_such_pid(), GIB)]))
    assert found.gpus[0].verdict == "occupied, owner unknown"
    assert NOT_VISIBLE in repr(found)


def test_in_a_container_an_equal_number_is_not_taken_for_the_same_process(machine, monkeypatch, start):
    bystander = start("python", "-c", WAIT)
    listed = device(used=GIB, processes=[(bystander.pid, GIB)])
    assert machine(listed).gpus[0].verdict == "foreign"
    monkeypatch.setattr(gpus, "_pid_namespace", lambda: "pid:[4026532999]")
    found = machine(listed)
    assert found.gpus[0].verdict == "occupied, owner unknown"
    assert found.gpus[0].processes[0].identity is None


def test_memory_in_use_that_no_process_explains_is_not_free(machine):
    found = machine(device(used=39 * GIB, rate=0))
    assert found.gpus[0].verdict == "occupied, owner unknown"


def test_a_process_list_that_cannot_be_read_is_not_an_empty_one(machine):
    assert machine(device(used=0, processes=error("UNKNOWN"))).gpus[0].verdict == "unreadable"


def test_only_the_run_s_own_trainer_makes_a_gpu_ours(machine, run, start, monkeypatch):
    ours, other = start("python", "-c", WAIT), start("python", "-c", WAIT)
    write_json(run.folder / "training" / "process.json", {"pid": ours.pid, "created": identify(ours.pid).created})
    machine(
        device("GPU-a", used=GIB, processes=[(ours.pid, GIB)]),
        device("GPU-b", used=GIB, processes=[(ours.pid, GIB), (other.pid, GIB)]),
    )
    assert [gpu.verdict for gpu in describe_gpus(run).gpus] == ["ours", "foreign"]
    assert [gpu.verdict for gpu in describe_gpus().gpus] == ["foreign", "foreign"]


def four(machine):
    return machine(*(device(f"GPU-{first}aaaaaaa-{number}") for number, first in enumerate("abcc"))).gpus


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, [0, 1, 2, 3]),
        ("3,1", [3, 1]),
        (" 2 , 0 ", [2, 0]),
        ("", []),
        ("-1", []),
        ("0,-1,1", [0]),
        ("0,7,1", [0]),
        ("GPU-aaaaaaaa-0", [0]),
        ("GPU-b,0", [1, 0]),
        ("GPU-zz", []),
        ("MIG-1", []),
        ("none", []),
        ("1e0", []),
    ],
)
def test_visible_devices_are_read_as_cuda_reads_them(machine, value, expected):
    assert [gpu.index for gpu in visible_gpus(four(machine), value)] == expected


def test_a_short_uuid_that_fits_two_gpus_is_an_error(machine):
    with pytest.raises(BadParams, match=r"GPU-c fits GPU-caaaaaaa-2, GPU-caaaaaaa-3"):
        visible_gpus(four(machine), "GPU-c")


def test_the_table_shows_both_numberings(machine, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    found = machine(device("GPU-a"), device("GPU-b"), device("GPU-c"))
    assert [row[:3] for row in found.table().rows] == [
        ["0", "1", "GPU-a"],
        ["1", "0", "GPU-b"],
        ["2", "hidden", "GPU-c"],
    ]


def test_unlike_gpus_in_cuda_s_own_order_come_with_a_warning(machine, monkeypatch):
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    unlike = [device("GPU-a", name="A100"), device("GPU-b", name="T4")]
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in machine(*unlike).sentence
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert machine(*unlike).sentence == ""


def test_a_driver_without_gpus_says_so(machine):
    assert "shows no GPU" in machine().sentence


def test_this_machine_is_described_whatever_it_has():
    found = describe_gpus()
    assert found.gpus or found.sentence
    assert os.getpid() not in [process.pid for gpu in found.gpus for process in gpu.processes]
