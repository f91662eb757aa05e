"""NVML as far as the runbook asks it, with devices that a test describes; errors are the binding's own classes."""

from types import SimpleNamespace

import pynvml

from eagle3_helpers.recover import gpus

GIB = 2**30


def device(uuid: str = "GPU-0a", name: str = "H200", used=0, total=80 * GIB, processes=(), mig=(), rate=0):
    """`used` may be an error to raise; `processes` are (pid, bytes or None), or an error; `mig` are devices."""
    return SimpleNamespace(uuid=uuid, name=name, used=used, total=total, processes=processes, mig=list(mig), rate=rate)


class FakeNvml:
    nvmlMemory_v2 = pynvml.nvmlMemory_v2

    def __init__(self, *devices, init_error: Exception | None = None):
        """A device may be an error, raised when its handle is asked for."""
        self.devices, self.init_error = devices, init_error
        vars(self).update({name: value for name, value in vars(pynvml).items() if name.startswith("NVMLError")})

    def nvmlInit(self):
        _give(self.init_error)

    def nvmlShutdown(self):
        pass

    def nvmlDeviceGetCount(self):
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index):
        return _give(self.devices[index])

    def nvmlDeviceGetUUID(self, handle):
        return handle.uuid

    def nvmlDeviceGetName(self, handle):
        return handle.name

    def nvmlDeviceGetMemoryInfo(self, handle, version=None):
        assert version == self.nvmlMemory_v2
        return SimpleNamespace(used=_give(handle.used), total=handle.total)

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in _give(handle.processes)]

    def nvmlDeviceGetUtilizationRates(self, handle):
        return SimpleNamespace(gpu=handle.rate)

    def nvmlDeviceGetMaxMigDeviceCount(self, handle):
        return max(len(handle.mig), 7 if handle.mig else 0)

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle, number):
        if number >= len(handle.mig):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return handle.mig[number]


def shown_gpus(monkeypatch):
    """A function: shown(*devices) makes these the GPUs of this machine, in its own process namespace."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpus, "_pid_namespace", lambda: gpus.INITIAL_PID_NAMESPACE)
    return lambda *devices, **options: monkeypatch.setattr(gpus, "nvml", lambda: FakeNvml(*devices, **options))


def error(name: str) -> Exception:
    """E.g. error("NOT_SUPPORTED"): the binding turns the code into its class."""
    return pynvml.NVMLError(getattr(pynvml, f"NVML_ERROR_{name}"))


def _give(value):
    if isinstance(value, Exception):
        raise value
    return value
