"""Fake llama.cpp builds for tests: real processes, real sockets, faults on request.

A fake engine is a folder with executables made from ``fake_llama_server.py`` and an
``engine.json`` that says which generation of llama.cpp it plays.

Example:
    build = make_build(tmp_path, generation="current")
    async with LlamaServer(build, options, log_path=log, env=behave(load="segv")): ...
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from browndwarf.engine.locate import Build, build_from_probe
from browndwarf.engine.probe import build_probe

SCRIPT = Path(__file__).with_name("fake_llama_server.py")
TOOLS = (
    "llama-server",
    "llama-quantize",
    "llama-perplexity",
    "llama-imatrix",
    "llama-bench",
    "llama-tokenize",
)

_COMMON = """----- common params -----

-h,    --help, --usage                  print usage and exit
--version                               show version and build info
-t,    --threads N                      number of CPU threads (default: -1)
-tb,   --threads-batch N                threads for prompts (default: same as --threads)
-c,    --ctx-size N                     size of the prompt context (default: 0)
                                        (env: LLAMA_ARG_CTX_SIZE)
-b,    --batch-size N                   logical batch (default: 2048)
-ub,   --ubatch-size N                  physical batch (default: 512)
-ngl,  --gpu-layers, --n-gpu-layers N   layers on the device (default: auto)
-dev,  --device <dev1,dev2,..>          devices to use (none = don't offload)
-s,    --seed SEED                      random seed (default: -1)
-m,    --model FNAME                    model path to load
-np,   --parallel N                     number of slots (default: -1, -1 = auto)
-ctk,  --cache-type-k TYPE              KV cache data type for K
                                        allowed values: f32, f16, bf16, q8_0, q4_0
                                        (default: f16)
-ctv,  --cache-type-v TYPE              KV cache data type for V
                                        allowed values: f32, f16, bf16, q8_0, q4_0
                                        (default: f16)
--host HOST                             address to listen on (default: 127.0.0.1)
--port PORT                             port to listen (default: 8080)
--metrics                               enable metrics (default: disabled)
--swa-full                              full-size SWA cache (default: false)
--no-context-shift                      no context shift
--slot-save-path PATH                   where slots are saved (default: disabled)
--poll <0...100>                        polling level (default: 50)
--chat-template-file FNAME              a chat template
-md,   --model-draft FNAME              draft model (default: unused)
"""

_CURRENT = """-fa,   --flash-attn [on|off|auto]       flash attention ('on', 'off', or 'auto')
-fit,  --fit [on|off]                   fit to device memory (default: 'on')
--jinja, --no-jinja                     use the jinja engine (default: enabled)
--context-shift                         use context shift
--ui,  --webui, --no-ui, --no-webui     the web interface (default: enabled)
-lm,   --load-mode MODE                 loading mode (default: auto)
                                        - none: nothing special
                                        - mmap: map the file
-kvu,  --kv-unified, -no-kvu, --no-kv-unified
                                        one KV buffer for all sequences
-bs,   --backend-sampling               sample on the device (default: disabled)
-cram, --cache-ram N                    prompt cache in MiB (default: 8192)
-ctxcp, --ctx-checkpoints, --swa-checkpoints N
                                        checkpoints per slot (default: 32)
--log-jsonl, --no-log-jsonl             log as JSONL (default: disabled)
-lv,   --verbosity, --log-verbosity N   verbosity threshold:
                                         - 3: info
                                         - 4: trace (more info)
--list-devices                          print devices and exit
--spec-draft-backend-sampling, --no-spec-draft-backend-sampling
                                        draft sampling on the device (default: enabled)
--spec-draft-type-k, -ctkd, --cache-type-k-draft TYPE
                                        KV type for K of the draft
                                        allowed values: f32, f16, bf16, q8_0, q4_0
--spec-draft-type-v, -ctvd, --cache-type-v-draft TYPE
                                        KV type for V of the draft
                                        allowed values: f32, f16, bf16, q8_0, q4_0
--spec-draft-ngl, -ngld, --gpu-layers-draft N
                                        layers of the draft on the device (default: auto)
--spec-draft-device, -devd, --device-draft <dev1,dev2,..>
                                        devices of the draft
--spec-draft-n-max N                    tokens to draft (default: 3)
--spec-draft-n-min N                    fewest tokens to draft (default: 0)
--spec-draft-p-min, --draft-p-min P     smallest probability (default: 0.00)
--spec-type none,draft-simple,draft-mtp,ngram-mod
                                        types of speculative decoding (default: none)
"""

_SYNTH = """--spec-synth-len L                      synthetic mean length
--spec-synth-rates P0,P1,...            synthetic acceptance per position
"""

_REMOVED = """--draft, --draft-n, --draft-max N       the argument has been removed
--draft-min, --draft-n-min N            the argument has been removed. use --spec-draft-n-min
"""

_OLD_SWITCHES = """-fa,   --flash-attn                     flash attention (default: disabled)
--jinja                                 use the jinja engine (default: disabled)
--no-webui                              no web interface (default: enabled)
--no-mmap                               do not memory-map the model
--mlock                                 keep the model in memory
-lv,   --verbosity, --log-verbosity N   verbosity threshold
-ngld, --gpu-layers-draft N             layers of the draft on the device
"""

_OLD_DRAFT = """--draft-max, --draft, --draft-n N       tokens to draft (default: 16)
--draft-min, --draft-n-min N            fewest tokens to draft (default: 0)
--draft-p-min P                         smallest probability (default: 0.75)
"""

_OLD_MTP = """--spec-draft-n-max N                    tokens to draft (default: 16)
--spec-draft-n-min N                    fewest tokens to draft (default: 0)
--spec-draft-p-min, --draft-p-min P     smallest probability (default: 0.75)
--spec-type [none|draft|mtp]            types of speculative decoding (default: none)
"""

HELP: dict[str, str] = {
    "current": _COMMON + _CURRENT + _SYNTH + _REMOVED,
    "no-synth": _COMMON + _CURRENT + _REMOVED,
    "old-mtp": _COMMON + _OLD_SWITCHES + _OLD_MTP + _REMOVED,
    "pre-mtp": _COMMON + _OLD_SWITCHES + _OLD_DRAFT,
}
VERSION: dict[str, str] = {
    "current": "version: 10800 (abc1234)",
    "no-synth": "version: 9600 (abc9600)",
    "old-mtp": "version: 9100 (abc9100)",
    "pre-mtp": "version: 7000 (abc7000)",
}


def make_engine(
    folder: Path, generation: str = "current", *, version: str | None = None, **engine: Any
) -> Path:
    """A folder with fake executables in its ``bin``; returns the folder.

    Args:
        version: text of ``--version``; by default that of the generation.
        engine: ``tool_help``, ``version_signal`` (die of it), ``hang`` (never answer), ``help``.
    """
    place = folder / "bin"
    place.mkdir(parents=True)
    settings = {"help": HELP[generation], "version": version or VERSION[generation], **engine}
    (place / "engine.json").write_text(json.dumps(settings), encoding="utf-8")
    code = f"#!{sys.executable} -IS\n" + SCRIPT.read_text(encoding="utf-8")
    for name in TOOLS:
        path = place / name
        path.write_text(code, encoding="utf-8")
        path.chmod(0o755)
    return folder


def make_build(
    folder: Path, generation: str = "current", *, version: str | None = None, **engine: Any
) -> Build:
    """The Build of a fresh fake engine below ``folder``, without the cost of probing it."""
    make_engine(folder / "engine", generation, version=version, **engine)
    server = folder / "engine" / "bin" / "llama-server"
    answers = build_probe(version or VERSION[generation], engine.get("help", HELP[generation]), {})
    tools = {name: server.with_name(name) for name in TOOLS}
    return build_from_probe(server, answers, source="fake", tools=tools)


def behave(**behaviour: Any) -> dict[str, str]:
    """Environment that makes a fake misbehave.

    Keys for the server:
        load: ok, segv, hang (silent), never (logs for ever); load_s: seconds of loading
        log: lines to print while loading; exit: status to end with after them
        request: ok, crash, hang, hang-in-stream, cut, error, stream-error, no-final, not-json
        signal: name of the signal to die of; last_words: lines to print before
        bind: never, second-time; serves: another model path for /props
        ignore_term: true; grandchild: file for the pid of a child of its own
    Keys for the tools: stdout, log, exit, writes, grandchild, tool (hang, segv)
    """
    return {"FAKE_LLAMA": json.dumps(behaviour)}
