"""What is here, and what is wrong with it: engines, devices, drivers, power.

``examine`` looks; ``findings`` draws conclusions from what was seen, and is pure, so that every
finding can be tested without the machine that has it. Each finding says what to do.

Not covered: models (``inspect``), and whether something fits (``plan``).

Example:
    seen = examine()
    for finding in findings(seen):
        print(finding.level, finding.what, finding.fix)
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from browndwarf.engine.listing import list_devices
from browndwarf.engine.locate import INSTALL_HINT, Build, Candidate, find_candidates
from browndwarf.errors import EngineError
from browndwarf.hardware import devices as hw
from browndwarf.hardware.devices import ListedDevice, NvidiaDevice
from browndwarf.hardware.watch import busy_share
from browndwarf.records import MachineRecord

Level = Literal["error", "warn", "info"]

PACKAGES = (
    "browndwarf", "llama-cpp-python", "gguf", "numpy", "aiohttp", "msgspec", "nvidia-ml-py",
)  # fmt: skip
OTHERS_HOLD_MIB = 256.0
BUSY_SHARE = 0.15


@dataclass(frozen=True, slots=True)
class Finding:
    """One conclusion. ``error`` stops speculative work, ``warn`` spoils speed or figures."""

    level: Level
    what: str
    fix: str

    def as_json(self) -> dict[str, str]:
        """As a ``doctor`` document has it."""
        return {"level": self.level, "what": self.what, "fix": self.fix}


@dataclass(frozen=True)
class Seen:
    """What ``examine`` saw. ``system`` is ``platform.system()``'s word."""

    machine: MachineRecord
    candidates: tuple[Candidate, ...]
    devices: tuple[ListedDevice, ...] = ()
    device_fault: str = ""
    nvidia: tuple[NvidiaDevice, ...] = ()
    packages: dict[str, str] = field(default_factory=dict)
    system: str = "Linux"
    battery: bool | None = None
    governor: str = ""
    busy: float = 0.0
    engine_variables: tuple[str, ...] = ()
    own_pids: frozenset[int] = frozenset()

    @property
    def builds(self) -> tuple[Build, ...]:
        """The usable builds, first choice first."""
        return tuple(c.build for c in self.candidates if c.build is not None)

    def as_json(self) -> dict[str, Any]:
        """The body of a ``doctor`` document."""
        machine = {"os": self.machine.os, "cpu": self.machine.cpu, "cores": self.machine.cores}
        return {
            "machine": {
                **machine, "ram_mib": self.machine.ram_mib, "python": self.machine.python
            },
            "devices": [
                {
                    "name": d.name, "id": d.id, "backend": d.backend,
                    "total_mib": d.total_mib, "free_mib": d.free_mib,
                }
                for d in self.devices
            ],
            "nvidia": [_nvidia_json(device) for device in self.nvidia],
            "engines": [build.as_record() for build in self.builds],
            "packages": self.packages,
            "findings": [finding.as_json() for finding in findings(self)],
        }  # fmt: skip


def examine(llama_dir: Path | None = None, docker: str | None = None) -> Seen:
    """Look at this machine. Asks every engine that is found; takes a second or two."""
    candidates = tuple(find_candidates(llama_dir, docker))
    builds = [c.build for c in candidates if c.build is not None]
    listed: list[ListedDevice] = []
    fault = ""
    if builds:
        try:
            listed = hw.parse_devices(list_devices(builds[0]))
        except EngineError as exc:
            fault = f"{exc.what}: {exc.why}"
    return Seen(
        machine=hw.machine(listed),
        candidates=candidates,
        devices=tuple(listed),
        device_fault=fault,
        nvidia=tuple(hw.nvidia_devices()),
        packages=package_versions(),
        system=platform.system(),
        battery=hw.on_battery(),
        governor=hw.cpu_governor(),
        busy=busy_share(0.3),
        engine_variables=tuple(sorted(n for n in os.environ if n.startswith("LLAMA_ARG_"))),
        own_pids=frozenset({os.getpid()}),
    )


