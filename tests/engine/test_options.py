"""Options become flags that the build accepts, or a clear refusal; never anything else."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from browndwarf.engine.locate import Build, build_from_probe
from browndwarf.engine.options import (
    ServerOptions,
    axis_to_option,
    command_text,
    server_argv,
)
from browndwarf.engine.probe import build_probe
from browndwarf.errors import BrowndwarfError, EngineUnsupported, UsageError
from fakes import HELP, VERSION

GENERATIONS = sorted(HELP)


def build_of(generation: str) -> Build:
    answers = build_probe(VERSION[generation], HELP[generation], {})
    return build_from_probe(Path("/opt/llama/llama-server"), answers, source="fake")


BUILDS = {name: build_of(name) for name in GENERATIONS}
CURRENT = BUILDS["current"]
MTP = ServerOptions(model="t.gguf", draft="h.gguf", spec_type="draft-mtp", n_max=2)


def argv(options: ServerOptions, generation: str = "current") -> str:
    return shlex.join(server_argv(BUILDS[generation], options, port=9000))


def test_what_must_always_be_said_is_said() -> None:
    line = argv(MTP)
    for part in (
        "-m t.gguf",
        "-md h.gguf",
        "--spec-type draft-mtp",
        "--spec-draft-n-max 2",
        "--spec-draft-p-min 0",
        "-np 1",
        "-ngl 999",
        "-ngld 999",
        "-fit off",
        "--metrics",
        "--no-ui",
        "-lv 4",
        "--host 127.0.0.1 --port 9000",
    ):
        assert part in line, part


def test_a_drafter_without_a_type_still_names_the_type() -> None:
    assert "--spec-type draft-mtp" in argv(ServerOptions(model="t", draft="h"))


def test_devices_are_free_text() -> None:
    line = argv(msgspec.structs.replace(MTP, device="CUDA0,CUDA1", draft_device="none"))
    assert "-dev CUDA0,CUDA1" in line
    assert "-devd none" in line


def test_without_speculation_nothing_of_it_is_said() -> None:
    assert "spec" not in argv(ServerOptions(model="t"))
    assert "spec" not in argv(ServerOptions(model="t", spec_type="none"))


def test_an_embedded_head_needs_no_drafter_file() -> None:
    line = argv(ServerOptions(model="t", spec_type="draft-mtp"))
    assert "--spec-type draft-mtp" in line
    assert "-md" not in line


def test_older_builds_get_their_own_spelling() -> None:
    line = argv(MTP, "old-mtp")
    assert "--spec-type mtp" in line
    assert "--no-webui" in line
    assert "-fit" not in line
    assert "-lv" not in line
    assert "-fa" not in line
    on = msgspec.structs.replace(MTP, flash_attn="on", load_mode="none")
    line = argv(on, "old-mtp")
    assert "-fa --jinja" in line or "-fa" in line.split()
    assert "--no-mmap" in line


def test_speculation_without_mtp_is_refused() -> None:
    with pytest.raises(EngineUnsupported, match="does not know the speculation type"):
        argv(MTP, "pre-mtp")


@pytest.mark.parametrize(
    "change",
    [
        {"synth_rates": (0.9, 0.8)},
        {"backend_sampling": True},
        {"kv_unified": True},
        {"draft_kv_k": "q8_0"},
        {"load_mode": "dio"},
        {"cache_ram_mib": 0},
        {"draft_backend_sampling": False},
    ],
)
def test_what_a_build_cannot_express_is_refused_by_name(change: dict[str, Any]) -> None:
    with pytest.raises(EngineUnsupported) as caught:
        argv(msgspec.structs.replace(MTP, **change), "old-mtp")
    (name,) = change
    assert name in caught.value.what
    assert caught.value.fix


def test_a_value_that_the_build_does_not_allow_is_refused() -> None:
    with pytest.raises(EngineUnsupported, match="allows f32, f16"):
        argv(ServerOptions(model="t", kv_k="q9_9"))


def test_synthetic_rates_must_fit_n_max() -> None:
    good = msgspec.structs.replace(MTP, synth_rates=(0.9, 0.5))
    assert "--spec-synth-rates 0.9,0.5" in argv(good)
    for bad in ((0.9,), (0.5, 0.9), (1.5, 0.1)):
        with pytest.raises(UsageError, match="synth_rates"):
            argv(msgspec.structs.replace(MTP, synth_rates=bad))
    with pytest.raises(UsageError, match="without speculation"):
        argv(ServerOptions(model="t", synth_rates=(0.9,)))


def test_extra_flags_are_checked_against_the_build() -> None:
    def extra(name: str, value: str | None = None) -> str:
        return argv(ServerOptions(model="t", extra=((name, value),)))

    assert "--poll 0" in extra("poll", "0")
    assert "--ctx-checkpoints 2" in extra("ctx_checkpoints", "2")
    assert "--log-jsonl" in extra("--log-jsonl")
    assert "--no-log-jsonl" in extra("log-jsonl", "off")
    with pytest.raises(UsageError, match="did you mean --ctx-checkpoints"):
        extra("ctx-checkpoint", "2")
    with pytest.raises(UsageError, match="needs a value"):
        extra("--poll")
    with pytest.raises(EngineUnsupported, match="was removed"):
        extra("--draft-max", "4")
    with pytest.raises(UsageError, match="cannot be set by hand"):
        extra("--port", "1")
    with pytest.raises(UsageError, match="neither on nor off"):
        extra("log-jsonl", "perhaps")


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("n_max", "4", {"n_max": 4}),
        ("n-max", "4", {"n_max": 4}),
        ("--spec-draft-n-max", "4", {"n_max": 4}),
        ("ctx", "16k", {"ctx": 16384}),
        ("ub", "256", {"ubatch": 256}),
        ("kv", "q8_0", {"kv_k": "q8_0", "kv_v": "q8_0"}),
        ("backend-sampling", "on", {"backend_sampling": True}),
        ("kv_unified", "default", {"kv_unified": None}),
        ("ngl", "all", {"n_gpu_layers": None}),
        ("p_min", "0.5", {"p_min": 0.5}),
        ("synth_rates", "0.9:0.8", {"synth_rates": (0.9, 0.8)}),
        ("device", "none", {"device": "none"}),
        ("fa", "on", {"flash_attn": "on"}),
        ("poll", "0", {"extra": (("--poll", "0"),)}),
        ("--swa-checkpoints", "1", {"extra": (("--swa-checkpoints", "1"),)}),
    ],
)
def test_an_axis_sets_a_field_or_becomes_a_flag(
    name: str, value: str, expected: dict[str, Any]
) -> None:
    found = axis_to_option(name, value)
    assert found == expected
    ServerOptions(model="t", **found)


@pytest.mark.parametrize(
    ("name", "value"), [("n_max", "many"), ("p_min", "x"), ("jinja", "perhaps"), ("fa", "maybe")]
)
def test_an_axis_with_a_bad_value_is_a_usage_error(name: str, value: str) -> None:
    with pytest.raises(UsageError):
        axis_to_option(name, value)


def test_the_command_for_people_is_the_command_that_runs() -> None:
    text = command_text(CURRENT, MTP, port=9000)
    assert shlex.split(text.replace("\\\n", " ")) == server_argv(CURRENT, MTP, port=9000)
    assert "\n  --spec-type draft-mtp" in text


def test_a_portable_command_names_no_folder() -> None:
    options = msgspec.structs.replace(MTP, model="/a b/t.gguf", draft="/c/h.gguf")
    text = command_text(CURRENT, options, portable=True)
    assert text.startswith("llama-server ")
    assert "/" not in text


def test_powershell_quotes_its_own_way() -> None:
    options = msgspec.structs.replace(MTP, model=r"C:\it's here\t.gguf")
    text = command_text(CURRENT, options, shell="powershell")
    assert text.startswith("& ")
    assert r"'C:\it''s here\t.gguf' `" in text


def test_environment_that_the_build_needs_comes_first() -> None:
    build = build_from_probe(
        CURRENT.server,
        build_probe(VERSION["current"], HELP["current"], {"LD_LIBRARY_PATH": "/x y"}),
        source="fake",
    )
    assert command_text(build, MTP).startswith("LD_LIBRARY_PATH='/x y' \\\n")
    shell = command_text(build, MTP, shell="powershell")
    assert shell.startswith("$env:LD_LIBRARY_PATH = '/x y'\n")


def test_a_command_for_docker_mounts_its_models() -> None:
    build = build_from_probe(
        CURRENT.server,
        build_probe(VERSION["current"], HELP["current"], {}),
        source="docker",
        docker_image="ghcr.io/x:server",
    )
    text = command_text(build, msgspec.structs.replace(MTP, model="/m/t.gguf", draft="/m/h.gguf"))
    assert text.startswith("docker run --rm")
    assert "-v /m/t.gguf:/m/t.gguf:ro" in text
    assert "--host 0.0.0.0" in text


OPTIONS = st.builds(
    ServerOptions,
    model=st.just("t.gguf"),
    draft=st.sampled_from([None, "h.gguf"]),
    spec_type=st.sampled_from([None, "none", "draft-mtp", "draft-simple", "x"]),
    n_max=st.none() | st.integers(1, 16),
    p_min=st.none() | st.floats(0, 1),
    ubatch=st.none() | st.integers(1, 4096),
    kv_k=st.sampled_from(["f16", "q8_0", "q3"]),
    draft_kv_k=st.sampled_from([None, "q8_0"]),
    flash_attn=st.sampled_from(["on", "off", "auto"]),
    backend_sampling=st.booleans(),
    kv_unified=st.none() | st.booleans(),
    swa_full=st.booleans(),
    context_shift=st.booleans(),
    jinja=st.booleans(),
    metrics=st.booleans(),
    load_mode=st.sampled_from([None, "mmap", "none", "mlock"]),
    synth_len=st.none() | st.floats(1, 4),
    extra=st.lists(
        st.tuples(st.sampled_from(["--poll", "--draft", "--zzz", "-ctxcp"]), st.just("1")),
        max_size=2,
    ).map(tuple),
)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(OPTIONS, st.sampled_from(GENERATIONS))
def test_no_build_is_ever_given_a_flag_that_it_lacks(
    options: ServerOptions, generation: str
) -> None:
    build = BUILDS[generation]
    try:
        command = server_argv(build, options, port=1)
    except BrowndwarfError:
        return  # refused with an error of ours: good
    flags = [part for part in command[1:] if part.startswith("-") and not part[1:2].isdigit()]
    assert set(flags) <= build.flags
    assert not set(flags) & build.removed
    assert command[0] == str(build.server)


@pytest.mark.skipif(sys.platform == "win32", reason="fakes are POSIX scripts")
def test_a_real_process_accepts_the_command(fake_build: Callable[..., Build]) -> None:
    build = fake_build()
    command = server_argv(build, MTP, port=0)
    done = subprocess.run([*command, "--bogus"], capture_output=True, text=True, check=False)
    assert "invalid argument: --bogus" in done.stderr
