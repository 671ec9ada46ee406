"""Options that several commands share, declared once."""

from __future__ import annotations

from typing import Annotated

import typer

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
LlamaDirOption = Annotated[
    str | None,
    typer.Option(
        "--llama-dir",
        help="Folder of a llama.cpp build (also LLAMA_CPP_DIR). Default: PATH, then our own.",
    ),
]
DockerOption = Annotated[
    str | None, typer.Option("--docker", help="Run llama.cpp from this container image.")
]
