"""Measure the pair in llama-server: acceptance, speed-up, tool calls, sums, facts, retrieval.

Boundary: needs `llama-server` and `llama-quantize` (``--bin``) and the files of `make_pair`;
everything is greedy and every prompt is held out. Output contract: one JSON document on
stdout; acceptance comes from the server's own counters and is unconditional per position.

    $ python -m training.evaluate work --bin BIN acceptance
    $ python -m training.evaluate work --bin BIN quality
    $ python -m training.evaluate work --bin BIN heads
    $ python -m training.evaluate work --bin BIN speed     # on an idle machine only
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from training.corpus import mixture
from training.corpus.sample import Sample
from training.prompts import openai_form

WORKLOADS = ("prose", "code", "json", "chat", "arithmetic", "tools")
SEED = 424_242
MAX_TOKENS = 320
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Server:
    """A running llama-server."""

    url: str
    pid: int

    def post(self, path: str, body: Json) -> Json:
        """Send JSON, get JSON."""
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            out: Json = json.load(answer)
        return out

    def counters(self) -> tuple[float, list[float]]:
        """Return drafts so far and accepted tokens by position."""
        text = urllib.request.urlopen(self.url + "/metrics", timeout=30).read().decode()
        drafts = re.search(r"^llamacpp:spec_decode_num_drafts_total (\S+)", text, re.M)
        positions = re.findall(r'per_pos_total\{position="\d+"\} (\S+)', text)
        return float(drafts[1]) if drafts else 0.0, [float(p) for p in positions]

    def chat(self, sample: Sample, *, thinking: bool | None = None) -> Json:
        """Answer a held-out prompt; returns the message with ``timings`` and ``finish`` added."""
        on = sample.thinking if thinking is None else thinking
        body: Json = {
            "messages": openai_form(mixture.prompt_messages(sample)), "temperature": 0, "seed": 1,
            "max_tokens": MAX_TOKENS, "cache_prompt": False,
            "chat_template_kwargs": {"enable_thinking": on},
        }  # fmt: skip
        if sample.tools:
            body["tools"] = list(sample.tools)
        try:
            reply = self.post("/v1/chat/completions", body)
        except urllib.error.HTTPError as error:
            return {"error": error.read().decode()[:300]}
        choice = reply["choices"][0]
        message: Json = {**choice["message"], "finish": choice["finish_reason"]}
        return {**message, "timings": reply["timings"]}


@contextmanager
def serve(
    binaries: Path, target: Path, head: Path | None, n_max: int, threads: int = 2
) -> Iterator[Server]:
    """Start llama-server, wait until it is healthy, stop it at the end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        str(binaries / "llama-server"), "-m", str(target), "-c", "2048", "-np", "1",
        "-t", str(threads),
        "--port", str(port), "--metrics", "--jinja", "-fit", "off",
    ]  # fmt: skip
    if head:
        command += ["-md", str(head), "--spec-type", "draft-mtp", "--spec-draft-n-max", str(n_max)]
    environment = {**os.environ, "LD_LIBRARY_PATH": str(binaries.parent / "lib")}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    server = Server(f"http://127.0.0.1:{port}", process.pid)
    try:
        for _ in range(600):
            if process.poll() is not None:
                raise RuntimeError(f"llama-server ended with {process.returncode}: {command}")
            try:
                urllib.request.urlopen(server.url + "/health", timeout=5)
                break
            except OSError:
                time.sleep(0.1)
        yield server
    finally:
        process.terminate()
        process.wait(20)


def draw(workload: str, count: int, seed: int = SEED) -> list[Sample]:
    """Held-out samples."""
    return list(islice(mixture.held_out(seed, workload), count))


def quantized(binaries: Path, source: Path, kind: str, log: list[str] | None = None) -> Path:
    """Quantize once, keep the file; any fallback in the tool's log is an error."""
    path = source.with_name(f"{source.stem}-to-{kind}.gguf")
    if not path.exists():
        environment = {**os.environ, "LD_LIBRARY_PATH": str(binaries.parent / "lib")}
        command = [
            str(binaries / "llama-quantize"),
            "--allow-requantize",
            str(source),
            str(path),
            kind,
        ]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        if "fallback" in (done.stdout + done.stderr).lower():
            raise RuntimeError(f"llama-quantize fell back for {kind}")
    return path


