"""What llama.cpp's tools print, as typed values.

Boundary: pure; text in, values out. Numbers keep the units that the tools use.

Example:
    >>> parse_perplexity("Final estimate: PPL = 7.1234 +/- 0.05", 1.0).ppl
    7.1234
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import msgspec

from browndwarf.errors import ToolFailed

_STEP = re.compile(r"^\s*\[\s*(\d+)/\s*(\d+)\]\s+(\S+)\s+-\s+\[")
_TYPE = re.compile(r"type =\s*(\w+)")
_TO_TYPE = re.compile(r"(?:converting|quantizing) to\s+(\w+)|MiB \((\w+)\)")
_FALLBACK = re.compile(
    r"(?:warning: )?(\S+)\s+- ncols\s+(\d+) not divisible by\s+(\d+) "
    r"\(required for type\s+(\w+)\).*?falling back to\s+(\w+)"
)
_QUANT_SIZE = re.compile(r"quant size\s*=\s*([\d.]+) MiB")
_FINAL = re.compile(r"Final estimate: PPL = ([\d.einfa+-]+) \+/- ([\d.einfa+-]+)")
_PASS = re.compile(r"([\d.]+) seconds per pass")
_STAT = r"\s*:\s*(-?[\d.]+|-?nan|-?inf)\s*%?(?:\s*±\s*([\d.]+|-?nan|inf))?"
_IDS = re.compile(r"\[[\d,\s]*\]")


@dataclass(frozen=True)
class Fallback:
    """A tensor whose row length does not divide by the type's block, and what it got instead."""

    tensor: str
    columns: int
    block: int
    wanted: str
    got: str


@dataclass(frozen=True)
class PerplexityResult:
    """llama-perplexity's findings; ``*_error`` are its own standard errors.

    The divergence fields are set only by a run against saved logits, where ``ppl`` is that of
    the model under test. ``same_top`` is a share from 0 to 1.
    """

    ppl: float
    ppl_error: float
    seconds: float
    base_ppl: float | None = None
    kld_mean: float | None = None
    kld_error: float | None = None
    kld_median: float | None = None
    kld_p99: float | None = None
    kld_p999: float | None = None
    kld_max: float | None = None
    same_top: float | None = None
    same_top_error: float | None = None


class BenchRow(msgspec.Struct, frozen=True, kw_only=True):
    """One row of ``llama-bench -o json``: tokens per second and nanoseconds per repetition."""

    n_prompt: int
    n_gen: int
    n_depth: int = 0
    avg_ns: float = 0.0
    stddev_ns: float = 0.0
    avg_ts: float = 0.0
    stddev_ts: float = 0.0
    samples_ns: tuple[int, ...] = ()
    samples_ts: tuple[float, ...] = ()
    n_threads: int = 0
    n_batch: int = 0
    n_ubatch: int = 0
    type_k: str = ""
    type_v: str = ""
    backends: str = ""
    cpu_info: str = ""
    gpu_info: str = ""
    model_type: str = ""
    model_size: int = 0
    model_n_params: int = 0
    build_commit: str = ""


def quantize_step(line: str) -> tuple[int, int] | None:
    """(tensors done, tensors in all) from a progress line; None for other lines."""
    match = _STEP.match(line)
    return (int(match[1]), int(match[2])) if match else None


def tensor_types(text: str) -> dict[str, str]:
    """Tensor name -> type in the result, from llama-quantize's progress lines."""
    types: dict[str, str] = {}
    cut_off = ""
    for line in text.splitlines():
        step = _STEP.match(line)
        source = _TYPE.search(line)
        target = _TO_TYPE.search(line)
        if step is not None and source is not None:
            types[step[3]] = (target[1] or target[2]) if target else source[1]
            # A remark about the imatrix may come before the rest of the line.
            cut_off = "" if "MiB" in line else step[3]
        elif cut_off and target:
            types[cut_off] = target[1] or target[2]
            cut_off = ""
    return {name: kind.lower() if kind[:1] in "FB" else kind for name, kind in types.items()}


def fallbacks(text: str) -> tuple[Fallback, ...]:
    """Tensors that got another type than asked for; each is named once."""
    found = {
        match[1]: Fallback(match[1], int(match[2]), int(match[3]), match[4], match[5])
        for match in _FALLBACK.finditer(text)
    }
    return tuple(found.values())


def quantized_bytes(text: str) -> int | None:
    """Size of all tensors as llama-quantize states it; None if it does not."""
    match = _QUANT_SIZE.search(text)
    return int(float(match[1]) * 2**20) if match else None


def parse_perplexity(text: str, seconds: float) -> PerplexityResult | None:
    """The findings in llama-perplexity's output; None if there are none."""

    def stat(label: str) -> tuple[float | None, float | None]:
        match = re.search(rf"^{label}{_STAT}", text, re.MULTILINE)
        if match is None:
            return None, None
        return float(match[1]), float(match[2]) if match[2] else None

    mean, mean_error = stat(r"Mean\s+KLD")
    if mean is not None:
        ppl, ppl_error = stat(r"Mean PPL\(Q\)")
        top, top_error = stat(r"Same top p")
        return PerplexityResult(
            ppl=ppl if ppl is not None else float("nan"),
            ppl_error=ppl_error if ppl_error is not None else float("nan"),
            seconds=seconds,
            base_ppl=stat(r"Mean PPL\(base\)")[0],
            kld_mean=mean,
            kld_error=mean_error,
            kld_median=stat(r"Median\s+KLD")[0],
            kld_p99=stat(r"99\.0%\s+KLD")[0],
            kld_p999=stat(r"99\.9%\s+KLD")[0],
            kld_max=stat(r"Maximum KLD")[0],
            same_top=top / 100 if top is not None else None,
            same_top_error=top_error / 100 if top_error is not None else None,
        )
    final = _FINAL.search(text)
    if final is None:
        return None
    try:
        return PerplexityResult(float(final[1]), float(final[2]), seconds)
    except ValueError:
        return None


def pass_seconds(text: str) -> float | None:
    """Seconds of the first pass, as llama-imatrix and llama-perplexity state them."""
    match = _PASS.search(text)
    try:
        return float(match[1]) if match else None
    except ValueError:
        return None


def parse_bench(text: str) -> list[BenchRow]:
    """Rows of ``llama-bench -o json``.

    Raises:
        ToolFailed: it is not such JSON.
    """
    start = text.find("[")
    try:
        rows: Any = json.loads(text[start:] if start >= 0 else text)
        return msgspec.convert(rows, list[BenchRow], strict=False)
    except (ValueError, msgspec.ValidationError) as exc:
        raise ToolFailed(
            "llama-bench's output cannot be read", why=str(exc), fix="try another build"
        ) from exc


def parse_ids(text: str) -> list[int]:
    """Token ids from ``llama-tokenize --ids``.

    Raises:
        ToolFailed: there is no list in the text.
    """
    match = None
    for match in _IDS.finditer(text):  # noqa: B007 - the last list is the one
        pass
    if match is None:
        raise ToolFailed(
            "llama-tokenize's output cannot be read", why=text[:200], fix="try another build"
        )
    return [int(part) for part in re.findall(r"\d+", match[0])]
