"""Requests that wait for a version, and whom of them a change wakes.

All that wait for one version want the same of the same replicas. To wake them all for every replica that
comes to it costs held x replicas looks at all replicas: for 20,000 and 1,000 a gateway would do nothing else.
So a replica wakes as many as it takes before it has more than its share, those that came first, and the rest
waits for the next replica, but not for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field

from stitch_core.versions import VersionConstraint

from .routing import Replica, eligible, gone_for_good, most, passed

_Waiter = asyncio.Future[bool]
# As replicas go on coming the rest waits on, but no longer than so many times the time without one.
MOST_SPREADS = 3


@dataclass
class _Group:
    """Who waits for the same, in the order of coming, with their sequences.

    ``last``: when all may go; ``began``: when the first of them could not.
    """

    waiters: dict[_Waiter, int] = field(default_factory=dict)
    last: asyncio.TimerHandle | None = None
    began: float = 0.0

    def wake(self, room: float, *, patient: bool) -> bool:
        """Wake those for whom there is room; whether that was all."""
        all_of_them = True
        for waiter, sequences in self.waiters.items():
            if waiter.done():
                continue
            if sequences > room:  # smaller ones behind it may fit
                all_of_them = False
                continue
            room -= sequences
            waiter.set_result(patient)
        return all_of_them

    def wake_later(self, seconds: float, *, again: bool) -> None:
        """Wake all in so long, counted anew if this was asked before and ``again``."""
        loop = asyncio.get_running_loop()
        if self.last is None:
            self.began = loop.time()
        elif not again:
            return
        self.close()
        at = min(loop.time() + seconds, self.began + MOST_SPREADS * seconds)
        self.last = loop.call_at(at, self._let_go)

    def _let_go(self) -> None:
        self.last = None
        self.wake(float("inf"), patient=False)

    def close(self) -> None:
        if self.last is not None:
            self.last.cancel()


class Waiting:
    """The groups, by what they demand. Owned by one event loop."""

    def __init__(self) -> None:
        self._groups: dict[VersionConstraint, _Group] = {}

    async def wait(
        self, constraint: VersionConstraint, sequences: int, until: float, spread: float | None = None
    ) -> bool:
        """Wait until a change wakes the request, or ``until`` (of the loop's clock).

        ``spread``: seconds after which it is woken in any case; None: only a change concerns it. Returns
        whether it should still wait for its share: no longer once such seconds have passed for its group.
        """
        waiter: _Waiter = asyncio.get_running_loop().create_future()
        group = self._groups.setdefault(constraint, _Group())
        group.waiters[waiter] = sequences
        if spread is not None:
            group.wake_later(spread, again=False)
        try:
            async with asyncio.timeout_at(until):
                return await waiter
        except TimeoutError:
            return True
        finally:
            del group.waiters[waiter]
            if not group.waiters and self._groups.get(constraint) is group:
                group.close()
                del self._groups[constraint]

    def changed(
        self, replica: Replica | None, replicas: Collection[Replica], held: int, spread: float
    ) -> None:
        """Wake whom the change of ``replica`` concerns; None: it concerns all.

        ``held``: sequences that wait; ``spread``: seconds without another one after which those go for whom
        it had no room.
        """
        for constraint, group in self._groups.items():
            if replica is None:
                group.wake(float("inf"), patient=True)
            elif eligible(replica, constraint):
                room = most(replicas, constraint, held) - replica.load
                if not group.wake(room, patient=True):
                    group.wake_later(spread, again=True)
            elif passed(replica, constraint) and gone_for_good(constraint, replicas):
                group.wake(float("inf"), patient=True)
