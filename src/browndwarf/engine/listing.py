"""What devices a llama.cpp build sees: the text of its ``--list-devices``.

Boundary: runs the build's server for a moment and returns what it prints; what the lines mean is
the hardware floor's business.

Example:
    text = list_devices(build)
"""

from __future__ import annotations

import os
import subprocess

from browndwarf.engine import docker
from browndwarf.engine.locate import Build
from browndwarf.errors import EngineError

TIMEOUT_S = 60.0
"""A first CUDA start on a cold machine takes many seconds."""


def list_devices(build: Build) -> str:
    """The output of ``--list-devices``; empty for a build without that flag.

    Raises:
        EngineError: it does not start, fails, or does not answer in time.
    """
    if "list-devices" not in build.features and "--list-devices" not in build.flags:
        return ""
    command = (
        docker.probe_command(build.docker_image) if build.docker_image else [str(build.server)]
    )
    try:
        done = subprocess.run(
            [*command, "--list-devices"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT_S,
            env={**os.environ, **build.env},
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise EngineError(
            f"{build.label} does not list its devices",
            why=str(exc),
            fix="run `llama-server --list-devices` yourself and see what it says",
        ) from exc
    text = done.stdout.decode("utf-8", "replace")
    if done.returncode != 0:
        last = (text.strip().splitlines() or ["no output"])[-1]
        raise EngineError(
            f"{build.label} does not list its devices",
            why=f"it ended with {done.returncode}: {last[:200]}",
            fix="run `llama-server --list-devices` yourself and see what it says",
        )
    return text
