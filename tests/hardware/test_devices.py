"""Devices as the engine lists them, cards by name, and what NVML tells."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from browndwarf.errors import DeviceError, UsageError
from browndwarf.hardware import devices
from browndwarf.hardware.cards import CARDS, find_card
from browndwarf.hardware.devices import choose_device, machine, parse_devices

LISTED = """ggml_cuda_init: found 2 CUDA devices:
Available devices:
  CUDA0: NVIDIA GeForce RTX 4060 (8188 MiB, 7099 MiB free)
  Vulkan1: AMD Radeon RX 7600 (RADV NAVI33) (8176 MiB, 8000 MiB free)
  MTL0: Apple M2 (10922 MiB, 10922 MiB free)
"""


def test_every_backend_lists_its_devices_alike() -> None:
    """Names with brackets of their own included."""
    found = parse_devices(LISTED)
    assert [d.id for d in found] == ["CUDA0", "Vulkan1", "MTL0"]
    assert [d.backend for d in found] == ["cuda", "vulkan", "metal"]
    assert found[1].name == "AMD Radeon RX 7600 (RADV NAVI33)"
    assert (found[0].total_mib, found[0].free_mib) == (8188, 7099)
    assert parse_devices("Available devices:\n  (none)\n") == []


def test_a_device_is_chosen_by_name_or_number() -> None:
    """And an unknown one says which there are."""
    found = parse_devices(LISTED)
    assert choose_device(found, "1").id == "Vulkan1"
    assert choose_device(found, "cuda0").id == "CUDA0"
    with pytest.raises(DeviceError, match="CUDA0, Vulkan1, MTL0"):
        choose_device(found, "7")


def test_the_machine_record_names_no_person_and_no_network() -> None:
    """System, processor, memory, devices; nothing else."""
    record = machine(parse_devices(LISTED))
    assert record.ram_mib > 0
    assert record.devices[0].name.startswith("CUDA0")
    assert set(record.__struct_fields__) == {"os", "cpu", "cores", "ram_mib", "python", "devices"}


@pytest.mark.parametrize("name", ["rtx 4060", "NVIDIA GeForce RTX 4060", "RTX-4060", "Rtx4060"])
def test_a_card_is_found_however_it_is_written(name: str) -> None:
    """Vendor words, case and blanks do not matter."""
    assert find_card(name).memory_mib == 8192


def test_an_unknown_card_suggests_near_ones() -> None:
    """A usage error, with --vram as the way out."""
    with pytest.raises(UsageError, match="RTX 4060") as caught:
        find_card("RTX 4061")
    assert "--vram" in caught.value.fix


def test_the_table_of_cards_is_sound() -> None:
    """Names are unique after simplification, figures plausible, sources noted."""
    for card in CARDS:
        assert find_card(card.name) is card
        assert 4 * 1024 <= card.memory_mib <= 256 * 1024
        assert 100 <= card.bandwidth_gb_s <= 10_000
        assert card.source


class FakeNvml:
    """An NVML with one device and two processes; the driver hides one's memory."""

    NVML_TEMPERATURE_GPU = 0
    NVML_CLOCK_SM = 1
    NVML_CLOCK_MEM = 2

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"570.1"

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "RTX 4060"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(total=8 * 2**30, free=6 * 2**30, used=2 * 2**30)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        raise RuntimeError("not supported")

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[SimpleNamespace]:
        return [
            SimpleNamespace(pid=1, usedGpuMemory=2**30),
            SimpleNamespace(pid=2**22 + 1, usedGpuMemory=2**64 - 1),
        ]


def test_what_a_driver_does_not_tell_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unsupported questions, hidden memory and processes that are gone do no harm."""
    monkeypatch.setattr(devices, "nvml", lambda: _given(FakeNvml()))
    (found,) = devices.nvidia_devices()
    assert (found.name, found.driver, found.total_mib) == ("RTX 4060", "570.1", 8192)
    assert found.power_w is None
    assert [p.mib for p in found.processes] == [1024, None]
    assert found.processes[1].name == ""


class _given:  # noqa: N801 - stands for the function ``nvml``
    def __init__(self, lib: object) -> None:
        self.lib = lib

    def __enter__(self) -> object:
        return self.lib

    def __exit__(self, *_: object) -> None:
        return None
