"""The live view of the replicas: found in the pool, probed in turn, corrected by every response."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp

from stitch_core.ports import Pool, ReplicaAddress
from stitch_core.versions import HEADER_ADMITTED, HEADER_RUN, PolicyVersion, check_run_id

from .routing import Replica

# While a replica is not ready it is asked this often (seconds): a pause is shorter than the usual interval.
IMPATIENT = 0.1
# Many replicas are asked less often, so that asking does not keep the gateway from its work (per second).
MOST_PROBES = 400.0
# What an engine has in its queue is asked this often (seconds); our own requests are counted in between.
LOADS_EVERY = 1.0
# Probes in a row that may time out.
MOST_LATE = 3
LOADS = "/v1/loads?include=core"
# asyncio's own timeout is used: aiohttp's may take a cancellation of the task for its own, and lose it.
NO_TIMEOUT = aiohttp.ClientTimeout()


GARBAGE = (aiohttp.ClientError, TimeoutError, ValueError, AttributeError, TypeError, RecursionError, KeyError)
# Bytes of a status that are read.
MOST_STATUS = 1 << 20
# A token of the gateway's is missing or wrong, at the replica or at what stands before it.
SHUT = (401, 403)


class Fleet:
    """Probes ``/ready`` of every replica and wakes whoever waits for a change."""

    def __init__(
        self,
        pool: Pool,
        session: aiohttp.ClientSession,
        rng: random.Random,
        *,
        interval: float = 0.25,
        timeout: float = 2.0,
        refresh: float = 1.0,
    ) -> None:
        """Seconds: ``interval`` between probes, ``timeout`` of one, ``refresh`` between looks at the pool."""
        self.evictions = 0
        self.pool_error: str | None = None
        self._pool = pool
        self._session = session
        self._rng = rng
        self._interval = interval
        self._timeout = timeout
        self._refresh = refresh
        self._replicas: dict[str, Replica] = {}
        self._probes: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self.on_change: Callable[[Replica | None], None] = lambda replica: None

    @property
    def replicas(self) -> list[Replica]:
        return list(self._replicas.values())

    @property
    def changed(self) -> asyncio.Event:
        """Set at the next change; ask for it before looking at the replicas."""
        return self._changed

    async def run(self) -> None:
        """Follow the pool until cancelled."""
        try:
            while True:
                try:
                    lost = [id_ for id_, replica in self._replicas.items() if not replica.alive]
                    addresses = {a.id: a for a in await self._pool.replicas(lost)}
                    self.pool_error = None
                    self._follow(addresses)
                except Exception as error:  # a pool that fails must not take the gateway down
                    self.pool_error = repr(error)
                await asyncio.sleep(self._refresh * self._rng.uniform(0.8, 1.2))
        finally:
            for probe in self._probes.values():
                probe.cancel()
            await asyncio.gather(*self._probes.values(), return_exceptions=True)

    def notify(self, replica: Replica | None = None) -> None:
        """Wake everyone who waits for a change: of this replica, or of any."""
        self._changed.set()
        self._changed = asyncio.Event()
        self.on_change(replica)

    # -------------------------------------------------------------------------------- what requests learn

    def failed(self, replica: Replica, error: str, *, answered: bool) -> None:
        """A connection error, or a 503 (``answered``): out of rotation until a probe finds it ready."""
        if replica.ready:
            self.evictions += 1
        replica.ready, replica.alive, replica.error = False, answered, error
        self.notify(replica)

    def refused(self, replica: Replica, run: object, number: object) -> None:
        """A 409 said what the replica serves at this moment."""
        if (version := _version(run, number)) is not None:
            self._serves(replica, version)

    def answered(self, replica: Replica, version: PolicyVersion) -> None:
        """A response said what admitted it, maybe long ago: news only if it is a step up."""
        known = replica.serving
        if known is not None and known.run == version.run and known < version:
            self._serves(replica, version)

    # -------------------------------------------------------------------------------------------- inside

    def _follow(self, addresses: Mapping[str, ReplicaAddress]) -> None:
        places = {id_: _place(address) for id_, address in addresses.items()}
        taken = set(places.values())
        for id_ in [i for i, replica in self._replicas.items() if places.get(i) != _place(replica)]:
            # A pool that lost its records, as a store that is not mounted has, must not take the fleet down:
            # who answers stays until it does not.
            known = self._replicas[id_]
            if id_ not in addresses and known.alive and _place(known) not in taken:
                continue
            self._probes.pop(id_).cancel()
            del self._replicas[id_]
            self.notify()
        for id_, address in addresses.items():
            if id_ not in self._replicas:
                self._replicas[id_] = replica = Replica(id_, address.url, address.headers)
                self._probes[id_] = asyncio.create_task(self._follow_one(replica))

    async def _follow_one(self, replica: Replica) -> None:
        await asyncio.gather(self._keep_probing(replica), self._keep_counting(replica))

    async def _keep_probing(self, replica: Replica) -> None:
        while True:
            await self._probe(replica)
            interval = max(self._interval, len(self._replicas) / MOST_PROBES)
            if replica.alive and not replica.ready:
                interval = max(min(interval, IMPATIENT), interval / 4)
            await asyncio.sleep(interval * self._rng.uniform(0.8, 1.2))

    async def _keep_counting(self, replica: Replica) -> None:
        """Apart from the probes: an engine that is slow to tell must not make its replica seem late."""
        while True:
            replica.tells = replica.ready and await self._queue(replica)
            interval = max(LOADS_EVERY, len(self._replicas) / MOST_PROBES)
            await asyncio.sleep(interval * self._rng.uniform(0.8, 1.2))

    async def _probe(self, replica: Replica) -> None:
        before = (replica.alive, replica.ready)
        try:
            async with asyncio.timeout(self._timeout), self._get(replica, "/ready") as response:
                body = await _bounded(response)
                shut = f"it answered {response.status} to this gateway" if response.status in SHUT else None
                status: Any = {} if shut else json.loads(body)
                ready = response.status == 200 and status.get("ready") is True
                active = int(status.get("active_requests") or 0)
        except (*GARBAGE, OSError) as error:
            # One that is merely late may only be busy; a request that it cannot take will say so.
            replica.late = replica.late + 1 if isinstance(error, TimeoutError) else MOST_LATE
            if replica.late >= MOST_LATE:
                replica.alive = replica.ready = False
            replica.error = f"{type(error).__name__}: {error}".rstrip(": ")
        else:
            replica.alive, replica.ready, replica.late = True, ready, 0
            if not replica.tells:
                replica.others = max(0, active - replica.in_flight)
            replica.error = None if ready else shut or str(status.get("why_not_ready") or "not ready")
            replica.target = _target(status.get("target"))
            self._serves(replica, _version(status.get("run"), status.get("weight_version")))
        if before != (replica.alive, replica.ready):
            self.notify(replica)

    def _get(self, replica: Replica, path: str) -> Any:
        headers = dict(replica.headers)
        url = replica.url + path
        return self._session.get(url, headers=headers, timeout=NO_TIMEOUT, allow_redirects=False)

    async def _queue(self, replica: Replica) -> bool:
        """Ask the engine for its queue; whether it tells."""
        ours = replica.sequences
        try:
            async with asyncio.timeout(self._timeout), self._get(replica, LOADS) as response:
                if response.status != 200:
                    return False
                queued = _queued(json.loads(await _bounded(response)))
        except (*GARBAGE, OSError):
            return False
        # What we sent it meanwhile is no other's.
        replica.others = max(0, queued - max(ours, replica.sequences))
        return True

    def _serves(self, replica: Replica, version: PolicyVersion | None) -> None:
        if replica.serving != version:
            replica.serving = version
            self.notify(replica)


def _place(at: Replica | ReplicaAddress) -> tuple[str, tuple[tuple[str, str], ...]]:
    return at.url, tuple(sorted(at.headers.items()))


async def _bounded(response: aiohttp.ClientResponse) -> bytes:
    """The body of a status. Raises ValueError for one without an end."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > MOST_STATUS:
            raise ValueError(f"the status exceeds {MOST_STATUS} bytes")
    return bytes(body)


def _queued(answer: Any) -> int:
    """The sequences that an engine runs and holds, over all its data-parallel ranks. Raises GARBAGE."""
    loads = answer["loads"]
    return sum(int(load["num_running_reqs"]) + int(load["num_waiting_reqs"]) for load in loads)


def admitted_version(headers: Mapping[str, str]) -> PolicyVersion | None:
    """The version that the headers of a response say admitted it; None if they do not."""
    return _version(headers.get(HEADER_RUN), headers.get(HEADER_ADMITTED))


def _target(text: object) -> PolicyVersion | None:
    try:
        return PolicyVersion.parse(text) if isinstance(text, str) else None
    except ValueError:
        return None


def _version(run: object, number: object) -> PolicyVersion | None:
    try:
        return PolicyVersion(check_run_id(run), int(str(number)))
    except ValueError:
        return None
