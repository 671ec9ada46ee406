"""Run directories made by a fake engine, and their pages."""

from __future__ import annotations

import asyncio
import contextlib
import html
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec

from browndwarf.cli.report import wording
from browndwarf.records import EngineRecord, MachineRecord, ModelRecord
from browndwarf.report.page import collect, render
from browndwarf.report.reading import Reading, read
from browndwarf.sweep.events import Event
from browndwarf.sweep.planned import SweepPlan
from browndwarf.sweep.run import run_sweep
from browndwarf.sweep.store import RunStore, read_run
from fake_sweep import FakeEngine, FakeQuiet, FakeServed, plan

MACHINE = MachineRecord(os="an OS", cpu="a CPU", cores=2, ram_mib=4096.0, python="3.11")
ENGINE = EngineRecord(path="/x/llama-server", version="b9999", sha="abc1234")


class Stop(Exception):
    """Ends a sweep on its way."""


def model(name: str = "a model", path: str = "/home/somebody/m.gguf") -> ModelRecord:
    return ModelRecord(
        path=path,
        name=name,
        architecture="gemma4",
        type="Q4_0",
        size_bytes=2**30,
        fingerprint="sha256:0123",
    )


def confirmed(**axes: object) -> SweepPlan:
    """The small plan of ``fake_sweep``, with confirming passes."""
    return msgspec.structs.replace(plan(**axes), confirm=True)


def fast(**axes: object) -> SweepPlan:
    grid = {"target_type": ("Q4_0", "Q8_0"), "head_type": ("Q8_0", "Q4_K"), "n_max": (1, 2, 3, 4)}
    return msgspec.structs.replace(plan(**(grid | axes)), fast=True, confirm=True)


def slow_drafts(served: FakeServed) -> None:
    """A cycle costs 1 ms and 0.2 ms a draft; on Q8_0 twice of it."""
    double = 2.0 if served.configuration.target_type == "Q8_0" else 1.0
    served.ms_per_step = double * (1.0 + 0.2 * served.configuration.n_max)


@dataclass
class Steady:
    """A probe of a machine that keeps its pace, nearly."""

    asked: int = 0

    async def take(self) -> float:
        self.asked += 1
        return 2.0 + 0.01 * (self.asked % 5)


def make(
    directory: Path,
    the_plan: SweepPlan,
    *,
    engine: FakeEngine | None = None,
    quiet: FakeQuiet | None = None,
    models: tuple[ModelRecord, ...] = (model(),),
    listen: Callable[[Event], None] = lambda _: None,
) -> Path:
    """Sweep into a new run directory, as ``browndwarf sweep`` does."""
    with create(directory, the_plan, models) as store, contextlib.suppress(Stop):
        asyncio.run(
            run_sweep(the_plan, store, engine or FakeEngine(), quiet or FakeQuiet(), listen)
        )
    return directory


def create(
    directory: Path, the_plan: SweepPlan, models: tuple[ModelRecord, ...] = (model(),)
) -> RunStore:
    store = RunStore.create(directory, plan=msgspec.to_builtins(the_plan), identity={})
    for key, value in (("machine", MACHINE), ("engine", ENGINE), ("models", models)):
        store.set_meta(key, msgspec.to_builtins(value))
    return store


def reading_of(directory: Path) -> Reading:
    return read(read_run(directory))


def page_of(directory: Path) -> str:
    reading = reading_of(directory)
    return render(collect(reading, wording(reading)))


def text_of(page: str) -> str:
    """What a reader sees of it, spaces folded."""
    body = re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL)
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", body)))


@dataclass
class Tags(HTMLParser):
    """All tags of a page, and its attributes with their values."""

    tags: set[str] = field(default_factory=set)
    attributes: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, Any]]) -> None:
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]


def tags_of(page: str) -> Tags:
    parser = Tags()
    parser.feed(page)
    parser.close()
    return parser
