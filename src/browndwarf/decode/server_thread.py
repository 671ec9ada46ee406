"""The server's socket and its threads: from an application to a port that answers.

Boundary: uvicorn is used here and nowhere else; signals stay with the caller.

Example:
    with Serving(build_app(worker), listening("127.0.0.1", 8080), worker) as serving:
        serving.base_url, serving.alive
"""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from types import TracebackType
from typing import Self

import uvicorn
from starlette.types import ASGIApp

from browndwarf.decode.server_worker import Worker
from browndwarf.errors import EnvironmentFault, PortTaken, UsageError


def listening(host: str, port: int) -> socket.socket:
    """A socket bound to an address; port 0 takes a free one. ``Serving`` closes it.

    Raises:
        UsageError: there is no such address.
        PortTaken: another program listens there.
        EnvironmentFault: the operating system refuses.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError, OverflowError) as exc:
        raise UsageError(
            f"{host!r} is no address of this machine", why=str(exc), fix="use 127.0.0.1"
        ) from exc
    opened = socket.socket(family, kind, protocol)
    try:
        if os.name == "posix":  # on Windows this option would allow to steal a port
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind(address)
        opened.listen(128)
    except OSError as exc:
        opened.close()
        where = f"{host}:{port}"
        if exc.errno == errno.EADDRINUSE:
            raise PortTaken(
                f"another program listens on {where}",
                why=exc.strerror or "",
                fix="choose another --port; 0 takes a free one",
            ) from exc
        raise EnvironmentFault(
            f"cannot listen on {where}",
            why=exc.strerror or str(exc),
            fix="choose an address of this machine, and a port above 1023",
        ) from exc
    return opened


class Serving:
    """A running server: uvicorn in a thread, the worker in another; a context manager.

    Leaving it ends answers (see ``Worker.stop``), then connections, then both threads. Signals
    stay with the caller.
    """

    def __init__(self, app: ASGIApp, sock: socket.socket, worker: Worker) -> None:
        # Everything that a client must know is in an answer; uvicorn's own log would repeat it.
        config = uvicorn.Config(
            app,
            log_config=None,
            log_level="critical",
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            timeout_graceful_shutdown=5,
        )
        self._server = uvicorn.Server(config)
        self._sock = sock
        self._worker = worker
        self._thread = threading.Thread(target=self._serve, name="browndwarf-http", daemon=True)

    @property
    def base_url(self) -> str:
        """Where clients find it, with ``/v1``."""
        host, port = self._sock.getsockname()[:2]
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        return f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"

    @property
    def alive(self) -> bool:
        """Whether it still serves."""
        return self._thread.is_alive()

    def _serve(self) -> None:
        self._server.run(sockets=[self._sock])

    def __enter__(self) -> Self:
        self._worker.start()
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            time.sleep(0.005)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._worker.stop()
        self._server.should_exit = True
        self._thread.join()
        self._sock.close()
