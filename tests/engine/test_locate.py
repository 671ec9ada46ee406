"""Builds are found where people keep them, and each says what it can do and what ails it."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from browndwarf.engine import docker, faults, probe
from browndwarf.engine.locate import (
    Build,
    choose_build,
    find_builds,
    find_candidates,
    server_in,
)
from browndwarf.errors import EngineNotFound, EngineUnsupported
from fakes import HELP, make_engine

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="fakes are POSIX scripts")

Factory = Callable[..., Build]


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hide the machine's own builds."""
    monkeypatch.delenv("LLAMA_CPP_DIR", raising=False)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    empty = {"platlib": str(tmp_path / "none"), "purelib": str(tmp_path / "none")}
    monkeypatch.setattr("sysconfig.get_paths", lambda: empty)


def find(tmp_path: Path, *args: object) -> list[Build]:
    return find_builds(*args, cache_dir=tmp_path / "cache")  # type: ignore[arg-type]


@pytest.mark.parametrize("below", ["", "bin", "build/bin"])
def test_a_build_is_found_in_every_usual_layout(tmp_path: Path, below: str) -> None:
    made = make_engine(tmp_path / "made") / "bin"
    place = tmp_path / "given" / below
    place.parent.mkdir(parents=True, exist_ok=True)
    made.rename(place)
    build = find(tmp_path, tmp_path / "given")[0]
    assert build.server == place / "llama-server"
    assert set(build.tools) >= {"llama-server", "llama-quantize"}


def test_the_server_itself_may_be_named(tmp_path: Path) -> None:
    server = make_engine(tmp_path / "e") / "bin" / "llama-server"
    assert find(tmp_path, server)[0].server == server
    assert server_in(server.with_name("engine.json")) is None


def test_places_are_searched_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    by_path, by_variable = make_engine(tmp_path / "p"), make_engine(tmp_path / "v")
    inside, given_ = make_engine(tmp_path / "i"), make_engine(tmp_path / "d")
    monkeypatch.setenv("PATH", f"{by_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("LLAMA_CPP_DIR", str(by_variable))
    paths = {"platlib": str(inside), "purelib": str(inside)}
    monkeypatch.setattr("sysconfig.get_paths", lambda: paths)
    assert [b.source for b in find(tmp_path)] == ["LLAMA_CPP_DIR", "PATH", "embedded"]
    assert [b.source for b in find(tmp_path, given_)] == ["--llama-dir"]


def test_one_build_reached_by_two_ways_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(tmp_path / "e")
    monkeypatch.setenv("LLAMA_CPP_DIR", str(engine))
    monkeypatch.setenv("PATH", f"{engine / 'bin'}:/usr/bin:/bin")
    assert [b.source for b in find(tmp_path)] == ["LLAMA_CPP_DIR"]


def test_nothing_anywhere_says_how_to_get_one(tmp_path: Path) -> None:
    assert find(tmp_path) == []
    with pytest.raises(EngineNotFound, match="browndwarf engine install"):
        choose_build([])


def test_a_named_folder_without_a_build_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EngineNotFound, match="no such folder"):
        find(tmp_path, tmp_path / "nope")
    with pytest.raises(EngineNotFound, match="no llama-server in it"):
        find(tmp_path, tmp_path)


