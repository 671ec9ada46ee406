"""``browndwarf inspect``: what a GGUF is, and whether a drafter belongs to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from browndwarf.cli.options import JsonOption

if TYPE_CHECKING:
    from browndwarf.models.gguf import HeadMatch, ModelInfo


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("inspect")(inspect)


def inspect(
    model: Annotated[str, typer.Argument(help="A .gguf file, demo, or hf:owner/name[:file].")],
    draft: Annotated[
        str | None, typer.Option("--draft", help="A drafter: does it belong to MODEL?")
    ] = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    json: JsonOption = False,
) -> None:
    """Show a model's shape, tensors, head and tokenizer, from its header alone.

    Ends with 1 when --draft names a drafter that does not belong to the model.
    """
    from browndwarf.cli.render import Output
    from browndwarf.models.gguf import check_head, read_model
    from browndwarf.models.resolve import resolve_model

    out = Output(json=json)
    info = read_model(resolve_model(model))
    head = read_model(resolve_model(draft, "head")) if draft is not None else None
    match = check_head(info, head) if head is not None else None
    if not json:
        from browndwarf.cli.memory_view import show_model

        show_model(out, info, head, match, tensors=tensors)
    out.document("inspect", 1, document(info, head, match))
    if match is not None and not match.ok:
        raise typer.Exit(1)


def document(info: ModelInfo, head: ModelInfo | None, match: HeadMatch | None) -> dict[str, Any]:
    """The body of an ``inspect`` document."""
    body = _model(info)
    if head is not None and match is not None:
        body["draft"] = {k: v for k, v in _model(head).items() if k != "tensors"}
        body["match"] = {
            "ok": match.ok,
            "reasons": list(match.reasons),
            "notes": list(match.notes),
        }
    return body


def _model(info: ModelInfo) -> dict[str, Any]:
    layers, shape = info.layers, info.shape
    return {
        "path": str(info.path),
        "files": [str(path) for path in info.files],
        "architecture": info.architecture,
        "name": info.name,
        "file_type": info.file_type,
        "file_bytes": info.file_bytes,
        "parameters": info.parameters,
        "bits_per_weight": round(info.bits_per_weight, 4),
        "layers": {
            "total": layers.total,
            "full": layers.full,
            "sliding": layers.sliding,
            "recurrent": layers.recurrent,
            "kv_shared": layers.kv_shared,
        },
        "hidden_width": info.hidden_width,
        "hidden_out": shape.hidden_out,
        "context_length": info.context_length,
        "sliding_window": shape.sliding_window,
        "experts": {"total": shape.experts, "used": shape.experts_used},
        "vocab": info.vocab,
        "tied": info.tied,
        "head": {"kind": info.head.kind, "layers": info.head.layers},
        "tokenizer": {
            "model": info.tokenizer.model,
            "fingerprint": info.tokenizer.fingerprint,
            "chat_template": info.tokenizer.has_chat_template,
        },
        "cache_understood": shape.modelled,
        "type_bytes": info.type_bytes,
        "blocks": [
            {
                "index": b.index,
                "kind": b.kind,
                "part": b.part,
                "heads": b.heads,
                "kv_heads": b.kv_heads,
                "k_dim": b.k_dim,
                "v_dim": b.v_dim,
                "own_kv": b.own_kv,
            }
            for b in info.blocks
        ],
        "tensors": [
            {"name": t.name, "type": t.type, "shape": list(t.shape), "bytes": t.bytes}
            for t in info.tensors
        ],
    }
