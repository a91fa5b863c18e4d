"""A replica's life: reconcile, announce, and leave in order. Transport and engine are the caller's."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from ..manifest import canonical_json
from ..ports import Clock, Store, StoreError
from ..retry import Retry, retrying
from ..versions import check_run_id
from .activation import ReplicaFailed
from .admission import Gate
from .reconciler import Reconciler

ONCE = Retry(attempts=1)


def replica_key(replica_id: str) -> str:
    """Where a replica leaves its record: a hint, never something that decides."""
    return f"replicas/{check_run_id(replica_id)}.json"


class Announcer:
    """Keeps ``replicas/<id>.json`` fresh while the replica lives; failures only make the hint older."""

    def __init__(
        self, store: Store, reconciler: Reconciler, replica_id: str, address: str, *, lifetime: float = 15.0
    ) -> None:
        """``lifetime``: seconds until an unrenewed record expires."""
        self._store, self._reconciler, self._key = store, reconciler, replica_key(replica_id)
        self._id, self._address, self._lifetime = replica_id, address, lifetime
        self._changed = asyncio.Event()
        self._writing = asyncio.Lock()
        self._withdrawn = False
        self._telling: asyncio.Task[None] | None = None
        reconciler.on_update, reconciler.on_fetch = self._changed.set, self.fetching

    async def run(self) -> None:
        """Write the record at every activation and often enough that it does not expire, until withdrawn."""
        while not self._withdrawn:
            self._changed.clear()
            await self._write(ONCE)
            with contextlib.suppress(TimeoutError):
                # Not all replicas of a fleet that was started at once in the same second.
                async with asyncio.timeout(self._lifetime / 3 * self._reconciler.rng.uniform(0.6, 1.0)):
                    await self._changed.wait()

    async def fetching(self) -> None:
        """Write the record before what it says is fetched, so that no collector deletes it under the fetch.

        Where that fails, or is not done within the record's lifetime, the fetch begins all the same: what was
        planned just now is protected by the collector's grace, and a reader that meets a 404 plans again.
        """
        policy = Retry(attempts=4, deadline=self._lifetime)
        self._telling = telling = asyncio.ensure_future(self._write(policy))
        # Not cancelled: a write that is under way in a thread lands all the same.
        await asyncio.wait({telling}, timeout=self._lifetime)
        if telling.done() and not telling.cancelled():
            telling.exception()  # which ``run`` will meet, too

    async def _write(self, policy: Retry) -> None:
        async def write() -> None:
            record = self._reconciler.record(self._id, self._address, self._lifetime)
            await self._store.replace(self._key, canonical_json(record))

        async with self._writing:
            if not self._withdrawn:
                with contextlib.suppress(StoreError):
                    await retrying(write, policy, self._reconciler.rng)

    async def withdraw(self) -> None:
        """Remove the record; a write that is under way must not land after that."""
        self._withdrawn = True
        with contextlib.suppress(StoreError, TimeoutError):
            async with asyncio.timeout(self._lifetime), self._writing:
                await self._store.delete(self._key)
        if self._telling is not None:
            self._telling.cancel()


async def live(
    reconciler: Reconciler,
    announcer: Announcer | None,
    stop: asyncio.Event,
    serve: Callable[[asyncio.Event], Awaitable[None]],
    *,
    gate: Gate,
    clock: Clock,
    drain: float = 60.0,
) -> None:
    """Serve until ``stop`` is set, then leave rotation, let requests end for ``drain`` seconds, and return.

    ``serve`` runs the HTTP server until the event that it is given is set. Raises what it raises, and what
    Reconciler.run does: after ReplicaFailed the process must be replaced.
    """
    end_server = asyncio.Event()
    server = asyncio.ensure_future(serve(end_server))
    loop = asyncio.ensure_future(reconciler.run())
    announcing = asyncio.ensure_future(announcer.run() if announcer else asyncio.sleep(float("inf")))
    stopping = asyncio.ensure_future(stop.wait())
    tasks = [server, loop, announcing, stopping]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        gate.stop()
        if announcer is not None:
            await announcer.withdraw()
        if not loop.done():
            await gate.empty(clock.monotonic() + drain)
    finally:
        end_server.set()
        for task in (loop, announcing, stopping):
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result


__all__ = ["Announcer", "ReplicaFailed", "live", "replica_key"]
