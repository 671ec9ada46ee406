"""Common graphics cards: memory and bandwidth, so that a plan works without the card.

``memory_mib`` is what the driver reports where that is known, else the nominal size; display and
driver keep some of it. Bandwidth is the nominal peak. Source: the vendors' product specifications
(memory size, bus width x data rate); H200's memory is as its driver reported it in our runs.

Example:
    find_card("rtx 4060").memory_mib
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import Literal

from browndwarf.errors import UsageError

CardBackend = Literal["cuda", "rocm", "vulkan", "metal", "sycl"]


@dataclass(frozen=True, slots=True)
class Card:
    """One card. ``bandwidth_gb_s`` counts 10^9 bytes."""

    name: str
    memory_mib: int
    bandwidth_gb_s: float
    backend: CardBackend
    source: str = "vendor's specification"


def _nvidia(name: str, gib: int, bandwidth: float) -> Card:
    return Card(name, gib * 1024, bandwidth, "cuda")


def _amd(name: str, gib: int, bandwidth: float) -> Card:
    return Card(name, gib * 1024, bandwidth, "rocm")


CARDS: tuple[Card, ...] = (
    _nvidia("GTX 1060 6GB", 6, 192),
    _nvidia("GTX 1070", 8, 256),
    _nvidia("GTX 1080", 8, 320),
    _nvidia("GTX 1080 Ti", 11, 484),
    _nvidia("GTX 1660 Super", 6, 336),
    _nvidia("RTX 2060", 6, 336),
    _nvidia("RTX 2070", 8, 448),
    _nvidia("RTX 2080", 8, 448),
    _nvidia("RTX 2080 Ti", 11, 616),
    _nvidia("RTX 3050", 8, 224),
    _nvidia("RTX 3060", 12, 360),
    _nvidia("RTX 3060 Ti", 8, 448),
    _nvidia("RTX 3060 Laptop", 6, 336),
    _nvidia("RTX 3070", 8, 448),
    _nvidia("RTX 3070 Ti", 8, 608),
    _nvidia("RTX 3080", 10, 760),
    _nvidia("RTX 3080 12GB", 12, 912),
    _nvidia("RTX 3080 Ti", 12, 912),
    _nvidia("RTX 3090", 24, 936),
    _nvidia("RTX 3090 Ti", 24, 1008),
    _nvidia("RTX 4050 Laptop", 6, 192),
    _nvidia("RTX 4060", 8, 272),
    _nvidia("RTX 4060 Laptop", 8, 256),
    _nvidia("RTX 4060 Ti", 8, 288),
    _nvidia("RTX 4060 Ti 16GB", 16, 288),
    _nvidia("RTX 4070", 12, 504),
    _nvidia("RTX 4070 Laptop", 8, 256),
    _nvidia("RTX 4070 Super", 12, 504),
    _nvidia("RTX 4070 Ti", 12, 504),
    _nvidia("RTX 4070 Ti Super", 16, 672),
    _nvidia("RTX 4080", 16, 717),
    _nvidia("RTX 4080 Laptop", 12, 432),
    _nvidia("RTX 4080 Super", 16, 736),
    _nvidia("RTX 4090", 24, 1008),
    _nvidia("RTX 4090 Laptop", 16, 576),
    _nvidia("RTX 5050", 8, 320),
    _nvidia("RTX 5060", 8, 448),
    _nvidia("RTX 5060 Laptop", 8, 384),
    _nvidia("RTX 5060 Ti", 8, 448),
    _nvidia("RTX 5060 Ti 16GB", 16, 448),
    _nvidia("RTX 5070", 12, 672),
    _nvidia("RTX 5070 Laptop", 8, 384),
    _nvidia("RTX 5070 Ti", 16, 896),
    _nvidia("RTX 5080", 16, 960),
    _nvidia("RTX 5090", 32, 1792),
    _nvidia("RTX A4000", 16, 448),
    _nvidia("RTX A6000", 48, 768),
    _nvidia("RTX 6000 Ada", 48, 960),
    _nvidia("RTX PRO 6000", 96, 1792),
    _nvidia("T4", 16, 320),
    _nvidia("L4", 24, 300),
    _nvidia("A10", 24, 600),
    _nvidia("A10G", 24, 600),
    _nvidia("L40S", 48, 864),
    _nvidia("V100 16GB", 16, 900),
    _nvidia("V100 32GB", 32, 900),
    _nvidia("A100 40GB", 40, 1555),
    _nvidia("A100 80GB", 80, 2039),
    _nvidia("H100", 80, 3350),
    Card("H200", 143_771, 4800, "cuda", "vendor's specification; memory as its driver reports"),
    _amd("RX 6600", 8, 224),
    _amd("RX 6600 XT", 8, 256),
    _amd("RX 6700 XT", 12, 384),
    _amd("RX 6800", 16, 512),
    _amd("RX 6800 XT", 16, 512),
    _amd("RX 6900 XT", 16, 512),
    _amd("RX 7600", 8, 288),
    _amd("RX 7600 XT", 16, 288),
    _amd("RX 7700 XT", 12, 432),
    _amd("RX 7800 XT", 16, 624),
    _amd("RX 7900 GRE", 16, 576),
    _amd("RX 7900 XT", 20, 800),
    _amd("RX 7900 XTX", 24, 960),
    _amd("RX 9060 XT 8GB", 8, 320),
    _amd("RX 9060 XT 16GB", 16, 320),
    _amd("RX 9070", 16, 640),
    _amd("RX 9070 XT", 16, 640),
    _amd("MI210", 64, 1638),
    _amd("MI300X", 192, 5300),
    Card("Arc A750", 8 * 1024, 512, "sycl"),
    Card("Arc A770", 16 * 1024, 560, "sycl"),
    Card("Arc B570", 10 * 1024, 380, "sycl"),
    Card("Arc B580", 12 * 1024, 456, "sycl"),
)


def find_card(text: str) -> Card:
    """The card whose name is ``text``, vendor words, case, blanks and dashes aside.

    Raises:
        UsageError: unknown; the closest names are suggested.
    """
    wanted = _plain(text)
    for card in CARDS:
        if _plain(card.name) == wanted:
            return card
    names = {_plain(card.name): card.name for card in CARDS}
    near = [names[key] for key in difflib.get_close_matches(wanted, names, n=4, cutoff=0.5)]
    near += [name for key, name in names.items() if wanted and wanted in key and name not in near]
    raise UsageError(
        f"no card named {text!r} in the table",
        why=f"it has {len(CARDS)} cards; near ones: {', '.join(near[:6]) or 'none'}",
        fix="take one of these, or state the memory with --vram",
    )


def _plain(text: str) -> str:
    words = re.sub(r"\b(nvidia|geforce|amd|radeon|intel|gpu|graphics|tesla)\b", " ", text.lower())
    return re.sub(r"[^a-z0-9]", "", words)