def acceptance(binaries: Path, target: Path, head: Path, n_max: int, count: int) -> Json:
    """Per-position acceptance by workload, and the mean of the workloads."""
    out: Json = {}
    with serve(binaries, target, head, n_max) as server:
        for workload in WORKLOADS:
            before, tokens = server.counters(), 0
            for sample in draw(workload, count):
                tokens += server.chat(sample)["timings"]["predicted_n"]
            after = server.counters()
            drafts = after[0] - before[0]
            old = before[1] or [0.0] * n_max
            rates = [(b - a) / drafts for a, b in zip(old, after[1], strict=True)]
            out[workload] = {
                "acceptance": [round(r, 3) for r in rates], "drafts": drafts, "tokens": tokens,
                "accepted_length": round(1 + sum(rates), 2),
            }  # fmt: skip
    columns = zip(*(out[w]["acceptance"] for w in WORKLOADS), strict=True)
    out["mean"] = [round(statistics.mean(c), 3) for c in columns]
    return out


def heads(binaries: Path, target: Path, head: Path, n_max: int, count: int) -> Json:
    """Acceptance by the head's type."""
    out: Json = {"F16": acceptance(binaries, target, head, n_max, count)}
    for kind in ("Q8_0", "Q6_K", "Q4_K_M", "Q3_K_M", "Q2_K"):
        out[kind] = acceptance(binaries, target, quantized(binaries, head, kind), n_max, count)
    return out


def _right(sample: Sample, reply: Json) -> bool:
    content = (reply.get("content") or "").strip()
    numbers = re.findall(r"-?\d+", content)
    if sample.workload == "arithmetic":
        return bool(numbers) and numbers[-1] == sample.answer
    return sample.answer is not None and sample.answer in content


