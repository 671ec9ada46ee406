"""What kind of server answers at an address, what a request to it looks like, its counters.

Boundary: knows the differences between llama-server, vLLM-like servers and any other with the
OpenAI interface; sends over a ``transport``. Fields that only one kind understands are sent to
that kind only.

Example:
    >>> endpoint = await describe(transport)            # doctest: +SKIP
    >>> endpoint.kind, endpoint.model                    # doctest: +SKIP
    ('llama.cpp', 'gemma-4-12b-it-Q4_K_M.gguf')
"""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Any, Literal

import msgspec

from browndwarf.bench.dataset import Prompt
from browndwarf.bench.framing import Exchange
from browndwarf.bench.transport import Transport
from browndwarf.engine.wire import SpecCounters
from browndwarf.errors import RequestFailed
from browndwarf.records import Record

Kind = Literal["llama.cpp", "vllm", "other"]
Api = Literal["chat", "completions"]

PATHS: dict[Api, str] = {"chat": "/chat/completions", "completions": "/completions"}

_COUNTER = re.compile(
    r"^(?:llamacpp|vllm):spec_decode_num_(drafts|draft_tokens|accepted_tokens"
    r"|accepted_tokens_per_pos)(?:_total)?(?:\{([^}]*)\})?\s+([\d.eE+]+)\s*$"
)
_POSITION = re.compile(r'position="(\d+)"')


class Endpoint(Record, frozen=True, kw_only=True):
    """A server as it describes itself. ``metrics``: it has speculation counters to read."""

    kind: Kind
    model: str = ""
    slots: int = 0
    n_ctx: int = 0
    build: str = ""
    metrics: bool = False


class Sampling(Record, frozen=True, kw_only=True):
    """The part of every request that does not depend on the prompt."""

    model: str
    api: Api = "chat"
    max_tokens: int = 256
    temperature: float = 0.0
    seed: int = 1
    ignore_eos: bool = False
    prefix_cache: bool = False


async def describe(transport: Transport) -> Endpoint:
    """Ask a server what it is.

    Raises:
        RequestFailed: nothing answers there.
    """
    models = await transport.get(_v1(transport) + "/models")
    if models.fault in ("connect", "timeout"):
        raise RequestFailed(
            "no server answers at the given address",
            why=models.detail,
            fix="start the server, check --base-url, or let --server start one",
        )
    listed = _json(models)
    entries = listed.get("data") if isinstance(listed.get("data"), list) else []
    model = str(entries[0].get("id", "")) if entries and isinstance(entries[0], dict) else ""
    metrics = await transport.get("/metrics", base=False)
    text = metrics.body.decode("utf-8", "replace") if metrics.status == 200 else ""
    props = _json(await transport.get("/props", base=False))
    if "total_slots" in props or "default_generation_settings" in props:
        settings = props.get("default_generation_settings")
        return Endpoint(
            kind="llama.cpp",
            model=PurePath(str(props.get("model_path") or model)).name,
            slots=int(props.get("total_slots") or 0),
            n_ctx=int((settings if isinstance(settings, dict) else {}).get("n_ctx") or 0),
            build=str(props.get("build_info") or ""),
            metrics="llamacpp:" in text,
        )
    return Endpoint(kind="vllm" if "vllm:" in text else "other", model=model, metrics=bool(text))


async def read_counters(transport: Transport) -> SpecCounters | None:
    """Speculation counters now; None where the server has none."""
    answer = await transport.get("/metrics", base=False)
    if answer.status != 200 or answer.fault:
        return None
    return parse_counters(answer.body.decode("utf-8", "replace"))


def parse_counters(text: str) -> SpecCounters | None:
    """Counters under llama.cpp's or vLLM's names, summed over labels such as the engine's."""
    sums: dict[str, int] = {}
    positions: dict[int, int] = {}
    for line in text.splitlines():
        match = _COUNTER.match(line)
        if match is None:
            continue
        try:
            value = int(float(match[3]))
        except (ValueError, OverflowError):
            continue
        if match[1] == "accepted_tokens_per_pos":
            place = _POSITION.search(match[2] or "")
            if place and int(place[1]) < 1024:
                positions[int(place[1])] = positions.get(int(place[1]), 0) + value
        else:
            sums[match[1]] = sums.get(match[1], 0) + value
    if not sums:
        return None
    return SpecCounters(
        drafts=sums.get("drafts", 0),
        draft_tokens=sums.get("draft_tokens", 0),
        accepted=sums.get("accepted_tokens", 0),
        per_position=tuple(positions.get(i, 0) for i in range(max(positions, default=-1) + 1)),
    )


def request_path(transport: Transport, api: Api) -> str:
    """The path of the endpoint; an address that ends in /v1 is taken as it is."""
    return _v1(transport) + PATHS[api]


def request_body(prompt: Prompt, sampling: Sampling, kind: Kind) -> bytes:
    """The JSON of one request."""
    body: dict[str, Any] = {
        "model": sampling.model,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "seed": sampling.seed,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if sampling.api == "chat":
        body["messages"] = list(prompt.messages)
        body |= {k: v for k, v in prompt.extra.items() if k == "tools" or kind != "other"}
    else:
        body["prompt"] = prompt.text
    if sampling.ignore_eos:
        body["ignore_eos"] = True
    if kind == "llama.cpp":
        body["cache_prompt"] = sampling.prefix_cache
    elif kind == "vllm":
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    return msgspec.json.encode(body)


def _v1(transport: Transport) -> str:
    return "" if transport.base_path.endswith("/v1") else "/v1"


def _json(exchange: Exchange) -> dict[str, Any]:
    if exchange.status != 200 or exchange.fault:
        return {}
    try:
        return msgspec.json.decode(exchange.body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}
