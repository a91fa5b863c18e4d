"""Publishing behind the trainer: one version on its way, one that waits, and the base that follows.

The encoder's base moves when a version is encoded, before anybody knows how its publishing ends. What is
here keeps the two in step, and does nothing else: no I/O, no thread of its own.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, wait
from typing import Generic, Protocol, TypeVar

from . import leaving
from .publisher import PublishError

T = TypeVar("T")

OUTSTANDING = 2


class Base(Protocol):
    """A base that moves with each encode, in order, as ``DeltaEncoder`` does."""

    def commit(self) -> None:
        """The oldest encode that is not settled was published."""
        ...

    def undo(self) -> None:
        """None of those that are not settled was: the base is what the last commit made it."""
        ...


class Pipeline(Generic[T]):
    """Versions that are encoded and not settled, oldest first: at most ``limit``, then the trainer waits.

    ``published`` is the newest number that was published, ``encoded`` the one that the base stands for. The
    trainer's thread calls everything but ``turn``, which is the publishing side's.
    """

    def __init__(self, base: Base, head: int, limit: int = OUTSTANDING) -> None:
        self.published = self.encoded = head
        self._base, self._limit = base, limit
        self._pending: deque[tuple[int, Future[T]]] = deque()
        self._broken = threading.Event()

    def make_room(self, timeout: float | None) -> None:
        """Wait until one more may be queued; TimeoutError after ``timeout`` seconds."""
        if len(self._pending) >= self._limit and not wait([self._pending[0][1]], timeout).done:
            raise TimeoutError(f"a publish is not done after {timeout:g} s: the store is too slow, or away")

    def queued(self, number: int, future: Future[T]) -> None:
        """``number`` was encoded, the base has moved, and ``future`` is its publishing."""
        self._pending.append((number, future))
        self.encoded = number

    def ended(self) -> int:
        """How many of the oldest have ended."""
        count = 0
        for _, future in self._pending:
            if not future.done():
                break
            count += 1
        return count

    def settle(self, count: int) -> BaseException | None:
        """Let the base follow how the ``count`` oldest ended, waiting for them; the failure, if there is one.

        What waited behind a failure was encoded on top of it: it fails too, and is waited for.
        """
        for _ in range(min(count, len(self._pending))):
            number, future = self._pending[0]
            failure = Future.exception(future)  # whoever queued it may know when its own is asked
            if failure is not None:
                wait([behind for _, behind in self._pending])
                self._pending.clear()
                self._base.undo()
                self.encoded = self.published
                self._broken.clear()
                return failure
            self._pending.popleft()
            self._base.commit()
            self.published = number
        return None

    def finish(self, whose: str) -> None:
        """Wait for all that were queued, and say what is waited for where that takes long."""
        names = ", ".join(str(number) for number, future in self._pending if not future.done())
        leaving.wait_for(self.outstanding(), f"version {names} {whose} to be published")

    def lost(self, run: str) -> str | None:
        """Why the oldest that is not settled is not published, if so."""
        for number, future in self._pending:
            if not future.done():
                return f"version {number} of run {run} was not published: the process ended first"
            if (failure := Future.exception(future)) is not None:
                return str(failure)
        return None

    def outstanding(self) -> list[Future[T]]:
        return [future for _, future in self._pending]

    @contextlib.contextmanager
    def turn(self, number: int) -> Iterator[None]:
        """Around the publishing of ``number``, one at a time and in order; what fails in it fails the next.

        Raises PublishError when the publish before this one failed, and has not been settled yet.
        """
        if self._broken.is_set():
            raise PublishError(f"version {number} was not published: the publish before it failed")
        try:
            yield
        except BaseException:
            self._broken.set()  # before the next one gets its turn
            raise