def test_a_wrong_variable_is_an_error_though_another_build_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was named; the list of places still shows all."""
    monkeypatch.setenv("PATH", f"{make_engine(tmp_path / 'p') / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("LLAMA_CPP_DIR", str(tmp_path / "nope"))
    with pytest.raises(EngineNotFound, match=r"nope \(LLAMA_CPP_DIR\)") as caught:
        find(tmp_path)
    assert "unset" in caught.value.fix
    seen = find_candidates(cache_dir=tmp_path / "cache")
    assert [c.source for c in seen] == ["LLAMA_CPP_DIR", "PATH"]
    assert [b.source for b in find(tmp_path, tmp_path / "p")] == ["--llama-dir"]


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        ({"version_signal": int(signal.SIGILL)}, "another processor"),
        ({"help": "usage: something else"}, "not that of a llama-server"),
        ({"hang": True}, "did not answer"),
    ],
)
def test_an_unfit_candidate_is_listed_with_its_reason(
    tmp_path: Path, engine: dict[str, object], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "PROBE_TIMEOUT_S", 0.7)
    folder = make_engine(tmp_path / "e", **engine)
    (candidate,) = find_candidates(folder, cache_dir=tmp_path / "cache")
    assert candidate.build is None
    assert reason in candidate.reason


def test_a_file_without_permission_is_listed_with_its_reason(tmp_path: Path) -> None:
    folder = make_engine(tmp_path / "e")
    (folder / "bin" / "llama-server").write_bytes(b"\x7fELF nonsense")
    (candidate,) = find_candidates(folder, cache_dir=tmp_path / "cache")
    assert "does not start" in candidate.reason


def test_probing_is_remembered_until_the_build_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_engine(tmp_path / "e")
    first = find(tmp_path, folder)[0]
    asked: list[str] = []
    real = probe.run_probe

    def spy(*args: object, **kwargs: object) -> probe.Probe:
        asked.append("run")
        return real(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(probe, "run_probe", spy)
    assert find(tmp_path, folder)[0] == first
    assert asked == []
    settings = folder / "bin" / "engine.json"
    data = json.loads(settings.read_text())
    settings.write_text(json.dumps({**data, "version": "version: 10801 (abc1234)"}))
    os.utime(folder / "bin" / "llama-bench", ns=(1, 1))  # as an upgrade touches its files
    assert find(tmp_path, folder)[0].number == 10801
    assert asked == ["run"]


def test_a_damaged_cache_entry_is_ignored(tmp_path: Path) -> None:
    folder = make_engine(tmp_path / "e")
    find(tmp_path, folder)
    for entry in (tmp_path / "cache").iterdir():
        entry.write_bytes(b'{"version": 3')
    assert find(tmp_path, folder)[0].number == 10800


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("version: 10360 (a1b2c3d)\nbuilt with GNU", ("b10360", 10360, "a1b2c3d")),
        ("version: 0.5.0-dev (build 1, commit 0c1e570)", ("0.5.0-dev", 1, "0c1e570")),
        ("version: 0.6.1", ("0.6.1", None, "")),
        ("nothing here", ("", None, "")),
    ],
)
def test_versions_have_several_forms(text: str, expected: tuple[object, ...]) -> None:
    assert probe.parse_version(text) == expected


@given(st.text())
def test_any_version_text_is_survived(text: str) -> None:
    version, number, _ = probe.parse_version(text)
    assert number is None or version


@given(st.text(alphabet=st.sampled_from("-abc, \n\t<>[]|{}N.")))
def test_any_help_text_is_survived(text: str) -> None:
    help_ = probe.parse_help(text)
    assert not help_.flags & help_.removed
    assert all(flag.startswith("-") for flag in help_.flags)
    for flag in help_.flags:
        probe.parse_choices(help_.hints[flag], help_.texts[flag])


@given(
    st.lists(
        st.tuples(
            st.from_regex(r"--[a-z]{3,12}", fullmatch=True),
            st.sampled_from(["", " N", " TYPE", " [on|off]"]),
            st.booleans(),
        ),
        unique_by=lambda entry: entry[0],
    )
)
def test_help_text_gives_back_its_flags(entries: list[tuple[str, str, bool]]) -> None:
    lines = [
        f"{flag}{hint}".ljust(40) + ("the argument has been removed" if gone else "does something")
        for flag, hint, gone in entries
    ]
    help_ = probe.parse_help("\n".join(lines))
    assert help_.flags == {flag for flag, _, gone in entries if not gone}
    assert help_.removed == {flag for flag, _, gone in entries if gone}
    assert all(help_.hints[flag] == hint.strip() for flag, hint, _ in entries)


def test_features_follow_from_the_help_text(fake_build: Factory) -> None:
    current = fake_build("current")
    assert {"draft-mtp", "gemma4-mtp", "spec-synth-rates", "fit"} <= current.features
    assert {"--draft-max", "--draft"} <= current.removed
    assert not current.flags & current.removed
    assert current.spec_types == {"none", "draft-simple", "draft-mtp", "ngram-mod"}
    assert current.choices["-ctk"][:2] == ("f32", "f16")
    assert "draft-mtp" not in fake_build("pre-mtp").features
    assert "spec-synth-rates" not in fake_build("no-synth").features


def test_a_build_converts_to_json(fake_build: Factory) -> None:
    record = msgspec.json.decode(msgspec.json.encode(fake_build().as_record()))
    assert record["number"] == 10800
    assert record["sha"] == "abc1234"
    assert "draft-mtp" in record["features"]


@pytest.mark.parametrize("number", [10741, 10745, 10748])
def test_builds_that_cannot_load_heads_are_refused(fake_build: Factory, number: int) -> None:
    build = fake_build(version=f"version: {number} (abc)")
    with pytest.raises(EngineUnsupported, match="b10749"):
        choose_build([build])
    assert choose_build([build], override_faults=True) is build


@pytest.mark.parametrize("number", [10740, 10749])
def test_their_neighbours_are_not(fake_build: Factory, number: int) -> None:
    build = fake_build(version=f"version: {number} (abc)")
    assert choose_build([build]).refusals == ()


def test_the_old_name_of_the_speculation_type_is_refused(fake_build: Factory) -> None:
    build = fake_build("old-mtp")
    assert {f.id for f in build.faults} >= {
        "old-spec-type",
        "old-defaults",
        "draft-kv-ignored",
        "no-gemma4-mtp",
    }
    with pytest.raises(EngineUnsupported, match="'mtp'"):
        choose_build([build])


def test_a_shallow_build_is_judged_by_its_features(fake_build: Factory) -> None:
    build = fake_build(version="version: 0.5.0-dev (build 1, commit 0c1e570)")
    assert [f.id for f in build.faults] == ["number-unknown"]
    assert choose_build([build], need=frozenset({"gemma4-mtp"})) is build
    older = fake_build("no-synth", version="version: 0.5.0-dev (build 1, commit 0c1e570)")
    assert "gemma4-mtp" not in older.features


def test_a_build_without_mtp_is_refused_by_name(fake_build: Factory) -> None:
    build = fake_build("pre-mtp")
    with pytest.raises(EngineUnsupported, match="lacks MTP speculative decoding") as caught:
        choose_build([build])
    assert "engine install" in caught.value.fix
    assert choose_build([build], need=frozenset()) is build


def test_the_first_fit_build_is_chosen(fake_build: Factory) -> None:
    old, new = fake_build("pre-mtp"), fake_build("current")
    assert choose_build([old, new]) is new


def test_every_fault_tells_what_to_do() -> None:
    assert len({fault.id for fault in faults.ALL_FAULTS}) == len(faults.ALL_FAULTS)
    assert all(fault.what and fault.fix for fault in faults.ALL_FAULTS)


def test_an_image_is_probed_and_run_through_docker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(tmp_path / "image")
    client = tmp_path / "bin" / "docker"
    client.parent.mkdir()
    # A docker that "runs" the image's server: it drops everything up to the image's name.
    client.write_text(
        f'#!/bin/sh\nwhile [ "$1" != "ghcr.io/x:server-cuda" ]; do shift; done; shift\n'
        f'exec {engine}/bin/llama-server "$@"\n'
    )
    client.chmod(0o755)
    monkeypatch.setenv("PATH", f"{client.parent}:/usr/bin:/bin")
    (build,) = find_builds(docker="ghcr.io/x:server-cuda")
    assert build.docker_image == "ghcr.io/x:server-cuda"
    assert build.source == "docker"
    assert "draft-mtp" in build.features


def test_docker_without_docker_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EngineNotFound, match="no `docker` command"):
        find_builds(docker="x")


def test_a_container_sees_its_files_read_only_and_its_port_locally() -> None:
    command = docker.run_command(
        "i:full-cuda",
        ["/app/llama-server", "-m", "/m/a.gguf"],
        name="n",
        port=9,
        read_only=[Path("/m/a.gguf")],
    )
    text = " ".join(command)
    assert "--gpus all" in text
    assert "-p 127.0.0.1:9:9" in text
    assert "-v /m/a.gguf:/m/a.gguf:ro" in text
    assert command[-3:] == ["i:full-cuda", "-m", "/m/a.gguf"]
    assert command[command.index("--entrypoint") + 1] == "/app/llama-server"


def test_the_help_texts_of_the_fakes_differ() -> None:
    assert len({probe.parse_help(text).flags for text in HELP.values()}) == len(HELP)
