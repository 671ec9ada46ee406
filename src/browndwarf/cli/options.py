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

# How a pair runs in this process: chat and serve.
PairDraftOption = Annotated[
    str | None,
    typer.Option("--draft", "-d", help="The MTP head's file, demo, none, or lookup."),
]
SessionsCapOption = Annotated[
    str, typer.Option("--sessions-cap", help="Most disk space for all of them together.")
]
RereadOption = Annotated[
    bool,
    typer.Option(help="Read a conversation again where its saved state does not fit."),
]
PairCtxOption = Annotated[str, typer.Option("--ctx", help="Context, such as 16k.")]
PairNMaxOption = Annotated[int, typer.Option("--n-max", help="Draft tokens per step.")]
PairPMinOption = Annotated[float, typer.Option("--p-min", help="Least draft probability.")]
AdaptiveOption = Annotated[
    bool, typer.Option(help="Choose the number of drafts by what is measured.")
]
PairKvOption = Annotated[str, typer.Option("--kv", help="Type of the KV cache.")]
PairLayersOption = Annotated[int, typer.Option("--layers", help="Layers on the device; -1 is all.")]
PairThreadsOption = Annotated[int | None, typer.Option(help="CPU threads.")]
