"""A deterministic asyncio event loop on virtual time, with a seeded scheduler and processes that can die.

Among the callbacks that are ready it picks one at random, and time jumps to the next timer only when none
is ready, so one seed is one interleaving and an hour of waiting costs nothing. No sockets, no threads:
``run_in_executor`` runs its function as one callback, some time later.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import heapq
import itertools
import sys
from asyncio import events
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from contextvars import Context, copy_context
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from .process import PROCESS, Crash, SimulatedProcess

T = TypeVar("T")
Function = Callable[..., Any]

OUTSIDE = Context()
"""The context of callbacks that belong to no process: a packet on the wire, a timer of the simulation."""


class SimulationError(Exception):
    """The simulation cannot go on; the message says what every task waits for."""


class Deadlock(SimulationError):
    """Nothing is ready, no timer is set, and the main task is not done."""


class Runaway(SimulationError):
    """More callbacks or more virtual time than the limits allow."""


class _Handle(asyncio.TimerHandle):
    """asyncio's handle without its checks and bookkeeping, which cost more than the rest of the loop."""

    __slots__ = ("arguments", "callback", "context", "gone", "time")

    def __init__(self, callback: Function, arguments: tuple[Any, ...], context: Context, time: float) -> None:
        self.callback = callback
        self.arguments = arguments
        self.context = context
        self.gone = False
        self.time = time

    def cancel(self) -> None:
        self.gone = True
        self.arguments = ()

    def cancelled(self) -> bool:
        return self.gone

    def when(self) -> float:
        return self.time

    def __repr__(self) -> str:
        return f"<{getattr(self.callback, '__qualname__', self.callback)} at {self.time}>"


class _Task(asyncio.Task[T]):
    """Hashes by its number: asyncio keeps tasks in sets, whose order must not depend on addresses."""

    def __init__(
        self, coroutine: Coroutine[Any, Any, T], number: int, process: SimulatedProcess | None, **options: Any
    ) -> None:
        self.number = number
        self.process = process
        super().__init__(coroutine, **options)

    def __hash__(self) -> int:
        return self.number