def package_versions(names: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Installed versions; a missing package is absent."""
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def findings(seen: Seen) -> tuple[Finding, ...]:
    """All conclusions, errors first."""
    order = {"error": 0, "warn": 1, "info": 2}
    found = [*_engines(seen), *_devices(seen), *_machine(seen)]
    return tuple(sorted(found, key=lambda finding: order[finding.level]))


def _engines(seen: Seen) -> Iterator[Finding]:
    if not seen.builds:
        yield Finding("error", "no usable llama.cpp build was found", INSTALL_HINT)
    for candidate in seen.candidates:
        if candidate.build is None:
            yield Finding(
                "warn",
                f"{candidate.path} ({candidate.source}) is no usable build: {candidate.reason}",
                "repair it or take it off the search path",
            )
    usable = [b for b in seen.builds if "draft-mtp" in b.features and not b.refusals]
    if seen.builds and not usable:
        yield Finding("error", "no build found can run MTP speculation", INSTALL_HINT)
    for position, build in enumerate(seen.builds):
        place = f"{build.label}"
        if "draft-mtp" not in build.features:
            yield Finding("warn", f"{place} has no draft-mtp: it is too old", INSTALL_HINT)
        for fault in build.faults:
            level: Level = "info"
            if fault.severity == "refuse":
                level = "warn" if usable else "error"
            elif position == 0 and fault.id not in ("old-rate", "old-defaults"):
                level = "warn" if fault.id != "number-unknown" else "info"
            yield Finding(level, f"{place}: {fault.what}", fault.fix)
    if "llama-cpp-python" not in seen.packages:
        yield Finding(
            "info",
            "llama-cpp-python is not installed: compute buffers in plans are estimates",
            "pip install 'browndwarf[engine]'",
        )


def _devices(seen: Seen) -> Iterator[Finding]:
    if seen.device_fault:
        yield Finding("warn", seen.device_fault, "see the driver's installation")
    if seen.nvidia and seen.builds and not seen.devices and not seen.device_fault:
        yield Finding(
            "warn",
            f"{seen.nvidia[0].name} is here, but the llama.cpp build in use sees no device",
            "use a CUDA build: `browndwarf engine install --backend cuda`, or --llama-dir",
        )
    for device in seen.nvidia:
        for process in device.processes:
            held = process.mib or 0.0
            if held >= OTHERS_HOLD_MIB and process.pid not in seen.own_pids:
                name = process.name or "a process"
                yield Finding(
                    "warn",
                    f"{name} (pid {process.pid}) holds {held / 1024:.1f} GiB of {device.name}",
                    "close it before measuring, or plan with --device to count it in",
                )
    cuda = any(d.backend == "cuda" for d in seen.devices) or bool(seen.nvidia)
    if seen.system == "Windows" and cuda:
        yield Finding(
            "warn",
            "Windows' NVIDIA driver moves device memory to RAM when it runs short, silently and "
            "at a third of the speed or worse",
            "in the NVIDIA Control Panel set 'CUDA - Sysmem Fallback Policy' to "
            "'Prefer No Sysmem Fallback' for llama-server.exe; sweeps mark such runs as spilled",
        )


def _machine(seen: Seen) -> Iterator[Finding]:
    if seen.battery:
        yield Finding(
            "warn", "the machine runs on battery: speeds are not those of mains power", "plug it in"
        )
    if seen.governor == "powersave" and not seen.devices:
        yield Finding(
            "warn",
            "the CPU's frequency governor is 'powersave'",
            "set it to 'performance' while measuring: cpupower frequency-set -g performance",
        )
    if seen.busy >= BUSY_SHARE:
        yield Finding(
            "warn",
            f"other programs use {seen.busy:.0%} of the processors now",
            "let them finish before measuring",
        )
    if seen.engine_variables:
        yield Finding(
            "info",
            f"{', '.join(seen.engine_variables)} would change what llama.cpp does",
            "nothing to do: servers that browndwarf starts do not see them; unset them before "
            "running a recipe by hand",
        )


def _nvidia_json(device: NvidiaDevice) -> dict[str, Any]:
    return {
        "index": device.index,
        "name": device.name,
        "driver": device.driver,
        "total_mib": round(device.total_mib, 1),
        "free_mib": round(device.free_mib, 1),
        "power_w": device.power_w,
        "power_limit_w": device.power_limit_w,
        "temperature_c": device.temperature_c,
        "sm_clock_mhz": device.sm_clock_mhz,
        "memory_clock_mhz": device.memory_clock_mhz,
        "processes": [{"pid": p.pid, "name": p.name, "mib": p.mib} for p in device.processes],
    }
