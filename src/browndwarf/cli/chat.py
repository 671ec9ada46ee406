"""``browndwarf chat``: talk to a model in this process; conversations are kept on disk by name.

Answers go to stdout as they come, thoughts and figures to stderr. Ctrl-C ends an answer, and at
the prompt the program. A named conversation is saved after every turn.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from browndwarf.cli.options import (
    AdaptiveOption,
    JsonOption,
    PairCtxOption,
    PairDraftOption,
    PairKvOption,
    PairLayersOption,
    PairNMaxOption,
    PairPMinOption,
    PairThreadsOption,
    RereadOption,
    SessionsCapOption,
)

if TYPE_CHECKING:
    from browndwarf.cli.render import Output
    from browndwarf.decode.conversation import Conversation
    from browndwarf.decode.result import Answer, AnswerStats
    from browndwarf.decode.session import SessionStore

_HELP = "/save  /stats  /drop (forget the last turn)  /quit"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("chat")(chat)


def chat(
    model: Annotated[
        str | None, typer.Argument(help="A .gguf file, demo, or hf:owner/name[:file].")
    ] = None,
    draft: PairDraftOption = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="Say this, print the answer and stop.")
    ] = None,
    session: Annotated[
        str | None, typer.Option("--session", "-s", help="Keep the conversation by this name.")
    ] = None,
    sessions: Annotated[
        bool, typer.Option("--sessions", help="List the kept conversations and stop.")
    ] = False,
    delete: Annotated[
        str | None, typer.Option("--delete", help="Delete a kept conversation and stop.")
    ] = None,
    reread: RereadOption = False,
    folder: Annotated[
        Path | None, typer.Option("--sessions-dir", help="Where conversations are kept.")
    ] = None,
    cap: SessionsCapOption = "20GiB",
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    thinking: Annotated[bool, typer.Option(help="Let the model think before it answers.")] = False,
    ctx: PairCtxOption = "4k",
    n_max: PairNMaxOption = 3,
    p_min: PairPMinOption = 0.0,
    adaptive: AdaptiveOption = False,
    kv: PairKvOption = "f16",
    layers: PairLayersOption = -1,
    threads: PairThreadsOption = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="0 is off.")] = 0,
    top_p: Annotated[float, typer.Option(help="1 is off.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="0 is off.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Same seed, same answers.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 1024,
    json: JsonOption = False,
) -> None:
    """Chat with a model in this process, with MTP, and keep conversations on disk."""
    from browndwarf.cli.render import Output
    from browndwarf.decode.session import SessionStore
    from browndwarf.errors import UsageError
    from browndwarf.files import check_writable
    from browndwarf.units import parse_bytes, parse_count

    out = Output(json=json)
    place = folder or _default_folder()
    if sessions or delete is not None:
        _keep_house(SessionStore(place), delete, out)
        return
    if model is None:
        raise UsageError("no model is named", fix="browndwarf chat MODEL, or browndwarf chat demo")
    if json and prompt is None:
        raise UsageError("--json needs --prompt", why="a chat has no single result")
    if session is not None:
        check_writable(place, "keep the conversation")
    from browndwarf.decode.llm import load
    from browndwarf.decode.sampling import Sampling

    if model == "demo" and draft is None:
        draft = "demo"
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    with load(
        model,
        draft,
        sessions=place,
        sessions_cap_bytes=parse_bytes(cap),
        n_ctx=parse_count(ctx),
        n_max=n_max,
        p_min=p_min,
        adaptive=adaptive,
        kv_k=kv,
        kv_v=kv,
        gpu_layers=layers,
        threads=threads,
        context_shift=True,
    ) as llm:
        talk = llm.conversation(session, system=system, thinking=thinking, reread=reread)
        settings = {"sampling": sampling, "max_tokens": max_tokens}
        if prompt is not None:
            answer = _say(talk, prompt, settings, out)
            _show_calls(answer, out)
            if session is not None:
                talk.save()
            out.document("chat", 1, _payload(answer))
            return
        out.note(f"{llm.pair.info.name}, head: {llm.pair.kind}. {_HELP}")
        if talk.messages and session is not None:
            out.note(f"going on with {session!r}: {len(talk.messages)} messages")
        _talk(talk, settings, out)


def _talk(talk: Conversation, settings: dict[str, Any], out: Output) -> None:
    for line in _lines():
        if line == "/quit":
            break
        if line == "/stats":
            if talk.last is not None:
                out.note(_figures(talk.last.stats))
        elif line == "/save":
            _save(talk, out)
        elif line == "/drop":
            del talk.messages[-2:]
        elif line.startswith("/"):
            out.note(_HELP)
        else:
            answer = _say(talk, line, settings, out)
            _show_calls(answer, out)
            out.note(_figures(answer.stats))
            if talk.name is not None:
                _save(talk, out, quiet=True)


def _lines() -> Iterator[str]:
    """What the user writes, without empty lines, until the end of input or Ctrl-C."""
    shown = sys.stdin.isatty()
    while True:
        if shown:
            sys.stderr.write("\n> ")
            sys.stderr.flush()
        try:
            line = sys.stdin.readline()
        except KeyboardInterrupt:
            return
        if not line:
            return
        if line.strip():
            yield line.strip()


def _say(talk: Conversation, text: str, settings: dict[str, Any], out: Output) -> Answer:
    """One turn, shown as it comes; Ctrl-C keeps what was said."""
    with talk.say(text, **settings) as stream:
        try:
            for chunk in stream:
                # A call is shown as a whole when it is complete.
                if out.json or chunk.kind == "tool_call":
                    continue
                target = sys.stdout if chunk.kind == "text" else sys.stderr
                target.write(chunk.text)
                target.flush()
        except KeyboardInterrupt:
            stream.close()
            out.note("\n(ended by Ctrl-C)")
    if not out.json:
        sys.stdout.write("\n")
        sys.stdout.flush()
    return stream.answer


def _show_calls(answer: Answer, out: Output) -> None:
    for call in answer.tool_calls:
        out.note(f"calls {call.name}({call.arguments})")


def _save(talk: Conversation, out: Output, *, quiet: bool = False) -> None:
    from browndwarf.units import format_bytes

    saved = talk.save()
    if not quiet:
        out.note(f"saved {talk.name!r}: {format_bytes(saved.bytes)} written")


def _figures(stats: AnswerStats) -> str:
    drafts = ""
    if stats.drafted:
        shares = ", ".join(f"{share:.2f}" for share in stats.per_position)
        drafts = f", {stats.accepted_length:.2f} tokens a step, accepted {shares}"
    return (
        f"[{stats.tokens} tokens, {stats.tok_s:.1f} tok/s{drafts}; prompt {stats.prompt_tokens}, "
        f"{stats.reused_tokens} of it reused]"
    )


def _payload(answer: Answer) -> dict[str, Any]:
    stats = answer.stats
    return {
        "text": answer.text,
        "thinking": answer.thinking,
        "tool_calls": [call.as_message() for call in answer.tool_calls],
        "reason": answer.reason,
        "stats": {
            "tokens": stats.tokens,
            "steps": stats.steps,
            "prompt_tokens": stats.prompt_tokens,
            "reused_tokens": stats.reused_tokens,
            "decode_tok_s": stats.tok_s,
            "prefill_s": stats.prefill_s,
            "cycle_ms": stats.cycle_ms,
            "accepted_length": stats.accepted_length,
            "acceptance": {
                "rate": stats.acceptance,
                "per_position": list(stats.per_position),
                "drafted": sum(stats.drafted),
                "accepted": sum(stats.accepted),
            },
        },
    }


def _keep_house(store: SessionStore, delete: str | None, out: Output) -> None:
    """Delete one conversation, or list all."""
    from datetime import datetime

    from rich.table import Table

    from browndwarf.units import format_bytes

    if delete is not None:
        store.delete(delete)
        out.note(f"deleted {delete!r}")
    found = store.list()
    if delete is None:
        table = Table("name", "messages", "tokens", "size", "saved", "begins", box=None)
        for info in found:
            when = datetime.fromtimestamp(info.saved_unix).strftime("%Y-%m-%d %H:%M")
            table.add_row(
                info.name,
                str(info.messages),
                str(info.tokens),
                format_bytes(info.bytes),
                "" if info.problem else when,
                info.problem or info.title,
            )
        if found:
            out.table(table)
        else:
            out.note(f"no conversations in {store.folder}")
    sessions = [
        {
            "name": info.name,
            "messages": info.messages,
            "tokens": info.tokens,
            "bytes": info.bytes,
            "saved_unix": info.saved_unix,
            "problem": info.problem,
        }
        for info in found
    ]
    out.document("sessions", 1, {"folder": str(store.folder), "sessions": sessions})


def _default_folder() -> Path:
    import platformdirs

    return Path(platformdirs.user_data_dir("browndwarf")) / "sessions"