class SimulatedLoop(asyncio.AbstractEventLoop):
    """See the module. Every random choice comes from ``random``; times are in virtual seconds.

    ``problems`` collects what asyncio would have logged, such as an exception that nobody looked at.
    """

    def __init__(
        self,
        random: Random,
        *,
        max_steps: int = 5_000_000,
        max_time: float = 7 * 86_400.0,
        executor_delay: float = 0.05,
    ) -> None:
        self.random = random
        self.steps = 0
        self.problems: list[str] = []
        self._max_steps = max_steps
        self._max_time = max_time
        self._executor_delay = executor_delay
        self._time = 0.0
        self._ready: list[_Handle] = []
        self._timers: list[tuple[float, int, _Handle]] = []
        self._sequence = itertools.count()
        self._tasks: list[_Task[Any]] = []
        self._prune_at = 256
        self._parked: dict[SimulatedProcess, list[_Handle]] = {}
        # What dead processes still had to run. Dropped, it would unwind their coroutines, as no death does.
        self._graveyard: list[_Handle] = []
        self._generators: dict[int, SimulatedProcess | None] = {}
        self._failure: BaseException | None = None
        self._closed = False

    # ------------------------------------------------------------------------------------- running

    def run_until_complete(self, future: Generator[Any, None, T] | Awaitable[T]) -> T:
        """Run until ``future`` is done; raises its exception, what ``fail`` was told, Deadlock or Runaway."""
        hooks, collecting = sys.get_asyncgen_hooks(), gc.isenabled()
        events._set_running_loop(self)
        sys.set_asyncgen_hooks(firstiter=self._generator_started, finalizer=self._generator_dropped)
        # A collection at a moment of its own choosing would finalize things inside some callback.
        gc.disable()
        try:
            main: asyncio.Future[T] = asyncio.ensure_future(future, loop=self)  # type: ignore[arg-type]
            self._run(main)
            return main.result()
        finally:
            if collecting:
                gc.enable()
            sys.set_asyncgen_hooks(*hooks)
            events._set_running_loop(None)

    def _run(self, main: asyncio.Future[Any]) -> None:
        ready, random, process_of = self._ready, self.random.random, PROCESS
        while not main.done():
            count = len(ready)
            if not count:
                self._advance()
                continue
            if count == 1:
                handle = ready.pop()
            else:
                index = int(random() * count)
                handle, ready[index] = ready[index], ready[-1]
                ready.pop()
            if handle.gone:
                continue
            process = handle.context.get(process_of)
            if process is not None:
                if process.dead:
                    self._graveyard.append(handle)
                    continue
                if process.stalled_until > self._time:
                    self._parked.setdefault(process, []).append(handle)
                    continue
            self.steps += 1
            try:
                handle.context.run(handle.callback, *handle.arguments)
            except Crash:
                if process is None or not process.dead:
                    raise
            if self._failure is not None:
                raise self._failure
            if self.steps >= self._max_steps:
                raise Runaway(f"{self._max_steps} callbacks by {self._time:.3f} s{self.describe()}")

    def _advance(self) -> None:
        """Jump to the next timer and make all timers of that time ready."""
        timers = self._timers
        while timers and timers[0][2].gone:
            heapq.heappop(timers)
        if not timers:
            raise Deadlock(f"nothing will ever happen after {self._time:.3f} s{self.describe()}")
        self._time = max(self._time, timers[0][0])
        if self._time > self._max_time:
            raise Runaway(f"not done after {self._max_time} virtual seconds{self.describe()}")
        while timers and timers[0][0] <= self._time:
            self._ready.append(heapq.heappop(timers)[2])

    def fail(self, error: BaseException) -> None:
        """End the simulation with this error, at once, whoever found it and in whatever callback."""
        if self._failure is None:
            self._failure = error

    def describe(self) -> str:
        """The pending tasks of living processes and where each waits, one line each."""
        lines = []
        for task in self._tasks:
            process = task.process
            if task.done() or (process is not None and process.dead):
                continue
            name = process.name if process else "-"
            if process and process.stalled_until > self._time:
                name += " (stalled)"
            lines.append(f"\n  {name}: {' > '.join(_where(task.get_coro()))}")
        return "".join(lines[:40]) + ("\n  ..." if len(lines) > 40 else "")

    # -------------------------------------------------------------------------------- the loop's face

    def time(self) -> float:
        return self._time

    def call_soon(  # type: ignore[override]
        self, callback: Function, *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = _Handle(callback, args, copy_context() if context is None else context, self._time)
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Function, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._time + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Function, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = _Handle(callback, args, copy_context() if context is None else context, when)
        heapq.heappush(self._timers, (when, next(self._sequence), handle))
        return handle

    def resume_later(self, process: SimulatedProcess, seconds: float) -> None:
        """Run what a stalled process has missed by then; nothing if it was stalled again meanwhile."""

        def resume() -> None:
            if process.stalled_until <= self._time:
                self._ready.extend(self._parked.pop(process, ()))

        self.call_later(seconds, resume, context=OUTSIDE)

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self, coro: Any, *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[Any]:
        process = context.get(PROCESS) if context is not None else PROCESS.get()
        task: _Task[Any] = _Task(coro, next(self._sequence), process, loop=self, name=name, context=context)
        self._tasks.append(task)
        if len(self._tasks) >= self._prune_at:
            self._tasks = [task for task in self._tasks if not task.done()]
            self._prune_at = 2 * len(self._tasks) + 256
        return task

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Run ``func`` in one piece after a random time, and say so after another.

        It runs even if its future was cancelled: a thread cannot be called back.
        """
        future: asyncio.Future[T] = self.create_future()

        def run() -> None:
            result, error = None, None
            try:
                result = func(*args)
            except Exception as raised:
                error = raised
            self.call_later(self.random.random() * self._executor_delay, _settle, future, result, error)

        self.call_later(self.random.random() * self._executor_delay, run)
        return future

    async def run_blocking(self, function: Callable[..., T], /, *args: Any) -> T:
        """A ports.RunBlocking."""
        return await self.run_in_executor(None, function, *args)

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return not self._closed

    def is_closed(self) -> bool:
        return self._closed

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        culprit = context.get("task") or context.get("future") or context.get("asyncgen")
        process = getattr(culprit, "process", None)
        if not self._closed and not (process and process.dead):
            self.problems.append(f"{context.get('message')}: {context.get('exception')!r} in {culprit!r}")

    # --------------------------------------------------------------------------------------- the end

    def close(self) -> None:
        """Forget everything that is still suspended, without letting it touch anything."""
        self._closed = True
        pending = [task for task in self._tasks if not task.done()]
        for task in pending:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            if task.process is not None:
                task.process.dead = True
        for task in pending:
            coroutine: Any = task.get_coro()
            # A coroutine may wait again in a `finally`, and has to be told again.
            for _ in range(100):
                if coroutine.cr_frame is None:
                    break
                with contextlib.suppress(BaseException):
                    coroutine.close()
        for kept in (self._tasks, self._ready, self._timers, self._graveyard, self._parked):
            kept.clear()

    def _generator_started(self, generator: Any) -> None:
        self._generators[id(generator)] = PROCESS.get()

    def _generator_dropped(self, generator: Any) -> None:
        process = self._generators.pop(id(generator), None)
        if not self._closed and not (process and process.dead):
            (process.spawn if process else self.create_task)(generator.aclose())


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)


def _where(coroutine: Any) -> Iterator[str]:
    """``function file:line`` of each coroutine in the chain that a task waits in."""
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
        if frame is not None:
            yield f"{coroutine.__qualname__} {Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None)


@contextlib.contextmanager
def simulated_loop(random: Random, **options: Any) -> Iterator[SimulatedLoop]:
    """A loop that is closed at the end; ``options`` are SimulatedLoop's."""
    loop = SimulatedLoop(random, **options)  # type: ignore[abstract]
    try:
        yield loop
    finally:
        loop.close()