def tool_calls(server: Server, count: int) -> Json:
    """Share of calls that parse, that name the right tool, that are wholly right."""
    parsed = named = exact = 0
    faults: list[Json] = []
    samples = [s for s in draw("tools", count * 2) if s.answer][:count]
    for sample in samples:
        reply = server.chat(sample)
        calls = reply.get("tool_calls") or []
        ok = len(calls) == 1
        try:
            arguments = json.loads(calls[0]["function"]["arguments"]) if ok else None
        except json.JSONDecodeError:
            ok = False
        good = ok and calls[0]["function"]["name"] in {t["function"]["name"] for t in sample.tools}
        parsed += good
        right = good and calls[0]["function"]["name"] == sample.answer["name"]
        named += right
        whole = right and arguments == sample.answer["arguments"]
        exact += whole
        if not whole:
            got = calls[0]["function"] if calls else reply.get("content", reply.get("error"))
            faults.append({"want": sample.answer, "got": got})
    n = len(samples)
    quiet = [s for s in draw("tools", count * 4, SEED + 1) if not s.answer][: count // 2]
    silent = sum(not server.chat(s).get("tool_calls") for s in quiet)
    return {
        "prompts": n, "parsed": parsed / n, "right_tool": named / n, "exact": exact / n,
        "no_call_where_none_is_needed": silent / len(quiet), "faults": faults[:8],
    }  # fmt: skip


def score(server: Server, workload: str, count: int, thinking: bool | None) -> Json:
    """Share of right answers."""
    samples = [s for s in draw(workload, count * 3) if s.answer is not None][:count]
    replies = [(s, server.chat(s, thinking=thinking)) for s in samples]
    wrong = [
        {"asked": s.messages[-2]["content"][-160:], "want": s.answer, "got": r.get("content")}
        for s, r in replies if not _right(s, r)
    ]  # fmt: skip
    return {"prompts": len(samples), "right": 1 - len(wrong) / len(samples), "wrong": wrong[:8]}


def retrieval(server: Server, count: int) -> Json:
    """Share of right answers by the length of the prompt in tokens."""
    buckets: dict[str, list[bool]] = {}
    for sample in draw("retrieval", count):
        reply = server.chat(sample, thinking=False)
        n = reply["timings"]["prompt_n"]
        name = (
            "below 128"
            if n < 128
            else "128-255"
            if n < 256
            else "256-511"
            if n < 512
            else "512 and more"
        )
        buckets.setdefault(name, []).append(_right(sample, reply))
    return {k: {"prompts": len(v), "right": sum(v) / len(v)} for k, v in sorted(buckets.items())}


def json_valid(server: Server, count: int) -> float:
    """Share of JSON replies that parse."""
    good = 0
    for sample in draw("json", count):
        text = (server.chat(sample).get("content") or "").strip()
        text = text.removeprefix("```json").removesuffix("```")
        try:
            json.loads(text)
            good += 1
        except json.JSONDecodeError:
            pass
    return good / count


def code_valid(server: Server, count: int) -> float:
    """Share of code replies whose block compiles."""
    good = 0
    for sample in draw("code", count):
        match = re.search(r"```python\n(.*?)```", server.chat(sample).get("content") or "", re.S)
        try:
            compile(match[1] if match else "(", "reply", "exec")
            good += 1
        except SyntaxError:
            pass
    return good / count


def quality(binaries: Path, target: Path, head: Path, count: int) -> Json:
    """Everything that can be marked right or wrong, without drafting."""
    with serve(binaries, target, None, 0) as server:
        return {
            "tools": tool_calls(server, count),
            "arithmetic_thinking": score(server, "arithmetic", count, True),
            "arithmetic_at_once": score(server, "arithmetic", count, False),
            "facts": score(server, "chat", count, False),
            "facts_thinking": score(server, "chat", count // 2, True),
            "retrieval": retrieval(server, count),
            "json_valid": json_valid(server, count // 2),
            "code_compiles": code_valid(server, count // 2),
        }


def ticks(pid: int) -> tuple[int, int]:
    """Return processor ticks that all processes used so far, and those of one and of us."""
    fields = [int(x) for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    own = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    client = sum(os.times()[:2]) * os.sysconf("SC_CLK_TCK")
    return sum(fields[:3]) + sum(fields[5:7]), int(own[11]) + int(own[12]) + int(client)


def undisturbed(server: Server, measure: Callable[[], float], attempts: int = 6) -> float:
    """Measure until other processes took less than a tenth of our own time.

    Two-thread decoding collapses when anything else runs on the same two cores.
    """
    for _ in range(attempts):
        all_before, own_before = ticks(server.pid)
        value = measure()
        all_after, own_after = ticks(server.pid)
        own = own_after - own_before
        others = all_after - all_before - own
        print(f"others took {others / own:.0%} of our time", file=sys.stderr, flush=True)
        if others < own / 10:
            return value
        time.sleep(2)
    raise RuntimeError("the machine is too busy to measure speed")


def speed(
    binaries: Path, target: Path, head: Path, kinds: list[str], repeats: int, count: int
) -> Json:
    """Decode speed with and without MTP; arms alternate, ratios are within a repeat."""
    out: Json = {}
    for kind in kinds:
        file = target if kind == "Q8_0" else quantized(binaries, target, kind)
        arms: dict[int, list[float]] = {n: [] for n in (0, 1, 2, 3, 4, 5)}
        same = dict.fromkeys(arms, 0)
        for repeat in range(repeats):
            samples = [s for w in WORKLOADS for s in draw(w, count, SEED + repeat)]
            texts: dict[int, list[Any]] = {}
            for n_max in arms:
                with serve(binaries, file, head if n_max else None, n_max) as server:

                    def run(server: Server = server, n_max: int = n_max) -> float:
                        replies = [server.chat(sample) for sample in samples]  # noqa: B023
                        texts[n_max] = [_said(reply) for reply in replies]  # noqa: B023
                        times = [reply["timings"] for reply in replies]
                        tokens = sum(t["predicted_n"] for t in times)
                        return float(1000 * tokens / sum(t["predicted_ms"] for t in times))

                    arms[n_max].append(undisturbed(server, run))
                same[n_max] += sum(a == b for a, b in zip(texts[0], texts[n_max], strict=True))
        out[kind] = {}
        for n, speeds in arms.items():
            ratios = [a / b for a, b in zip(speeds, arms[0], strict=True)]
            out[kind][n] = {
                "ratio": round(statistics.mean(ratios), 3),
                "low": round(min(ratios), 3),
                "high": round(max(ratios), 3),
                "tok_s": [round(x) for x in speeds],
                "identical": f"{same[n]}/{repeats * count * len(WORKLOADS)}",
            }
        print(kind, json.dumps(out[kind]), file=sys.stderr, flush=True)
    return out


def _said(reply: Json) -> list[str]:
    """What a reply says, without the random ids of its calls."""
    parts = [json.dumps(reply.get(k)) for k in ("content", "reasoning_content", "tool_calls")]
    return [re.sub(r'"id": "\w+"', "", part) for part in parts]


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(prog="python -m training.evaluate")
    parser.add_argument("work", type=Path)
    parser.add_argument("what", choices=("acceptance", "quality", "heads", "speed"))
    parser.add_argument("--bin", type=Path, required=True)
    parser.add_argument("--count", type=int, default=30, help="prompts of every workload")
    parser.add_argument("--n-max", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", default=["Q4_0", "Q8_0"])
    given = parser.parse_args()
    pair = (given.bin, given.work / "target-Q8_0.gguf", given.work / "mtp-F16.gguf")
    if given.what == "acceptance":
        report = acceptance(*pair, given.n_max, given.count)
    elif given.what == "heads":
        report = heads(*pair, given.n_max, given.count)
    elif given.what == "quality":
        report = quality(*pair, given.count)
    else:
        report = speed(*pair, given.kinds, given.repeats, given.count)
    print(json.dumps(report, indent=2, ensure_ascii=False))


if __name__ == "__main__":
    main()
