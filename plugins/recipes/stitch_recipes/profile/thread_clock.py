"""How long a server's background threads computed, from proc(5): other work on the machine counts little.

SGLang's plugin loads an image on a thread of lower priority than its process; by that it is known here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

PROC = Path("/proc")
SECONDS = 0.1
"""Between looks; what a thread computes after the last look at it is not seen."""

_USER, _SYSTEM, _NICE = 13, 14, 18


class ThreadClock:
    """CPU seconds of each thread of ``pids`` that gives way to its process."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self.seconds: dict[tuple[int, int], float] = {}

    @property
    def longest(self) -> float | None:
        """Of the thread that computed longest; None if there was none."""
        return max(self.seconds.values(), default=None)

    def look(self) -> None:
        for pid in self._pids:
            own = _stat(PROC / str(pid))
            if own is None:
                continue
            with contextlib.suppress(OSError):
                for task in (PROC / str(pid) / "task").iterdir():
                    one = _stat(task)
                    if one is not None and int(one[_NICE]) > int(own[_NICE]):
                        ticks = int(one[_USER]) + int(one[_SYSTEM])
                        self.seconds[pid, int(task.name)] = ticks / os.sysconf("SC_CLK_TCK")

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Look at them every now and then, for as long as it lasts."""

        async def watch() -> None:
            while True:
                await asyncio.to_thread(self.look)
                await asyncio.sleep(SECONDS)

        looking = asyncio.ensure_future(watch())
        try:
            yield
        finally:
            looking.cancel()


def _stat(task: Path) -> list[str] | None:
    """The fields of a stat file, from the first on; None for what is gone."""
    try:
        text = (task / "stat").read_text()
    except OSError:
        return None
    head, _, rest = text.rpartition(")")  # a name may have spaces and brackets in it
    return ["", head, *rest.split()]
