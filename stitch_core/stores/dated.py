"""What time it is by a store that dates its objects and does not tell the time: by one that was just made."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from ..ports import Clock, Files

ASK_AGAIN = 60.0
"""Seconds for which this host's monotonic clock goes on from what the store's last said."""


class StoreTime:
    """``ask`` makes an object and returns its date. From any thread; two that ask at once do no harm."""

    def __init__(self, ask: Callable[[], float], clock: Clock) -> None:
        self._ask, self._clock = ask, clock
        self._last: tuple[float, float] | None = None

    def now(self) -> float:
        """Wall seconds by the store's clock, early by no more than ``ask`` takes. Raises what that does."""
        last = self._last
        if last is None or self._clock.monotonic() - last[0] > ASK_AGAIN:
            date = self._ask()
            last = self._last = (self._clock.monotonic(), date)
        return last[1] + self._clock.monotonic() - last[0]


def date_of_new(files: Files, path: Path) -> float:
    """The date of a file that is made at ``path`` and removed: on a network mount by the server's clock.

    It is empty, so that a full disk has room for it and no cache of this host dates what is written.
    Raises OSError.
    """
    files.write_new(path, b"")
    try:
        return os.stat(path).st_mtime
    finally:
        with contextlib.suppress(FileNotFoundError):
            files.remove(path)
