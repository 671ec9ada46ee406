"""One HTTP exchange as raw pieces with times, and chunked framing undone.

Pure: bytes in, bytes out; ``transport`` moves them.

Example:
    >>> chunks = Dechunker()
    >>> chunks.feed(1.5, b"2\\r\\nhi\\r\\n0\\r\\n\\r\\n")
    >>> chunks.pieces, chunks.done
    ([(1.5, b'hi')], True)
"""

from __future__ import annotations

from dataclasses import dataclass, field

Pieces = list[tuple[float, bytes]]


@dataclass(slots=True)
class Exchange:
    """One request and what came back. Times in seconds of the transport's clock.

    ``fault`` names the class of a failure: ``connect``, ``timeout``, ``reset``, ``bad-http``,
    or ``cut`` for one that we ended ourselves; empty when the answer is whole. An HTTP status
    of 400 and more is not a fault here.
    """

    started_s: float
    sent_s: float = 0.0
    first_byte_s: float = 0.0
    end_s: float = 0.0
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    pieces: Pieces = field(default_factory=list)
    fault: str = ""
    detail: str = ""
    reused: bool = False

    @property
    def body(self) -> bytes:
        """All of the answer's body."""
        return b"".join(data for _, data in self.pieces)


class Dechunker:
    """Undoes HTTP's chunked framing; ``pieces`` are payloads with the time of their arrival."""

    def __init__(self) -> None:
        self.pieces: Pieces = []
        self.done = False
        self._rest = b""
        self._left = 0
        self._trailer = False

    def feed(self, at_s: float, data: bytes) -> None:
        """Take the next bytes. Raises ValueError where the framing makes no sense."""
        buf = self._rest + data if self._rest else data
        pos, end = 0, len(buf)
        while pos < end and not self.done:
            if self._left:
                stop = min(pos + self._left, end)
                self.pieces.append((at_s, buf[pos:stop]))
                self._left -= stop - pos
                pos = stop
                continue
            newline = buf.find(b"\n", pos)
            if newline < 0:
                break
            line = buf[pos:newline].strip()
            pos = newline + 1
            if self._trailer:
                self.done = not line
            elif line:
                self._left = int(line.partition(b";")[0], 16)
                self._trailer = self._left == 0
        self._rest = buf[pos:]
