"""Every finding has a cause that can be shown, and says what to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from browndwarf.engine.faults import EMBEDDED_HEAD_FAILS
from browndwarf.engine.locate import Build, Candidate
from browndwarf.hardware.devices import GpuProcess, ListedDevice, NvidiaDevice
from browndwarf.plan.doctor import Seen, examine, findings
from browndwarf.records import MachineRecord

MACHINE = MachineRecord(os="Linux", cpu="cpu", cores=8, ram_mib=32000.0, python="3.12")
CARD = NvidiaDevice(
    0, "RTX 4060", "570.1", 8188, 6000, 20.0, 115.0, 40.0, 210, 405,
    (GpuProcess(77, "blender", 1229.0), GpuProcess(78, "Xorg", 60.0)),
)  # fmt: skip
CUDA = ListedDevice("CUDA0", "RTX 4060", "cuda", 8188, 6000)


def seen(build: Build | None, **changes: object) -> Seen:
    """A machine with nothing wrong, and what is changed of it."""
    candidates = (Candidate("/llama", "PATH", build=build),) if build is not None else ()
    base = Seen(machine=MACHINE, candidates=candidates, packages={"llama-cpp-python": "0.3.36"})
    return replace(base, **changes)  # type: ignore[arg-type]


def whats(found: Seen) -> str:
    """All findings as one text, leaving out what a fake build brings along."""
    return "\n".join(f"{f.level}: {f.what} -> {f.fix}" for f in findings(found))


def test_no_engine_is_an_error_with_the_command_that_installs_one() -> None:
    """The first thing to fix."""
    found = findings(seen(None))
    assert found[0].level == "error"
    assert "browndwarf engine install" in found[0].fix


def test_a_build_in_the_broken_range_is_named(fake_build: Callable[..., Build]) -> None:
    """An error when it is the only one, a warning beside a sound one."""
    broken = replace(fake_build(), faults=(EMBEDDED_HEAD_FAILS,))
    assert "error: no build found can run MTP" in whats(seen(broken))
    both = replace(
        seen(broken), candidates=(Candidate("a", "PATH", broken), Candidate("b", "x", fake_build()))
    )
    assert "b10741 to b10748" in whats(both)
    assert "error" not in whats(both)


def test_a_place_without_a_usable_build_is_told(fake_build: Callable[..., Build]) -> None:
    """With the reason that was found."""
    other = Candidate("/old", "LLAMA_CPP_DIR", reason="it may not be executed")
    found = replace(seen(fake_build()), candidates=(other, Candidate("b", "x", fake_build())))
    assert "/old (LLAMA_CPP_DIR) is no usable build: it may not be executed" in whats(found)


def test_another_process_that_holds_device_memory_is_named(
    fake_build: Callable[..., Build],
) -> None:
    """From 256 MiB on; our own processes do not count."""
    text = whats(seen(fake_build(), nvidia=(CARD,), devices=(CUDA,)))
    assert "blender (pid 77) holds 1.2 GiB of RTX 4060" in text
    assert "Xorg" not in text
    ours = seen(fake_build(), nvidia=(CARD,), devices=(CUDA,), own_pids=frozenset({77}))
    assert "blender" not in whats(ours)


def test_a_card_that_the_build_cannot_see_is_told(fake_build: Callable[..., Build]) -> None:
    """The CPU build installed by mistake."""
    assert "sees no device" in whats(seen(fake_build(), nvidia=(CARD,)))


def test_windows_memory_fallback_is_told_where_it_applies(
    fake_build: Callable[..., Build],
) -> None:
    """With the setting's name; not on Linux."""
    windows = seen(fake_build(), devices=(CUDA,), system="Windows")
    assert "Prefer No Sysmem Fallback" in whats(windows)
    assert "Sysmem" not in whats(replace(windows, system="Linux"))


def test_power_load_and_variables_are_told(fake_build: Callable[..., Build]) -> None:
    """Battery, governor, other programs, LLAMA_ARG_ variables."""
    text = whats(
        seen(
            fake_build(),
            battery=True,
            governor="powersave",
            busy=0.5,
            engine_variables=("LLAMA_ARG_CTX_SIZE",),
        )
    )
    for word in ("battery", "powersave", "50% of the processors", "LLAMA_ARG_CTX_SIZE"):
        assert word in text


def test_without_the_library_plans_are_estimates(fake_build: Callable[..., Build]) -> None:
    """An information, with what installs it."""
    assert "estimates" in whats(seen(fake_build(), packages={}))


def test_this_machine_can_be_examined() -> None:
    """And its document has the promised keys."""
    body = examine().as_json()
    assert {"machine", "devices", "engines", "findings"} <= body.keys()
    assert {"os", "cpu", "ram_mib"} <= body["machine"].keys()
    assert all({"level", "what", "fix"} == finding.keys() for finding in body["findings"])
