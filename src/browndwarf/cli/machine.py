"""This machine as the engine sees it: devices, and the memory that a plan may use."""

from __future__ import annotations

from pathlib import Path

from browndwarf.engine.listing import list_devices
from browndwarf.engine.locate import Build, choose_build, find_builds
from browndwarf.hardware.devices import (
    ListedDevice,
    choose_device,
    free_ram_mib,
    parse_devices,
)
from browndwarf.plan.limits import Limit, as_backend, limit_from_free
from browndwarf.plan.setup import Backend
from browndwarf.units import MIB


def chosen_build(llama_dir: str | None, docker: str | None, *, need: str | None = None) -> Build:
    """The build that a command's options name, or the best one here.

    Raises:
        EngineNotFound, EngineUnsupported: there is none, or none that has the feature ``need``.
    """
    builds = find_builds(Path(llama_dir) if llama_dir else None, docker)
    return choose_build(builds, frozenset({need} if need else ()))


def devices(build: Build) -> list[ListedDevice]:
    """The accelerators that this build can use, with their memory."""
    return parse_devices(list_devices(build))


def memory_here(
    listed: list[ListedDevice],
    wanted: str | None = None,
    *,
    margin_mib: float | None = None,
    context_mib: float | None = None,
) -> tuple[Backend, Limit]:
    """The memory that is free now: of the wanted device, else the first, else RAM.

    Raises:
        DeviceError: there is no such device.
    """
    if wanted != "cpu" and (listed or wanted is not None):
        chosen = choose_device(listed, wanted or "0")
        limit = limit_from_free(
            int(chosen.free_mib * MIB),
            f"{chosen.id} ({chosen.name}): free now, of {chosen.total_mib:.0f} MiB",
            margin_mib=margin_mib,
            context_mib=context_mib,
        )
        return as_backend(chosen.backend), limit
    ram = int(free_ram_mib() * MIB)
    return "cpu", limit_from_free(
        ram, "RAM available now", margin_mib=margin_mib, context_mib=context_mib
    )
