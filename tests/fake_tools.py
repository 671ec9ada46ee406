"""Fake llama-quantize, -imatrix and -tokenize that do their work, with zeros for data.

``install`` puts this file in place of the fake tools of a build; it imports nothing of ours.
``FAKE_LLAMA`` (see ``fakes.behave``) makes them misbehave:

    quantize: ``differs`` {tensor: type} in the dry run; ``tamper`` truncate, grow, retype,
        reshape or drop; ``full`` (stop, as on a full disk); ``slow`` seconds between tensors
    imatrix: ``slow`` seconds before writing; ``cut`` (write half a file and end well);
        ``pass_s`` what it says of its speed; ``ppl``
    tokenize: ``tokens`` to count
"""

from __future__ import annotations

import json
import os
import re
import struct
import sys
import time
from pathlib import Path
from typing import Any

BEHAVIOUR: dict[str, Any] = json.loads(os.environ.get("FAKE_LLAMA", "{}"))
BLOCKS = {
    "f32": (0, 1, 4), "f16": (1, 1, 2), "q8_0": (8, 32, 34), "q4_0": (2, 32, 18),
    "q5_0": (6, 32, 22), "q4_K": (12, 256, 144), "q6_K": (14, 256, 210), "q3_K": (11, 256, 110),
    "iq2_xs": (17, 256, 74),
}  # fmt: skip
HELP = (
    "  --dry-run\n      predict\n  --tensor-type-file F\n      types\n  --imatrix F\n      data\n"
)


def install(folder: Path) -> None:
    """Replace the tools of a fake engine, whose programs lie in ``folder``."""
    code = f"#!{sys.executable} -IS\n" + Path(__file__).read_text(encoding="utf-8")
    for name in ("llama-quantize", "llama-imatrix", "llama-tokenize"):
        path = folder / name
        path.write_text(code, encoding="utf-8")
        path.chmod(0o755)


def text(value: str) -> bytes:
    """A GGUF string."""
    return struct.pack("<Q", len(value.encode())) + value.encode()


def gguf(keys: bytes, n_keys: int, tensors: list[tuple[str, tuple[int, ...], str, bytes]]) -> bytes:
    """A whole file from raw keys and (name, shape, type, data)."""
    table, data = b"", b""
    for name, shape, kind, body in tensors:
        table += text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape)
        table += struct.pack("<IQ", BLOCKS[kind][0], len(data))
        data += body + b"\0" * (-len(body) % 32)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), n_keys) + keys + table
    return head + b"\0" * (-len(head) % 32) + data


