"""Both arms of a comparison: run them in turn, or take runs that exist."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from browndwarf.bench.compare import Comparison, compare_runs
from browndwarf.bench.saved import read_run, run_data
from browndwarf.bench.serve import split_command
from browndwarf.cli.benching import INTERRUPTED, Settings, Source, bench
from browndwarf.cli.render import Output
from browndwarf.errors import Interrupted, UsageError


def split_runs(words: Sequence[str], separator: str) -> tuple[list[Path], list[Path]]:
    """Run directories before and after the ``--``."""
    if list(words).count(separator) != 1:
        raise UsageError(
            "base and MTP runs are not told apart",
            why="exactly one -- must stand between them",
            fix="browndwarf bench compare base-1 base-2 -- mtp-1 mtp-2",
        )
    at = list(words).index(separator)
    return [Path(word) for word in words[:at]], [Path(word) for word in words[at + 1 :]]


def compare(base: Sequence[Path], mtp: Sequence[Path]) -> list[Comparison]:
    """One comparison per label; runs of one label are its repeats, in the order given."""
    arms: list[dict[str, list[Path]]] = []
    for runs in (base, mtp):
        by_label: dict[str, list[Path]] = {}
        for folder in runs:
            by_label.setdefault(read_run(folder).label, []).append(folder)
        arms.append(by_label)
    first, second = arms
    if len(first) == len(second) == 1:  # one model under two names
        second = dict(zip(first, second.values(), strict=True))
    if set(first) != set(second):
        missing = sorted(set(first) ^ set(second))
        raise UsageError(
            f"{', '.join(missing)} is in one arm only",
            why="every label needs base and MTP runs",
            fix="give runs of the same model the same --label",
        )
    return [
        compare_runs(
            [run_data(f) for f in first[name]], [run_data(f) for f in second[name]], label=name
        )
        for name in first
    ]


def alternate(
    base: str, mtp: str, repeats: int, wanted: Settings, folder: Path, out: Output
) -> list[Comparison]:
    """Run both commands in the order A B B A A B ..., and compare."""
    arms: dict[str, tuple[str, ...]] = {
        "base": tuple(split_command(base)),
        "mtp": tuple(split_command(mtp)),
    }
    made: dict[str, list[Path]] = {"base": [], "mtp": []}
    for number in range(1, repeats + 1):
        order: tuple[Literal["base", "mtp"], ...] = ("base", "mtp")
        for name in order if number % 2 else order[::-1]:
            place = folder / f"{name}-{number}"
            out.note(f"--- {name}, repeat {number} of {repeats}")
            record = bench(wanted, Source(argv=arms[name]), place, out)
            made[name].append(place)
            if record.stopped == INTERRUPTED:
                raise Interrupted(
                    "interrupted",
                    why=f"{sum(map(len, made.values()))} runs are kept in {folder}",
                    fix="compare what there is with `browndwarf bench compare`",
                )
    return compare(made["base"], made["mtp"])
