"""What replicas say that they fetch, in their records under ``replicas/``, by clocks that may be wrong."""

from __future__ import annotations

import asyncio
import functools
import json
import random
from dataclasses import dataclass
from typing import Any

from .manifest import read_time
from .ports import Clock, NotFound, Store, stamp_of
from .retry import Retry, retrying

RECORDS = "replicas/"
PARALLEL = 16


@dataclass(frozen=True)
class Fetching:
    """Digests of what a replica fetches, until when its record counts by its clock, and seconds in all."""

    digests: frozenset[str]
    expires: float
    lifetime: float


async def fetched(
    store: Store, run: str, *, clock: Clock, grace: float, policy: Retry, rng: random.Random
) -> set[str]:
    """Digests of what replicas fetch of ``run``, by records that expired less than ``grace`` seconds ago.

    By their own dates or, where the store tells when it got a record, by its clock: the later counts, since
    a replica's clock may be far behind, or the one here ahead. Raises StoreError.
    """
    limit = asyncio.Semaphore(PARALLEL)

    async def look(key: str) -> frozenset[str]:
        async with limit:
            try:
                blob = await retrying(functools.partial(store.load, key), policy, rng)
                said = read_fetching(blob.data, run)
                if said is None or said.expires > clock.time() - grace:
                    return said.digests if said else frozenset()
                stamp = await retrying(functools.partial(stamp_of, store, key), policy, rng)
            except NotFound:  # withdrawn since it was listed
                return frozenset()
        return said.digests if stamp is not None and stamp.age < said.lifetime + grace else frozenset()

    entries = await retrying(functools.partial(store.list, RECORDS), policy, rng)
    found = await asyncio.gather(*(look(entry.key) for entry in entries if entry.key.startswith(RECORDS)))
    return {digest for digests in found for digest in digests}


def read_fetching(record: bytes, run: str) -> Fetching | None:
    """None where a record says nothing of ``run``: it is damaged, of another run, or fetches nothing."""
    try:
        said: Any = json.loads(record)
        expires, digests = read_time(said["expires"], "expires"), list(said.get("fetching") or ())
        target, written = said.get("target"), read_time(said.get("time", expires), "time")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    if isinstance(target, str) and not target.startswith(f"{run}/"):
        return None
    if not digests:
        return None
    mine = frozenset(digest for digest in digests if isinstance(digest, str))
    return Fetching(mine, expires, max(expires - written, 0.0))
