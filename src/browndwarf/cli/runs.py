"""Which sweep a user means: a run directory, its name in ``runs/``, or ``last``.

Example:
    >>> run_directory("last")                                      # doctest: +SKIP
    PosixPath('runs/model-20261129-1802')
"""

from __future__ import annotations

from pathlib import Path

from browndwarf.errors import UsageError

#: Where sweeps lie unless they were told otherwise, below the folder they were made in.
RUNS = Path("runs")
#: The file that makes a folder a run.
DATABASE = "run.sqlite"
LAST = "last"


def find_run(text: str) -> Path | None:
    """The run that ``text`` names; None where there is none."""
    if text == LAST:
        made = [path.parent for path in RUNS.glob(f"*/{DATABASE}")]
        return max(made, key=_changed, default=None)
    places = (Path(text).expanduser(), RUNS / text)
    return next((p for p in places if (p / DATABASE).is_file()), None)


def run_directory(text: str) -> Path:
    """The run that ``text`` names; what is no run is returned as a path, for its reader to refuse.

    Raises:
        UsageError: ``last`` where none was made yet.
    """
    found = find_run(text)
    if found is None and text == LAST:
        raise UsageError(
            "there is no run here yet",
            why=f"no run lies in {RUNS.absolute()}",
            fix="name its directory, go to the folder that it was made in, or make one with "
            "`browndwarf sweep`",
        )
    return found or Path(text).expanduser()


def _changed(run: Path) -> float:
    """When a run was last written to; while it runs, that is its journal and not the database."""
    return max(path.stat().st_mtime for path in run.glob(f"{DATABASE}*"))
