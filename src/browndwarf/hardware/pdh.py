"""Windows' counter of device memory that lives in RAM, per process. Imported on Windows only.

``\\GPU Process Memory(pid_N_*)\\Shared Usage`` grows when the driver pages a process's device
memory out to RAM, which it does without an error and which no CUDA call shows. The English
counter path is used, so that it works under any display language.

Example:
    usage = SharedUsage()
    usage.mib({1234})
"""

from __future__ import annotations

import ctypes
import re
from typing import Any

from browndwarf.units import MIB

_PATH = r"\GPU Process Memory(*)\Shared Usage"
_LARGE = 0x00000400
_MORE_DATA = 0x800007D2
_PID = re.compile(r"^pid_(\d+)_")


class _Value(ctypes.Structure):
    _fields_ = [("status", ctypes.c_uint32), ("large", ctypes.c_int64)]


class _Item(ctypes.Structure):
    _fields_ = [("name", ctypes.c_wchar_p), ("value", _Value)]


class SharedUsage:
    """An open query. All failures give None: an old Windows has no such counter."""

    def __init__(self) -> None:
        self._query = ctypes.c_void_p()
        self._counter = ctypes.c_void_p()
        self._pdh: Any = None
        try:
            pdh = ctypes.WinDLL("pdh")  # type: ignore[attr-defined,unused-ignore]
            if pdh.PdhOpenQueryW(None, None, ctypes.byref(self._query)) == 0:
                added = pdh.PdhAddEnglishCounterW(
                    self._query, _PATH, None, ctypes.byref(self._counter)
                )
                self._pdh = pdh if added == 0 else None
        except (AttributeError, OSError):
            self._pdh = None

    def mib(self, pids: set[int]) -> float | None:
        """Shared memory of these processes together, in MiB."""
        if self._pdh is None or self._pdh.PdhCollectQueryData(self._query) != 0:
            return None
        size, count = ctypes.c_uint32(0), ctypes.c_uint32(0)
        read = self._pdh.PdhGetFormattedCounterArrayW
        status = read(self._counter, _LARGE, ctypes.byref(size), ctypes.byref(count), None)
        if status & 0xFFFFFFFF != _MORE_DATA:
            return None
        buffer = ctypes.create_string_buffer(size.value)
        if read(self._counter, _LARGE, ctypes.byref(size), ctypes.byref(count), buffer) != 0:
            return None
        items = ctypes.cast(buffer, ctypes.POINTER(_Item))
        total = 0
        for index in range(count.value):
            match = _PID.match(items[index].name or "")
            if match and int(match[1]) in pids:
                total += items[index].value.large
        return total / MIB

    def close(self) -> None:
        """Close the query."""
        if self._pdh is not None:
            self._pdh.PdhCloseQuery(self._query)
            self._pdh = None