def parse(raw: bytes) -> tuple[bytes, int, list[tuple[str, tuple[int, ...], str, bytes]]]:
    """Raw keys, their number, and the tensors of a file."""
    n_tensors, n_keys = struct.unpack_from("<QQ", raw, 8)
    at = 24

    def read(pattern: str) -> Any:
        nonlocal at
        (value,) = struct.unpack_from("<" + pattern, raw, at)
        at += struct.calcsize("<" + pattern)
        return value

    def string() -> str:
        nonlocal at
        size = read("Q")
        at += size
        return raw[at - size : at].decode()

    def skip(kind: int) -> None:
        nonlocal at
        if kind == 8:
            string()
        elif kind == 9:
            inner, count = read("I"), read("Q")
            for _ in range(count):
                skip(inner)
        else:
            at += {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}[kind]

    for _ in range(n_keys):
        string()
        skip(read("I"))
    keys = raw[24:at]
    names = {number: name for name, (number, _, _) in BLOCKS.items()}
    found = []
    for _ in range(n_tensors):
        name, dims = string(), read("I")
        shape = tuple(read("Q") for _ in range(dims))
        found.append((name, shape, names[read("I")], read("Q")))
    start = -(-at // 32) * 32
    return keys, n_keys, [
        (n, s, k, raw[start + o : start + o + size(s, k)]) for n, s, k, o in found
    ]  # fmt: skip


def size(shape: tuple[int, ...], kind: str) -> int:
    """Bytes of a tensor's data."""
    total = 1
    for number in shape:
        total *= number
    return total // BLOCKS[kind][1] * BLOCKS[kind][2]


def quantize(argv: list[str]) -> int:
    patterns, dry, words = [], False, []
    rest = iter(argv)
    for word in rest:
        if word == "--tensor-type-file":
            pairs = Path(next(rest)).read_text(encoding="utf-8").split()
            patterns = [(p.partition("=")[0].lower(), p.partition("=")[2]) for p in pairs]
        elif word == "--dry-run":
            dry = True
        elif word == "--imatrix":
            next(rest)
        elif not word.startswith("--"):
            words.append(word)
    source, target = words[0], words[1] if not dry else ""
    base = {name.lower(): name for name in BLOCKS}[words[1 if dry else 2].lower()]
    keys, n_keys, tensors = parse(Path(source).read_bytes())
    out, total = [], 0
    for index, (name, shape, old, data) in enumerate(tensors):
        kind = old
        if len(shape) > 1 and "_norm" not in name:
            named = [t for p, t in patterns if re.search(p, name)]
            kind = {n.lower(): n for n in BLOCKS}[named[0].lower()] if named else base
        if dry:
            kind = BEHAVIOUR.get("differs", {}).get(name, kind)
        note = "" if kind == old else f" -> 1.00 MiB ({kind})"
        dims = ", ".join(map(str, (*shape, 1, 1)))
        print(f"[{index + 1:4d}/{len(tensors):4d}] {name:36s} - [{dims}], type = {old:>6s}, ",
              f"size = 1.00 MiB{note}", sep="", flush=True)  # fmt: skip
        total += size(shape, kind)
        out.append((name, shape, kind, data if kind == old else bytes(size(shape, kind))))
        if not dry:
            time.sleep(BEHAVIOUR.get("slow", 0))
            Path(target).write_bytes(gguf(keys, n_keys, out)[:-7])
    print(f"llama_model_quantize_impl: quant size  = {total / 2**20:8.2f} MiB (4.00 BPW)")
    if dry:
        return 0
    if BEHAVIOUR.get("full"):
        print("llama_model_quantize: failed to quantize: basic_ios::clear: iostream error")
        return 1
    tamper = BEHAVIOUR.get("tamper", "")
    name, shape, kind, data = out[-1]
    if tamper == "retype":
        out[-1] = (name, shape, "f32", bytes(size(shape, "f32")))
    elif tamper == "reshape":
        out[-1] = (name, shape[::-1], kind, data)
    elif tamper == "drop":
        out.pop()
    raw = gguf(keys, n_keys, out)
    Path(target).write_bytes({"truncate": raw[:-64], "grow": raw + bytes(32)}.get(tamper, raw))
    return 0


def imatrix(argv: list[str]) -> int:
    words = dict(zip(argv, [*argv[1:], ""], strict=True))
    ctx, take = int(words["-c"]), int(words["--chunks"])
    matrices = [
        (name, shape)
        for name, shape, _, _ in parse(Path(words["-m"]).read_bytes())[2]
        if name.startswith("blk.") and len(shape) > 1
    ]
    before = 0.0
    if "--in-file" in words:
        held = {t[0]: t[3] for t in parse(Path(words["--in-file"]).read_bytes())[2]}
        (before,) = struct.unpack("<f", held[f"{matrices[0][0]}.counts"])
    time.sleep(BEHAVIOUR.get("slow", 0))
    count = before + take * ctx
    tensors: list[tuple[str, tuple[int, ...], str, bytes]] = []
    for name, shape in matrices:
        sums = struct.pack(f"<{shape[0]}f", *[count * 2.0] * shape[0])
        tensors.append((f"{name}.in_sum2", (shape[0], 1), "f32", sums))
        tensors.append((f"{name}.counts", (1, 1), "f32", struct.pack("<f", count)))
    keys = text("general.type") + struct.pack("<I", 8) + text("imatrix")
    keys += text("imatrix.datasets") + struct.pack("<IIQ", 9, 8, 1) + text(words["-f"])
    keys += text("imatrix.chunk_count") + struct.pack("<II", 4, int(count) // ctx)
    keys += text("imatrix.chunk_size") + struct.pack("<II", 4, ctx)
    raw = gguf(keys, 4, tensors)
    Path(words["-o"]).write_bytes(raw[: len(raw) // 2] if BEHAVIOUR.get("cut") else raw)
    print(f"compute_imatrix: {BEHAVIOUR.get('pass_s', 60.0)} seconds per pass - ETA 0.10 minutes")
    print(f"Final estimate: PPL = {BEHAVIOUR.get('ppl', 7.5)} +/- 0.1")
    return 0


def main(name: str, argv: list[str]) -> int:
    if "--help" in argv:
        print(HELP)
        return 0
    if name == "llama-tokenize":
        print(list(range(BEHAVIOUR.get("tokens", 100))))
        return 0
    return quantize(argv) if name == "llama-quantize" else imatrix(argv)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[0]).name, sys.argv[1:]))
