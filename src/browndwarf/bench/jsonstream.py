"""Read the objects of one huge JSON array in constant memory, and survive damage.

The usual ShareGPT file is one array of hundreds of MB. Objects are cut out of a buffer of a few
MB with the standard library's scanner (which is C). A damaged object is skipped: reading goes
on at the next place that looks like the start of a record; a file that ends in mid-record gives
all records before.

Example:
    >>> import io
    >>> items = ArrayReader(io.BytesIO(b'[{"id": "a"}, {"id": "b"'))
    >>> list(items), items.malformed, items.truncated
    ([{'id': 'a'}], 0, True)
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from typing import Any, BinaryIO

BLOCK_BYTES = 1 << 20
#: No conversation is longer; what is, counts as damaged.
MAX_OBJECT_CHARS = 32 << 20

_RECORD_START = re.compile(r'\{\s*"(?:id|conversations?|messages|items|model)"\s*:')
_BETWEEN = re.compile(r"[\s,]*")
_SLACK = 16
"""An error this close to the end of the buffer may only mean that more must be read."""


class ArrayReader:
    """Iterates over the objects of an array once.

    ``malformed`` counts damaged places, ``truncated`` says that the file ended too early, and
    ``bad_text`` that it holds bytes which are not UTF-8 (they become replacement characters).
    """

    def __init__(self, file: BinaryIO, *, block: int = BLOCK_BYTES) -> None:
        self.malformed = 0
        self.truncated = False
        self.bad_text = False
        self._file = file
        self._block = block
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._scan = json.JSONDecoder(strict=False).raw_decode
        self._buffer = ""
        self._end_of_file = False

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self._more()
        self._buffer = self._buffer.lstrip("\ufeff \t\r\n")
        if self._buffer[:1] == "[":
            self._buffer = self._buffer[1:]
        pos = 0
        while True:
            pos = self._start(pos)
            if pos < 0:
                return
            if self._buffer[pos] == "]":
                return
            value, pos = self._object(pos)
            if isinstance(value, dict):
                yield value

    def _start(self, pos: int) -> int:
        """Where the next value begins; -1 at the end of the file, which came too early."""
        while True:
            match = _BETWEEN.match(self._buffer, pos)
            pos = match.end() if match else pos
            if pos < len(self._buffer):
                if pos > self._block:
                    self._buffer, pos = self._buffer[pos:], 0
                return pos
            self._buffer, pos = "", 0
            if not self._more():
                self.truncated = True
                return -1

    def _object(self, pos: int) -> tuple[object, int]:
        """The value at ``pos``, or None after skipping a damaged one; and where it ends."""
        while True:
            try:
                return self._scan(self._buffer, pos)
            except json.JSONDecodeError as exc:
                if self._may_be_unfinished(exc, pos):
                    self._buffer, pos = self._buffer[pos:], 0
                    # Doubling keeps the work linear when a value is far longer than a block.
                    if self._more(max(self._block, len(self._buffer))):
                        continue
                    self.truncated = True
                    return None, len(self._buffer)
                self.malformed += 1
                return None, self._next_record(pos + 1)
            except RecursionError:
                self.malformed += 1
                return None, self._next_record(pos + 1)

    def _may_be_unfinished(self, exc: json.JSONDecodeError, pos: int) -> bool:
        if len(self._buffer) - pos > MAX_OBJECT_CHARS:
            return False
        near_end = exc.pos >= len(self._buffer) - _SLACK
        return near_end or exc.msg.startswith("Unterminated string")

    def _next_record(self, pos: int) -> int:
        while True:
            match = _RECORD_START.search(self._buffer, pos)
            if match:
                return match.start()
            self._buffer = self._buffer[-64:]
            pos = 0
            if not self._more():
                return len(self._buffer)

    def _more(self, size: int | None = None) -> bool:
        """Read on; False at the end of the file."""
        if self._end_of_file:
            return False
        data = self._file.read(size or self._block)
        self._end_of_file = not data
        text = self._decoder.decode(data, final=self._end_of_file)
        self.bad_text |= "\ufffd" in text
        self._buffer += text
        return bool(data)
