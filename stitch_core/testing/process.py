"""Simulated processes: groups of tasks that live and die as one, without a last word."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn, Protocol, TypeVar

T = TypeVar("T")

PROCESS: contextvars.ContextVar[SimulatedProcess | None] = contextvars.ContextVar("process", default=None)
"""Whose code is running, None for the simulation's own; tasks and callbacks inherit it from their maker."""


class Crash(BaseException):
    """Raised out of an operation during which the process died. No code of the process runs after it."""


class Loop(Protocol):
    """What a process needs of the event loop."""

    def time(self) -> float: ...
    def create_task(self, coro: Any, *, context: contextvars.Context | None = None) -> asyncio.Task[Any]: ...
    def resume_later(self, process: SimulatedProcess, seconds: float) -> None: ...


class SimulatedProcess:
    """A group of tasks, and those that they create. A restart is a new process on the same files."""

    def __init__(self, loop: Loop, name: str) -> None:
        self.name = name
        self.dead = False
        self.stalled_until = 0.0
        self.ended = asyncio.Event()
        self.on_death: list[Callable[[], None]] = []
        self._loop = loop

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task in this process."""
        return self._loop.create_task(coroutine, context=self.context())

    def context(self) -> contextvars.Context:
        """A context in which callbacks belong to this process."""
        context = contextvars.copy_context()
        context.run(PROCESS.set, self)
        return context

    def kill(self) -> None:
        """From now on none of its callbacks runs, not even a ``finally``. Killing it twice is fine."""
        if self.dead:
            return
        self.dead = True
        self.ended.set()
        for callback in self.on_death:
            callback()

    def crash(self) -> NoReturn:
        """Die inside an operation of this process."""
        self.kill()
        raise Crash(self.name)

    def check(self) -> None:
        """Every simulated operation calls this first: what unwinds through a dead process does nothing."""
        if self.dead:
            raise Crash(self.name)

    def stall(self, seconds: float) -> None:
        """Run nothing of this process for a while, as a long garbage collection or a stopped machine does."""
        self.stalled_until = max(self.stalled_until, self._loop.time() + seconds)
        self._loop.resume_later(self, seconds)

    def __repr__(self) -> str:
        return f"<{self.name}{' (dead)' if self.dead else ''}>"


class SimulatedClock:
    """One machine's clocks. ``skew``: seconds by which its wall clock is ahead of the others."""

    def __init__(self, loop: Loop, skew: float = 0.0) -> None:
        self._loop = loop
        self._skew = skew

    def time(self) -> float:
        return 1_700_000_000.0 + self._skew + self._loop.time()

    def monotonic(self) -> float:
        return 5_000.0 + self._loop.time()
