"""Energy counters of a machine: NVML's of a GPU, and RAPL's of a processor."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch

POWERCAP = Path("/sys/class/powercap")

EnergyReader = Callable[[], float]
"""Reads the joules that a device has used since some moment; the counter never falls."""


def find_energy_reader(device: torch.device) -> EnergyReader | None:
    """Return what reads the energy of a device, without that of the rest of the machine; None if
    it has no counter.
    """
    return find_gpu_reader(device) if device.type == "cuda" else find_cpu_reader()


def find_gpu_reader(device: torch.device) -> EnergyReader | None:
    """Return the reader of a GPU's counter, by NVML."""
    if find_spec("pynvml") is None:
        return None
    pynvml = import_module("pynvml")
    try:
        pynvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        handle = pynvml.nvmlDeviceGetHandleByUUID(
            uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
        )
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except pynvml.NVMLError:
        return None
    return lambda: float(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3


def find_cpu_reader(folder: Path = POWERCAP) -> EnergyReader | None:
    """Return the reader of the counters of all processors, by RAPL; None if there are none or
    this user may not read them.
    """
    try:
        counters = [
            RaplCounter(path)
            for path in sorted(folder.glob("intel-rapl:*"))
            if path.name.count(":") == 1
        ]
    except OSError:
        return None
    return (lambda: sum(counter.read_joules() for counter in counters)) if counters else None


class RaplCounter:
    """The counter of one processor, which begins again at 0 when it is full."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "energy_uj"
        self.range = int((folder / "max_energy_range_uj").read_text())
        self.last = self._read_microjoules()
        self.total = 0

    def _read_microjoules(self) -> int:
        return int(self.path.read_text())

    def read_joules(self) -> float:
        """Return the joules since this object was made. Between two calls the counter may begin
        again once.
        """
        now = self._read_microjoules()
        step = now - self.last
        self.total += step if step >= 0 else step + self.range
        self.last = now
        return self.total / 1e6
