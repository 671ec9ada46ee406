"""This machine and its devices.

``machine`` asks the operating system; ``parse_devices`` reads what ``llama-server
--list-devices`` printed (running it is the engine's business); ``nvidia_devices`` asks NVML for
what only the driver knows: its version, power, clocks, other processes. Nothing here names a
person or a network. What cannot be read is empty or None, never an error.

Example:
    record = machine(parse_devices(text))
    nvidia_devices()[0].processes
"""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from browndwarf.errors import DeviceError
from browndwarf.records import DeviceRecord, MachineRecord
from browndwarf.units import MIB

_DEVICE = re.compile(
    r"^\s*(?P<id>[A-Za-z]+\d*):\s*(?P<name>.+?)\s*"
    r"\((?P<total>\d+) MiB, (?P<free>\d+) MiB free\)\s*$",
    re.MULTILINE,
)
_BACKENDS = {
    "cuda": "cuda",
    "rocm": "rocm",
    "hip": "rocm",
    "vulkan": "vulkan",
    "metal": "metal",
    "mtl": "metal",
    "sycl": "sycl",
    "blas": "cpu",
    "cpu": "cpu",
}


@dataclass(frozen=True, slots=True)
class ListedDevice:
    """One device as llama.cpp lists it; ``id`` is what ``--device`` takes, such as CUDA0."""

    id: str
    name: str
    backend: str
    total_mib: float
    free_mib: float

    @property
    def record(self) -> DeviceRecord:
        """As records keep it."""
        return DeviceRecord(
            name=f"{self.id}: {self.name}",
            backend=self.backend,
            total_mib=self.total_mib,
            free_mib=self.free_mib,
        )


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that holds device memory; ``mib`` is None where the driver does not tell."""

    pid: int
    name: str
    mib: float | None


@dataclass(frozen=True, slots=True)
class NvidiaDevice:
    """What NVML knows of one device. None where the driver does not tell."""

    index: int
    name: str
    driver: str
    total_mib: float
    free_mib: float
    power_w: float | None
    power_limit_w: float | None
    temperature_c: float | None
    sm_clock_mhz: int | None
    memory_clock_mhz: int | None
    processes: tuple[GpuProcess, ...]


def parse_devices(text: str) -> list[ListedDevice]:
    """The devices in the output of ``--list-devices``; empty for "(none)"."""
    found = []
    for match in _DEVICE.finditer(text):
        kind = re.sub(r"\d+$", "", match["id"]).lower()
        found.append(
            ListedDevice(
                id=match["id"],
                name=match["name"],
                backend=_BACKENDS.get(kind, "other"),
                total_mib=float(match["total"]),
                free_mib=float(match["free"]),
            )
        )
    return found


def choose_device(devices: Sequence[ListedDevice], wanted: str) -> ListedDevice:
    """The device with this id (``CUDA0``) or position (``0``).

    Raises:
        DeviceError: there is none.
    """
    for position, device in enumerate(devices):
        if wanted.lower() in (device.id.lower(), str(position)):
            return device
    listed = ", ".join(device.id for device in devices) or "none"
    raise DeviceError(
        f"no device {wanted!r}",
        why=f"this llama.cpp build lists: {listed}",
        fix="name one of these, or state the memory with --vram",
    )


def machine(devices: Sequence[ListedDevice] = ()) -> MachineRecord:
    """This machine as records keep it."""
    return MachineRecord(
        os=f"{platform.system()} {platform.release()}".strip(),
        cpu=cpu_name(),
        cores=os.cpu_count() or 1,
        ram_mib=round(psutil.virtual_memory().total / MIB, 1),
        python=platform.python_version(),
        devices=tuple(device.record for device in devices),
    )


def free_ram_mib() -> float:
    """RAM that programs can have without swapping."""
    return float(psutil.virtual_memory().available) / MIB


def cpu_name() -> str:
    """The processor's name as its maker gives it, else the architecture."""
    info = _read(Path("/proc/cpuinfo"))
    match = re.search(r"^model name\s*:\s*(.+)$", info, re.MULTILINE)
    return match[1].strip() if match else platform.processor() or platform.machine()


