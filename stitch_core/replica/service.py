"""A replica's life: reconcile, announce, and leave in order. Transport and engine are the caller's."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from ..manifest import canonical_json
from ..ports import Clock, Store, StoreError
from ..versions import check_run_id
from .activation import ReplicaFailed
from .admission import Gate
from .reconciler import Reconciler


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
        reconciler.on_update = self._changed.set

    async def run(self) -> None:
        """Write the record at every activation and often enough that it does not expire, until withdrawn."""
        while True:
            self._changed.clear()
            async with self._writing:
                if self._withdrawn:
                    return
                record = self._reconciler.record(self._id, self._address, self._lifetime)
                with contextlib.suppress(StoreError):
                    await self._store.replace(self._key, canonical_json(record))
            with contextlib.suppress(TimeoutError):
                # Not all replicas of a fleet that was started at once in the same second.
                async with asyncio.timeout(self._lifetime / 3 * self._reconciler.rng.uniform(0.6, 1.0)):
                    await self._changed.wait()

    async def withdraw(self) -> None:
        """Remove the record; a write that is under way must not land after that."""
        self._withdrawn = True
        with contextlib.suppress(StoreError, TimeoutError):
            async with asyncio.timeout(self._lifetime), self._writing:
                await self._store.delete(self._key)


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
            await gate.drain(clock.monotonic() + drain, pins_only=False)
    finally:
        end_server.set()
        for task in (loop, announcing, stopping):
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result


__all__ = ["Announcer", "ReplicaFailed", "live", "replica_key"]
