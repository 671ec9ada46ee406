"""A stand-in for llama-server (and, by its name, for its tools) that fails on request.

Standard library only; made executable by ``fakes.make_engine``. Behaviour comes from the JSON
in the environment variable ``FAKE_LLAMA``; ``fakes.behave`` lists the keys. What it answers
imitates the shape of llama-server's answers, not its text.

Example:
    $ FAKE_LLAMA='{"load": "segv"}' ./llama-server -m model.gguf --port 9000
"""

from __future__ import annotations

import json
import os
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path

HERE = Path(__file__).resolve().parent
BEHAVIOUR = json.loads(os.environ.get("FAKE_LLAMA", "{}"))
ENGINE = json.loads((HERE / "engine.json").read_text(encoding="utf-8"))
READY = threading.Event()
COUNTERS = {"drafts": 0, "draft_tokens": 0, "accepted": 0}


def log(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def flags_in(help_text: str) -> dict[str, bool]:
    """Flag -> whether it takes a value."""
    found = {}
    for line in help_text.splitlines():
        if line.startswith("-") and "argument has been removed" not in line:
            head = line.split("  ")[0] if not line.startswith("-m,") else line
            names = [word.rstrip(",") for word in line.split() if word.startswith("-")]
            names = [n for n in names if n in head or n in line[:40]]
            last = names[-1] if names else ""
            rest = line[line.find(last) + len(last) :]
            takes = rest[:1] == " " and rest[1:2] not in ("", " ")
            found.update(dict.fromkeys(names, takes))
    return found


def parse(argv: list[str]) -> dict[str, str]:
    known = flags_in(ENGINE["help"])
    values, i = {}, 0
    while i < len(argv):
        flag = argv[i]
        if flag not in known:
            log(f"error: invalid argument: {flag}")
            sys.exit(1)
        if known[flag]:
            values[flag] = argv[i + 1]
            i += 1
        else:
            values[flag] = ""
        i += 1
    return values


class Handler(BaseHTTPRequestHandler):
    options: dict[str, str]

    def log_message(self, *args: object) -> None:
        pass

    def reply(self, status: int, data: object, kind: str = "application/json") -> None:
        body = data.encode() if isinstance(data, str) else json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def error(self, status: int, message: str, kind: str) -> None:
        self.reply(status, {"error": {"code": status, "message": message, "type": kind}})

    def do_GET(self) -> None:
        if not READY.is_set():
            self.error(503, "Loading model", "unavailable_error")
        elif self.path == "/health":
            self.reply(200, {"status": "ok"})
        elif self.path == "/props":
            model = BEHAVIOUR.get("serves", self.options.get("-m", ""))
            settings = {"n_ctx": int(self.options.get("-c", "0"))}
            self.reply(
                200,
                {
                    "model_path": model,
                    "total_slots": 1,
                    "default_generation_settings": settings,
                    "chat_template": "{{ messages }}",
                    "build_info": "fake",
                },
            )
        elif self.path == "/metrics":
            self.reply(200, metrics(), "text/plain")
        else:
            self.error(404, "File Not Found", "not_found_error")

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length", "0"))
        body = json.loads(self.rfile.read(length) or b"{}")
        if self.path == "/tokenize":
            self.reply(200, {"tokens": list(body["content"].encode())})
        elif self.path == "/detokenize":
            self.reply(200, {"content": bytes(body["tokens"]).decode()})
        elif self.path == "/apply-template":
            text = "".join(f"<{m['role']}>{m['content']}" for m in body["messages"])
            self.reply(200, {"prompt": text})
        elif self.path == "/completion":
            self.complete(body)
        elif self.path == "/v1/chat/completions":
            self.chat(body)
        else:
            self.error(404, "File Not Found", "not_found_error")

    def complete(self, body: dict[str, object]) -> None:
        n = int(str(body["n_predict"]))
        mode = BEHAVIOUR.get("request", "ok")
        if mode == "error":
            self.error(400, "request (99 tokens) exceeds", "exceed_context_size_error")
            return
        if mode == "hang":
            time.sleep(600)
        if mode == "not-json":
            self.reply(200, "<html>hello</html>", "text/html")
            return
        words = [f" w{i}" for i in range(n)]
        final = {
            "content": "".join(words) if not body.get("stream") else "",
            "tokens": list(range(n)) if not body.get("stream") else [],
            "stop": True,
            "stop_type": "limit",
            "timings": timings(n),
        }
        if not body.get("stream"):
            if mode == "crash":
                die()
            self.reply(200, final)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for i, word in enumerate(words):
            self.event({"content": word, "tokens": [i], "stop": False})
            if i == 0 and mode == "crash":
                die()
            if i == 0 and mode == "hang-in-stream":
                time.sleep(600)
            if i == 0 and mode == "cut":
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            if i == 0 and mode == "stream-error":
                error = {"code": 500, "message": "Compute error.", "type": "server_error"}
                self.event({"error": error})
                self.wfile.write(b"0\r\n\r\n")
                return
        if mode != "no-final":
            self.event(final)
        self.wfile.write(b"0\r\n\r\n")

    def chat(self, body: dict[str, object]) -> None:
        message = {"role": "assistant", "content": "hello", "reasoning_content": "hm"}
        choice: dict[str, object] = {"index": 0, "finish_reason": "stop"}
        usage = {"prompt_tokens": 5, "completion_tokens": 4}
        if not body.get("stream"):
            call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            if body.get("tools"):
                message = {"role": "assistant", "content": "", "tool_calls": [call]}
            data = {"choices": [{**choice, "message": message}], "usage": usage}
            self.reply(200, {**data, "timings": timings(4)})
            return
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for delta in (
            {"role": "assistant", "content": None},
            {"content": "hel"},
            {"content": "lo"},
            {"tool_calls": [{"index": 0, "id": "1", "function": {"name": "f", "arguments": ""}}]},
            {"tool_calls": [{"index": 0, "function": {"arguments": '{"a":'}}]},
            {"tool_calls": [{"index": 0, "function": {"arguments": "1}"}}]},
        ):
            self.event({"choices": [{"index": 0, "finish_reason": None, "delta": delta}]})
        self.event({"choices": [{**choice, "delta": {}}], "timings": timings(4)})
        self.chunk(b"data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def event(self, data: object) -> None:
        self.chunk(b"data: " + json.dumps(data).encode() + b"\n\n")

    def chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()


def timings(n: int) -> dict[str, float]:
    """As if every other verify cycle had accepted one of two drafted tokens."""
    cycles = max(1, (n - 1) * 2 // 3)
    accepted = n - 1 - cycles
    COUNTERS["drafts"] += cycles
    COUNTERS["draft_tokens"] += 2 * cycles
    COUNTERS["accepted"] += accepted
    return {
        "cache_n": 0,
        "prompt_n": 5,
        "prompt_ms": 10.0,
        "predicted_n": n,
        "predicted_ms": 2.0 * cycles,
        "draft_n": 2 * cycles,
        "draft_n_accepted": accepted,
    }


def metrics() -> str:
    rows = [
        ("llamacpp:spec_decode_num_drafts_total", COUNTERS["drafts"]),
        ("llamacpp:spec_decode_num_draft_tokens_total", COUNTERS["draft_tokens"]),
        ("llamacpp:spec_decode_num_accepted_tokens_total", COUNTERS["accepted"]),
    ]
    per_position = "llamacpp:spec_decode_num_accepted_tokens_per_pos_total"
    rows += [(f'{per_position}{{position="{i}"}}', COUNTERS["accepted"] - i) for i in range(2)]
    return "# HELP x y\n" + "".join(f"{name} {value}\n" for name, value in rows)


def die() -> None:
    for line in BEHAVIOUR.get("last_words", []):
        log(line)
    os.kill(os.getpid(), getattr(signal, BEHAVIOUR.get("signal", "SIGSEGV")))
    time.sleep(60)


class Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    daemon_threads = True
    allow_reuse_address = True


def load() -> None:
    mode = BEHAVIOUR.get("load", "ok")
    for line in BEHAVIOUR.get("log", []):
        log(line)
    if "exit" in BEHAVIOUR:
        os._exit(BEHAVIOUR["exit"])
    if mode == "segv":
        die()
    if mode in ("hang", "never"):
        while True:
            if mode == "never":
                log("0.00.000.000 I load_tensors: still loading")
            time.sleep(0.05)
    time.sleep(BEHAVIOUR.get("load_s", 0.0))
    log("0.00.000.001 I load_tensors:   CUDA0 model buffer size =    17.50 MiB")
    log("0.00.000.002 I srv  llama_server: model loaded")
    READY.set()


def once(name: str) -> bool:
    """True the first time it is asked in this engine's folder."""
    try:
        (HERE / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def serve(options: dict[str, str]) -> int:
    log("0.00.000.000 I srv    load_model: loading model 'fake'")
    if BEHAVIOUR.get("ignore_term"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: stop())
    if BEHAVIOUR.get("grandchild"):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(BEHAVIOUR["grandchild"]).write_text(str(child.pid), encoding="utf-8")
    if BEHAVIOUR.get("bind") == "never" or (
        BEHAVIOUR.get("bind") == "second-time" and once("bound")
    ):
        port = options["--port"]
        log(f"0.0 E srv start: couldn't bind HTTP server socket, hostname: x, port: {port}")
        return 1
    Handler.options = options
    with Server((options.get("--host", "127.0.0.1"), int(options["--port"])), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        load()
        while True:
            time.sleep(60)


def stop() -> None:
    log("0.00.000.009 I srv    operator(): operator(): cleaning up before exit...")
    os._exit(0)


def tool(name: str, argv: list[str]) -> int:
    """A tool: writes what it is told to write, and ends as it is told."""
    if "--help" in argv:
        print(ENGINE.get("tool_help", ""))
        return 0
    if BEHAVIOUR.get("grandchild"):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(BEHAVIOUR["grandchild"]).write_text(str(child.pid), encoding="utf-8")
    print(BEHAVIOUR.get("stdout", ""), flush=True)
    for line in BEHAVIOUR.get("log", []):
        log(line)
    if (files := [a for a in argv if a.endswith(".partial") or ".partial." in a]) and (
        BEHAVIOUR.get("writes", True)
    ):
        Path(files[0]).write_bytes(b"GGUF")
    if BEHAVIOUR.get("tool") == "hang":
        time.sleep(600)
    if BEHAVIOUR.get("tool") == "segv":
        die()
    return int(BEHAVIOUR.get("exit", 0))


def main(argv: list[str]) -> int:
    name = Path(sys.argv[0]).name
    if "--version" in argv:
        if ENGINE.get("version_signal"):
            os.kill(os.getpid(), ENGINE["version_signal"])
        if ENGINE.get("hang"):
            time.sleep(600)
        log(ENGINE["version"])
        return 0
    if name != "llama-server":
        return tool(name, argv)
    if "--help" in argv:
        print(ENGINE["help"])
        return 0
    return serve(parse(argv))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
