"""The thread that owns the scheduler: runs commands between steps, paces decoding, hands out events.

Everybody else talks to it by `call`: a function of the scheduler, run on the thread at a token boundary, in
the order of the calls. A command never waits for the pace; while the thread sleeps out a step, it is woken
by commands.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from .process import settle
from .scheduler import Event, Scheduler

T = TypeVar("T")


class EngineFailed(RuntimeError):
    """The engine's thread has stopped; the message says why. Nothing will be generated any more."""


class Worker:
    """`deliver` is called on the thread with the events of each step; it must not block.

    `pace` is the declared decode pace: seconds from the start of one step to the start of the next, at
    least. When a step raises, `failed` says why, `on_failure` is called on the thread, and every later
    `call` is refused.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        deliver: Callable[[Sequence[Event]], None],
        on_failure: Callable[[str], None],
        pace: float = 0.0,
    ) -> None:
        self.failed: str | None = None
        self._scheduler = scheduler
        self._deliver = deliver
        self._on_failure = on_failure
        self._pace = pace
        self._wake = threading.Condition()
        self._commands: deque[tuple[Callable[[Scheduler], Any], Future[Any]]] = deque()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="stitch-embedded", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and self.failed is None

    def call(self, command: Callable[[Scheduler], T]) -> Future[T]:
        """Run `command` on the thread. The future holds its result or exception, or EngineFailed."""
        future: Future[T] = Future()
        with self._wake:
            if self._closed or self.failed is not None:
                future.set_exception(EngineFailed(self.failed or "the engine is closed"))
                return future
            self._commands.append((command, future))
            self._wake.notify()
        return future

    def fail(self, reason: str) -> None:
        """Stop for good: the weights or the thread can no longer be trusted. Called on the thread."""
        with self._wake:
            self.failed = reason
            left, self._commands = self._commands, deque()
        for _, future in left:
            future.set_exception(EngineFailed(reason))
        self._on_failure(reason)

    def close(self) -> None:
        """Stop after the present step and wait for it. Safe to call twice."""
        with self._wake:
            self._closed = True
            left, self._commands = self._commands, deque()
            self._wake.notify()
        for _, future in left:
            future.set_exception(EngineFailed("the engine is closed"))
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        settle()
        due = 0.0
        while True:
            commands = self._next_commands(due)
            if commands is None:
                return
            for command, future in commands:
                if not future.set_running_or_notify_cancel():
                    continue
                try:
                    if self.failed is not None:
                        raise EngineFailed(self.failed)
                    future.set_result(command(self._scheduler))
                except BaseException as error:
                    future.set_exception(error)
            try:
                now = time.monotonic()
                if self.failed is None and self._scheduler.ready and now >= due:
                    due = now + self._pace
                    self._scheduler.step()
            except Exception as error:
                self.fail(f"the scheduler stopped: {type(error).__name__}: {error}")
            if events := self._scheduler.take_events():
                self._deliver(events)
            if self.failed is not None:
                return

    def _next_commands(self, due: float) -> list[tuple[Callable[[Scheduler], Any], Future[Any]]] | None:
        """Wait until there is a command or a step is due. None: closed."""
        with self._wake:
            while not self._commands and not self._closed:
                if not self._scheduler.ready:
                    self._wake.wait()
                elif (left := due - time.monotonic()) > 0:
                    self._wake.wait(left)
                else:
                    break
            if self._closed:
                return None
            commands = list(self._commands)
            self._commands.clear()
            return commands
