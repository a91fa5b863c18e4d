"""Tests whose time passes only when nothing is left to run: a slow machine is no failure, and no test waits.

A test or module marked ``virtual_time`` runs on ``VirtualLoop``. It may use no sockets, threads or processes:
what they do takes time of its own.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, NoReturn


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its time stands still while callbacks run, and jumps to the next timer when none is ready."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._selector: Any
        self._selector.select = self._jump

    def time(self) -> float:
        return self._now

    def _jump(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("every task waits for another: nothing will ever happen")
        self._now += timeout
        return []

    def run_in_executor(self, *args: Any) -> NoReturn:  # type: ignore[override]
        raise RuntimeError("a thread has no virtual time")


class LoopClock:
    """The clocks of the loop that runs: the machine's, or those of a VirtualLoop."""

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()

    def time(self) -> float:
        """Seconds since 1970; on a VirtualLoop it is always the same day."""
        loop = asyncio.get_running_loop()
        return 1_800_000_000.0 + loop.time() if isinstance(loop, VirtualLoop) else time.time()
