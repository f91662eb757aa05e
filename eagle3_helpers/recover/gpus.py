"""What holds the GPUs, read through NVML (`nvidia-ml-py`, the module `pynvml`).

Unknown is never zero: memory that cannot be read, or memory in use that no listed process explains, keeps a GPU out of
the free set. A process id counts as known only where it provably means the same process here: inside a container NVML
reports ids of the host, which may be nobody's here or, worse, somebody else's.

Verdicts: "free", "ours" (only processes of this run hold it), "foreign", "occupied, owner unknown", "unreadable".
Nothing is changed or stopped here.
"""

import html
import os
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import psutil

from eagle3_helpers.display import Table, bytes_text
from eagle3_helpers.errors import BadParams
from eagle3_helpers.recover.processes import Identity, identify, trainers
from eagle3_helpers.runs import Run

IDLE_BYTES = 64 * 2**20  # what an idle device may show as used beyond the driver's reserve
INITIAL_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO of the Linux kernel
NOT_VISIBLE = "owner not visible from here"


def nvml() -> ModuleType:
    """The NVML binding; the one place where tests put a fake."""
    import pynvml

    return pynvml


@dataclass(frozen=True)
class GpuProcess:
    """`used` in bytes, None where NVML does not say; `identity` None where the owner is not visible from here."""

    pid: int
    used: int | None
    identity: Identity | None

    def __str__(self) -> str:
        owner = self.identity.command if self.identity else NOT_VISIBLE
        return f"{self.pid} ({'N/A' if self.used is None else bytes_text(self.used)}): {owner}"


@dataclass(frozen=True)
class Gpu:
    """One device, or one MIG instance of it (`mig` is its number there). Memory in bytes, None where unknown."""

    index: int  # NVML's, which need not be CUDA's
    uuid: str
    name: str
    used: int | None = None
    total: int | None = None
    utilisation: int | None = None  # per cent; 0 does not mean free
    processes: list[GpuProcess] = field(default_factory=list)
    verdict: str = "unreadable"
    note: str = ""
    mig: int | None = None

    @property
    def label(self) -> str:
        return str(self.index) if self.mig is None else f"{self.index}.{self.mig}"

    @property
    def memory(self) -> str:
        if self.used is not None:
            return f"{bytes_text(self.used)} of {bytes_text(self.total)}"
        known = [process.used for process in self.processes if process.used is not None]
        return f"unknown, at least {bytes_text(sum(known))}" if known else "unknown"


@dataclass(frozen=True)
class Gpus:
    """All that NVML shows, and one sentence where that is not the whole story."""

    gpus: list[Gpu]
    sentence: str = ""

    @property
    def free(self) -> list[Gpu]:
        return [gpu for gpu in self.gpus if gpu.verdict == "free"]

    def table(self) -> Table:
        cuda = {gpu.uuid: number for number, gpu in enumerate(self.visible())}
        rows = [
            [
                gpu.label,
                str(cuda.get(gpu.uuid, "hidden")),
                gpu.uuid,
                gpu.name,
                gpu.memory,
                "unknown" if gpu.utilisation is None else f"{gpu.utilisation} %",
                gpu.verdict,
                "; ".join([*map(str, gpu.processes), *([gpu.note] if gpu.note else [])]),
            ]
            for gpu in self.gpus
        ]
        return Table(["NVML", "CUDA", "UUID", "name", "memory used", "busy", "verdict", "held by"], rows, "GPUs")

    def visible(self) -> list[Gpu]:
        """In CUDA's order, as CUDA_VISIBLE_DEVICES of this process chooses them."""
        return visible_gpus(self.gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))

    def __repr__(self) -> str:
        return "\n".join([*([repr(self.table())] if self.gpus else []), *([self.sentence] if self.sentence else [])])

    def _repr_html_(self) -> str:
        return (self.table()._repr_html_() if self.gpus else "") + (
            f"<p>{html.escape(self.sentence)}</p>" if self.sentence else ""
        )


def describe_gpus(run: Run | None = None) -> Gpus:
    """Every GPU of this machine; with a run, its own processes are told apart. Never raises for what NVML cannot do."""
    library = nvml()
    try:
        library.nvmlInit()
    except library.NVMLError as error:
        return Gpus([], _no_driver(library, error))
    try:
        ours = {identity.pid for identity in trainers(run)} if run else set()
        gpus = []
        for index in range(library.nvmlDeviceGetCount()):
            gpus += _device(library, index, ours)
    except library.NVMLError as error:
        return Gpus([], f"NVML stopped answering ({error}); see `dmesg` for Xid messages.")
    finally:
        library.nvmlShutdown()
    return Gpus(
        gpus, _order_warning(gpus) if gpus else "The driver runs and shows no GPU: everything here runs on the CPU."
    )


