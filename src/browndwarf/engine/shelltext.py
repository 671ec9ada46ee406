"""Command lines as text that a person can read, paste and keep.

Boundary: quoting and layout only; flags come from ``options``.

Example:
    >>> print(format_command([["llama-server"], ["-m", "my model.gguf"]], {}))
    llama-server \\
      -m 'my model.gguf'
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Literal

_PLAIN_POWERSHELL = re.compile(r"[A-Za-z0-9_./:\\=+-]+")


def format_command(
    groups: Sequence[Sequence[str]],
    env: Mapping[str, str],
    *,
    shell: Literal["posix", "powershell"] = "posix",
) -> str:
    """argv in groups, one group a line, continued as the shell wants it.

    Args:
        groups: the program, then each flag with its value.
        env: variables to set for this command.
    """
    if shell == "posix":
        rows = [f"{key}={shlex.quote(value)}" for key, value in env.items()]
        rows += [shlex.join(group) for group in groups]
        return " \\\n  ".join(rows)
    rows = [" ".join(_powershell(part) for part in group) for group in groups]
    rows[0] = "& " + rows[0]
    settings = "".join(f"$env:{key} = {_powershell(value)}\n" for key, value in env.items())
    return settings + " `\n  ".join(rows)


def _powershell(text: str) -> str:
    return text if _PLAIN_POWERSHELL.fullmatch(text) else "'" + text.replace("'", "''") + "'"
