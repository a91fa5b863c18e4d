"""The end of a process in which versions are on their way: they are waited for, and a loss is told.

``atexit`` is too late for that: Python ends the thread pools that publishing works with before it calls the
functions that are registered there. Nor can one of them change the exit code. So the waiting is registered
where the end of the pools is, and the exit code is changed by the flush of stderr that Python itself makes
last: where that fails, the code is 120, as the documentation of ``sys.exit`` says.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401  (what it registers is called after what is registered later)
import contextlib
import functools
import multiprocessing
import os
import sys
import threading
from collections.abc import Collection
from concurrent.futures import Future, wait
from typing import Any, Protocol

from . import logs

SAY_AFTER, SAY_EVERY = 5.0, 60.0
"""Seconds of waiting before it is said what is waited for."""


class Leaving(Protocol):
    """What has versions on their way. Its owner calls ``watch``, and ``forget`` when it is closed."""

    def finish(self) -> None:
        """Wait for what is on its way, and raise nothing of how it ends."""
        ...

    def lost(self) -> str | None:
        """Why the newest version is not published, if nobody has been told so; one sentence."""
        ...


_watched: list[Leaving] = []
_told: set[str] = set()


def watch(one: Leaving) -> None:
    """Wait for it when the process ends. Watching twice is fine."""
    _hang_on()
    if one not in _watched:
        _watched.append(one)


def forget(one: Leaving) -> None:
    """It has nothing on its way and nothing to tell; one that is not watched is fine."""
    with contextlib.suppress(ValueError):
        _watched.remove(one)


def wait_for(futures: Collection[Future[Any]], what: str) -> None:
    """Wait until they are done, and say on stderr ``what`` is waited for when that takes long."""
    pause = SAY_AFTER
    while wait(futures, pause).not_done:
        logs.tell(f"stitch: waiting for {what} (Ctrl-C gives up)")
        pause = SAY_EVERY


@functools.cache
def _hang_on() -> None:
    # Without it (it is private, and what concurrent.futures itself uses) a loss is told, and not prevented.
    with contextlib.suppress(RuntimeError):  # the interpreter is ending already
        getattr(threading, "_register_atexit", atexit.register)(_finish)
    atexit.register(_end)
    os.register_at_fork(after_in_child=_watched.clear)  # the threads that publish are the parent's


def _finish() -> None:
    """Called when the main thread has come to its end, before any pool is ended."""
    for one in reversed(_watched):
        # Ctrl-C, or a signal's handler that exits: what is not published by now is told.
        with contextlib.suppress(BaseException):
            one.finish()
    if _tell() and multiprocessing.parent_process() is not None:
        raise SystemExit(1)  # such a child may end without all that follows here


def _tell() -> bool:
    """Tell each loss once; whether there was one that was not told before."""
    lines = dict.fromkeys(f"stitch: {lost}" for one in _watched if (lost := one.lost()) is not None)
    new = [line for line in lines if line not in _told]
    for line in new:
        logs.tell(line, level="error")
    _told.update(new)
    return bool(new)


def _end() -> None:
    """Once more, as threads that are no daemons may have gone on; then the exit code."""
    _tell()
    if _told:
        sys.stderr = _LastFlushFails(sys.stderr)


class _LastFlushFails:
    """A stream as it is, but for the flush that the interpreter makes at its end: nothing has called it."""

    closed = False

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        if self._stream is not None:
            self._stream.flush()
        try:
            sys._getframe(1)
        except ValueError:
            raise OSError("a version was not published") from None