def visible_gpus(gpus: list[Gpu], chosen: str | None) -> list[Gpu]:
    """What CUDA would number 0, 1, ... under this value of CUDA_VISIBLE_DEVICES (None: not set).

    Entries are NVML indices, or UUIDs (`GPU-...`, `MIG-...`), which may be cut short where that stays unique. The list ends at
    the first entry that names no GPU, so empty and -1 show none. Raises BadParams for a short UUID that fits several.
    """
    devices = [gpu for gpu in gpus if gpu.mig is None]
    if chosen is None:
        return devices
    found = []
    for entry in (part.strip() for part in chosen.split(",")):
        if entry.isdecimal():
            matches = [gpu for gpu in devices if gpu.index == int(entry)]
        else:
            matches = [gpu for gpu in gpus if entry.startswith(("GPU-", "MIG-")) and gpu.uuid.startswith(entry)]
        if len(matches) > 1:
            raise BadParams(
                f"CUDA_VISIBLE_DEVICES entry {entry} fits {', '.join(gpu.uuid for gpu in matches)}.",
                "Give more of the UUID.",
            )
        if not matches:
            break
        found += matches
    return found


def _device(library, index: int, ours: set[int]) -> list[Gpu]:
    """The device and its MIG instances. A device that is lost is still a row."""
    try:
        handle = library.nvmlDeviceGetHandleByIndex(index)
        uuid, name = library.nvmlDeviceGetUUID(handle), library.nvmlDeviceGetName(handle)
    except library.NVMLError as error:
        return [Gpu(index, "unknown", "unknown", note=f"unreadable: {error}")]
    instances = []
    for number in range(_asked(library, library.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
        instance = _asked(library, library.nvmlDeviceGetMigDeviceHandleByIndex, handle, number)
        if instance is not None:
            mig_uuid = library.nvmlDeviceGetUUID(instance)
            instances.append(_read(library, instance, ours, index, mig_uuid, f"{name} MIG", number))
    return [_read(library, handle, ours, index, uuid, name, None), *instances]


def _read(library, handle, ours: set[int], index: int, uuid: str, name: str, mig: int | None) -> Gpu:
    used = total = None
    note = ""
    try:
        memory = library.nvmlDeviceGetMemoryInfo(handle, version=library.nvmlMemory_v2)  # v2 leaves the reserve out
        used, total = memory.used, memory.total
    except library.NVMLError_NotSupported:
        system = psutil.virtual_memory()
        note = f"unified memory; system memory {bytes_text(system.available)} free of {bytes_text(system.total)}"
    except library.NVMLError_NoPermission:
        note = "MIG, no permission"
    except library.NVMLError as error:
        return Gpu(index, uuid, name, note=f"unreadable: {error}", mig=mig)
    listed = _asked(library, library.nvmlDeviceGetComputeRunningProcesses, handle)
    rates = _asked(library, library.nvmlDeviceGetUtilizationRates, handle)
    processes = [
        GpuProcess(entry.pid, _known(entry.usedGpuMemory), identify(entry.pid) if _means_ours(entry.pid) else None)
        for entry in listed or []
    ]
    return Gpu(
        index,
        uuid,
        name,
        used,
        total,
        rates and rates.gpu,
        processes,
        _verdict(used, listed is not None, processes, ours),
        note,
        mig,
    )


def _verdict(used: int | None, listed: bool, processes: list[GpuProcess], ours: set[int]) -> str:
    if processes:
        if any(process.identity is None for process in processes):
            return "occupied, owner unknown"
        return "ours" if all(process.pid in ours for process in processes) else "foreign"
    if used is None or not listed:
        return "unreadable"
    return "free" if used <= IDLE_BYTES else "occupied, owner unknown"


def _means_ours(pid: int) -> bool:
    """Whether this id, as NVML reports it, names a process of this machine's view: always in the initial namespace,
    else only where that process holds an NVIDIA device file."""
    if _pid_namespace() == INITIAL_PID_NAMESPACE:
        return True
    try:
        return any(str(link.readlink()).startswith("/dev/nvidia") for link in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return "unknown"


def _known(used: int | None) -> int | None:
    return None if used is None or used >= 2**63 else used  # 2**64-1 stands for "not available"


def _asked(library, question, *arguments):
    """The answer, or None where this device cannot give it."""
    try:
        return question(*arguments)
    except library.NVMLError:
        return None


def _no_driver(library, error) -> str:
    if isinstance(error, library.NVMLError_LibraryNotFound | library.NVMLError_DriverNotLoaded):
        return f"No NVIDIA driver on this machine ({error}): everything here runs on the CPU."
    if isinstance(error, library.NVMLError_LibRmVersionMismatch):
        return "The NVIDIA driver and its library differ in version: reboot, or unload and reload the nvidia module."
    return f"NVML does not start ({error}): run nvidia-smi and mend what it names before using a GPU."


def _order_warning(gpus: list[Gpu]) -> str:
    """CUDA sorts unlike GPUs by speed unless told otherwise, so its numbers need not be NVML's."""
    if len({gpu.name for gpu in gpus if gpu.mig is None}) > 1 and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        return (
            "These GPUs differ: set CUDA_DEVICE_ORDER=PCI_BUS_ID, or choose by UUID, or CUDA's numbers may be others."
        )
    return ""
