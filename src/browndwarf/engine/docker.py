"""How a llama.cpp image is run: argv for ``docker``, nothing else.

Boundary: builds command lines; starting and stopping is ``process``'s business. Models are
mounted read-only at their own path, so that flags are the same inside and outside; the port
is published on the loopback interface only.

Example:
    >>> gpu_flags("ghcr.io/ggml-org/llama.cpp:full-cuda")
    ['--gpus', 'all']
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

SERVER_IN_IMAGE = Path("/app/llama-server")
"""Where the ``server`` and ``full`` images of ggml-org keep the server; tools lie beside it."""


def gpu_flags(image: str) -> list[str]:
    """Device flags that an image needs, judged by its tag."""
    tag = image.rpartition(":")[2].lower()
    if "cuda" in tag:
        return ["--gpus", "all"]
    if "rocm" in tag or "hip" in tag:
        return ["--device", "/dev/kfd", "--device", "/dev/dri"]
    if "vulkan" in tag or "intel" in tag:
        return ["--device", "/dev/dri"]
    return []


def probe_command(image: str, program: Path = SERVER_IN_IMAGE) -> list[str]:
    """argv that runs a program of the image, to be followed by the program's flags."""
    return ["docker", "run", "--rm", "--entrypoint", program.as_posix(), image]


def run_command(
    image: str,
    argv: Sequence[str],
    *,
    name: str,
    port: int | None = None,
    read_only: Sequence[Path] = (),
    writable: Sequence[Path] = (),
    env: Mapping[str, str] | None = None,
) -> list[str]:
    """``docker run`` for a program (``argv[0]``) of an image.

    Args:
        argv: the program's path in the image, then its flags.
        name: container name; ``kill_command`` takes the same.
        port: published as 127.0.0.1:port.
        read_only: files and folders mounted at their own path.
        writable: folders mounted at their own path, writable.
        env: environment inside the container.
    """
    command = ["docker", "run", "--rm", "--init", "--name", name, *gpu_flags(image)]
    if port is not None:
        command += ["-p", f"127.0.0.1:{port}:{port}"]
    for path in dict.fromkeys(read_only):
        command += ["-v", f"{path}:{path}:ro"]
    for path in dict.fromkeys(writable):
        command += ["-v", f"{path}:{path}"]
    for key, value in (env or {}).items():
        command += ["-e", f"{key}={value}"]
    return [*command, "--entrypoint", argv[0], image, *argv[1:]]


def kill_command(name: str) -> list[str]:
    """argv that removes a container whatever its state."""
    return ["docker", "rm", "-f", name]
