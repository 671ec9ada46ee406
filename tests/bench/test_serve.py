"""Servers by command line: ports, containers, recipes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from browndwarf.bench.serve import contained, listening, recipe_argv, split_command
from browndwarf.errors import UsageError


@pytest.mark.parametrize(
    ("command", "wanted"),
    [
        ("llama-server -m a.gguf", ("127.0.0.1", None)),
        ("llama-server --port 8081 --host 0.0.0.0", ("127.0.0.1", 8081)),
        ("llama-server --port=8081 --host=192.0.2.7", ("192.0.2.7", 8081)),
    ],
)
def test_host_and_port_come_from_the_command(command: str, wanted: tuple[str, int | None]) -> None:
    assert listening(split_command(command)) == wanted


def test_a_container_gets_a_name_and_is_removed_by_it() -> None:
    argv, cleanup = contained(split_command("docker run --rm -p 8081:8081 image --port 8081"))
    assert argv[:3] == ["docker", "run", "--name"]
    assert cleanup == ["docker", "rm", "-f", argv[3]]
    kept = split_command("docker run --name mine -p 8081:8081 image --port 8081")
    assert contained(kept) == (kept, ["docker", "rm", "-f", "mine"])


def test_a_container_without_a_port_is_refused() -> None:
    with pytest.raises(UsageError, match="no port"):
        contained(["docker", "run", "image"])


def test_other_commands_are_left_alone() -> None:
    assert contained(["llama-server", "-m", "a.gguf"]) == (["llama-server", "-m", "a.gguf"], [])


@pytest.mark.parametrize("content", ["", "{}", '{"argv": "x"}', '{"argv": []}', '{"argv": [1]}'])
def test_a_damaged_recipe_is_told(tmp_path: Path, content: str) -> None:
    (tmp_path / "recipe.json").write_text(content)
    with pytest.raises(UsageError):
        recipe_argv(tmp_path)


def test_a_recipe_holds_a_command(tmp_path: Path) -> None:
    (tmp_path / "recipe.json").write_text(json.dumps({"argv": ["llama-server", "-m", "x"]}))
    assert recipe_argv(tmp_path) == ["llama-server", "-m", "x"]
