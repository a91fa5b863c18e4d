"""Replicas' records under ``replicas/``: what they say that they fetch, and which nobody renews any more.

Replicas' clocks may be wrong, and so may the one here: ``now`` is the store's time, see ``ports.time_of``.
Where the store tells when it got a record that counts too, and whichever date is the later.
"""

from __future__ import annotations

import asyncio
import functools
import json
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from .manifest import read_time
from .ports import NotFound, Store, stamp_of
from .retry import Retry, retrying

T = TypeVar("T")

RECORDS = "replicas/"
PARALLEL = 16


@dataclass(frozen=True)
class Hint:
    """Digests of what a replica fetches, for which target, until when its record counts, seconds in all."""

    digests: frozenset[str]
    target: str | None
    expires: float
    lifetime: float

    def concerns(self, run: str) -> bool:
        return self.target is None or self.target.startswith(f"{run}/")


async def fetched(
    store: Store, run: str, *, now: float, grace: float, policy: Retry, rng: random.Random
) -> set[str]:
    """Digests of what replicas fetch of ``run``, by records that expired less than ``grace`` seconds ago.

    Raises StoreError.
    """

    async def look(key: str) -> frozenset[str]:
        said = read_hint((await retrying(functools.partial(store.load, key), policy, rng)).data)
        if said is None or not said.digests or not said.concerns(run):
            return frozenset()
        old = await _is_old(store, key, said, now=now, grace=grace, policy=policy, rng=rng)
        return frozenset() if old else said.digests

    found = await _of_all(store, look, policy, rng)
    return {digest for digests in found.values() for digest in digests}


async def abandoned(
    store: Store, run: str, *, now: float, grace: float, policy: Retry, rng: random.Random
) -> dict[str, bytes]:
    """Records that expired more than ``grace`` seconds ago, by key, as they were read. Raises StoreError.

    Not those that cannot be read, and not those that say what another run's replica fetches: that run's own
    collector may know a longer grace.
    """

    async def look(key: str) -> bytes | None:
        data = (await retrying(functools.partial(store.load, key), policy, rng)).data
        said = read_hint(data)
        if said is None or (said.digests and not said.concerns(run)):
            return None
        old = await _is_old(store, key, said, now=now, grace=grace, policy=policy, rng=rng)
        return data if old else None

    found = await _of_all(store, look, policy, rng)
    return {key: data for key, data in found.items() if data is not None}


async def _of_all(
    store: Store, look: Callable[[str], Awaitable[T]], policy: Retry, rng: random.Random
) -> dict[str, T]:
    """What ``look`` finds in each record; those that were withdrawn since they were listed are left out."""
    limit = asyncio.Semaphore(PARALLEL)

    async def one(key: str) -> list[tuple[str, T]]:
        async with limit:
            try:
                return [(key, await look(key))]
            except NotFound:
                return []

    entries = await retrying(functools.partial(store.list, RECORDS), policy, rng)
    found = await asyncio.gather(*(one(entry.key) for entry in entries if entry.key.startswith(RECORDS)))
    return dict(each for some in found for each in some)


async def _is_old(
    store: Store, key: str, said: Hint, *, now: float, grace: float, policy: Retry, rng: random.Random
) -> bool:
    """Whether a record expired ``grace`` seconds ago, by its own dates and by the store's."""
    if said.expires > now - grace:
        return False
    stamp = await retrying(functools.partial(stamp_of, store, key), policy, rng)
    return stamp is None or now - stamp.written >= said.lifetime + grace


def read_hint(record: bytes) -> Hint | None:
    """None for a record that cannot be read."""
    try:
        said: Any = json.loads(record)
        expires, digests = read_time(said["expires"], "expires"), list(said.get("fetching") or ())
        target, written = said.get("target"), read_time(said.get("time", expires), "time")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    mine = frozenset(digest for digest in digests if isinstance(digest, str))
    return Hint(mine, target if isinstance(target, str) else None, expires, max(expires - written, 0.0))
