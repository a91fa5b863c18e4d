"""Server-sent events: whole events out of a byte stream that may be cut anywhere. No I/O.

An event is its lines up to and with the blank line that ends it; lines end with LF or CR LF.
"""

from __future__ import annotations

import re
from typing import Any

from .asgi import encode_json

_END = re.compile(rb"\n\r?\n")


class Splitter:
    """Collects bytes, gives back whole events, each verbatim with its ending."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The events that ``data`` completes."""
        # An ending may straddle the old bytes and the new.
        position = max(0, len(self._rest) - 2)
        self._rest += data
        events, start = [], 0
        while match := _END.search(self._rest, position):
            events.append(bytes(self._rest[start : match.end()]))
            start = position = match.end()
        del self._rest[:start]
        return events

    @property
    def pending(self) -> int:
        """Bytes that wait for the end of their event."""
        return len(self._rest)

    def finish(self) -> bytes:
        """What is left when the stream has ended: b"", or an event that lacks its ending."""
        rest, self._rest = bytes(self._rest), bytearray()
        return rest


def data_of(event: bytes) -> str | None:
    """The data of an event; None if it has none (a comment, a keep-alive)."""
    found = [line[5:].removeprefix(b" ") for line in event.splitlines() if _is_data(line)]
    return b"\n".join(found).decode("utf-8", "replace") if found else None


def with_data(event: bytes, value: Any) -> bytes:
    """The event with ``value`` as its JSON data; its other fields (id, event) stay."""
    kept = [line for line in event.splitlines() if line and not _is_data(line)]
    return b"\n".join([*kept, b"data: " + encode_json(value)]) + b"\n\n"


def _is_data(line: bytes) -> bool:
    return line == b"data" or line.startswith(b"data:")