def cpu_flags() -> frozenset[str]:
    """Instruction sets in Linux's words: ``avx2``, ``avx512f``, ``asimddp`` (ARM dot product).

    Elsewhere only these three are told apart.
    """
    info = _read(Path("/proc/cpuinfo"))
    match = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", info, re.MULTILINE)
    if match:
        return frozenset(match[1].split())
    if platform.machine().lower() in ("arm64", "aarch64"):
        return frozenset({"asimddp"})
    if sys.platform == "win32":
        import ctypes

        has = ctypes.windll.kernel32.IsProcessorFeaturePresent
        return frozenset(name for code, name in ((40, "avx2"), (41, "avx512f")) if has(code))
    return frozenset({"avx2"}) if platform.machine().lower() in ("x86_64", "amd64") else frozenset()


def cpu_governor() -> str:
    """Linux's frequency governor, such as ``powersave``; empty elsewhere."""
    return _read(Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")).strip()


def on_battery() -> bool | None:
    """Whether the machine runs on its battery; None without one."""
    sensor = getattr(psutil, "sensors_battery", None)
    try:
        state = sensor() if sensor is not None else None
    except (OSError, RuntimeError, NotImplementedError):
        return None
    return None if state is None else not state.power_plugged


def nvidia_devices() -> list[NvidiaDevice]:
    """All NVIDIA devices; empty without a driver."""
    with nvml() as lib:
        if lib is None:
            return []
        driver = _text(ask(lib, "nvmlSystemGetDriverVersion"))
        count = ask(lib, "nvmlDeviceGetCount") or 0
        found = [_nvidia(lib, index, driver) for index in range(count)]
        return [device for device in found if device is not None]


@contextmanager
def nvml() -> Iterator[Any]:
    """The started NVML bindings, or None where they or the driver are missing."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:
        # Missing module, missing driver library, permission: all mean "no NVML here".
        yield None
        return
    try:
        yield pynvml
    finally:
        ask(pynvml, "nvmlShutdown")


def _nvidia(lib: Any, index: int, driver: str) -> NvidiaDevice | None:
    handle = ask(lib, "nvmlDeviceGetHandleByIndex", index)
    memory = ask(lib, "nvmlDeviceGetMemoryInfo", handle)
    if handle is None or memory is None:
        return None
    power = ask(lib, "nvmlDeviceGetPowerUsage", handle)
    limit = ask(lib, "nvmlDeviceGetEnforcedPowerLimit", handle)
    return NvidiaDevice(
        index=index,
        name=_text(ask(lib, "nvmlDeviceGetName", handle)),
        driver=driver,
        total_mib=memory.total / MIB,
        free_mib=memory.free / MIB,
        power_w=None if power is None else power / 1000,
        power_limit_w=None if limit is None else limit / 1000,
        temperature_c=ask(lib, "nvmlDeviceGetTemperature", handle, lib.NVML_TEMPERATURE_GPU),
        sm_clock_mhz=ask(lib, "nvmlDeviceGetClockInfo", handle, lib.NVML_CLOCK_SM),
        memory_clock_mhz=ask(lib, "nvmlDeviceGetClockInfo", handle, lib.NVML_CLOCK_MEM),
        processes=gpu_processes(lib, handle),
    )


def gpu_processes(lib: Any, handle: Any) -> tuple[GpuProcess, ...]:
    """Processes that hold memory of a device, compute and graphics, each once."""
    found: dict[int, GpuProcess] = {}
    for query in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses"):
        for entry in ask(lib, query, handle) or ():
            used = getattr(entry, "usedGpuMemory", None)
            mib = None if used is None or used > 2**60 else used / MIB
            found[entry.pid] = GpuProcess(entry.pid, process_name(entry.pid), mib)
    return tuple(found.values())


def process_name(pid: int) -> str:
    """A process's program name; empty when it is not visible."""
    try:
        return str(psutil.Process(pid).name())
    except psutil.Error:
        return ""


def ask(lib: Any, name: str, *args: Any) -> Any:
    """An NVML answer, or None where this binding, driver or device does not give it."""
    try:
        return getattr(lib, name)(*args)
    except Exception:
        # pynvml makes its error classes at run time; every one means "not available".
        return None


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value or "")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
