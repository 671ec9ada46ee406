"""The floors of the house: imports go downward only, rooms of one floor keep apart."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src" / "browndwarf"

#: From the bottom up. Rooms in one set don't import each other.
FLOORS: list[set[str]] = [
    {"errors", "units", "stats", "records", "files"},
    {"engine", "models", "hardware"},
    {"plan", "sweep", "bench", "quality", "decode"},
    {"report"},
    {"cli"},
]
#: The pure floor has an order of its own instead.
PURE_ORDER = ["errors", "units", "stats", "files", "records"]
#: Modules of third parties that only one place may import.
SOLE_OWNERS = {"llama_cpp": "engine/native.py"}


def room_of(path: Path) -> str:
    return path.relative_to(SRC).parts[0].removesuffix(".py")


def floor_of(room: str) -> int:
    return next(i for i, rooms in enumerate(FLOORS) if room in rooms)


def imports(path: Path) -> set[str]:
    """Dotted names of all modules that a file imports, at any depth of the file."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative imports hide the floor"
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


#: The package's own two doors stand outside of the floors.
DOORS = {SRC / "__init__.py", SRC / "__main__.py"}
FILES = sorted(p for p in SRC.rglob("*.py") if p not in DOORS)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_imports_go_downward_only(path: Path) -> None:
    room = room_of(path)
    for name in imports(path):
        parts = name.split(".")
        if parts[0] != "browndwarf" or len(parts) < 2 or parts[1] == "__version__":
            continue
        other = parts[1]
        if other == room:
            continue
        if floor_of(room) == 0:
            assert PURE_ORDER.index(other) < PURE_ORDER.index(room), f"{path} imports {name}"
        else:
            assert floor_of(other) < floor_of(room), f"{path} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_foreign_modules_have_one_owner(path: Path) -> None:
    for name in imports(path):
        owner = SOLE_OWNERS.get(name.split(".")[0])
        assert owner in (None, path.relative_to(SRC).as_posix()), f"{path} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_only_the_command_line_prints(path: Path) -> None:
    if room_of(path) == "cli":
        return
    tree = ast.parse(path.read_text(encoding="utf-8"))
    calls = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    ]
    assert not calls, f"{path} prints on lines {calls}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_every_module_says_what_it_is_for(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), f"{path} has none"
