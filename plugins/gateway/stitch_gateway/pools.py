"""Where replicas may be: a fixed list, or the records that they leave in the store."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from stitch_core.ports import Clock, NotFound, Pool, ReplicaAddress, Store, StoreError, SystemClock
from stitch_core.stores import open_store as open_store_url

PREFIX = "replicas/"
# A record that expired longer ago (seconds) is of a replica that was killed, not of one that is late.
LONG_GONE = 600.0


class StaticPool:
    """The replicas at these URLs, whatever happens to them."""

    def __init__(self, urls: Sequence[str]) -> None:
        """Raises ValueError for what is not an http URL."""
        for url in urls:
            if not _is_address(url):
                raise ValueError(f"{url!r} is not the URL of a replica, such as http://10.0.0.7:30100")
        if not urls:
            raise ValueError("no replicas were named")
        self._replicas = [ReplicaAddress(urlsplit(url).netloc, url.rstrip("/")) for url in urls]

    async def replicas(self) -> Sequence[ReplicaAddress]:
        return self._replicas

    async def close(self) -> None:
        return


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port, such as 99999
        return False


class StorePool:
    """The replicas whose records are in the store. While it cannot be read, those that were there last."""

    def __init__(self, store: Store, clock: Clock, *, long_gone: float = LONG_GONE) -> None:
        """``long_gone``: seconds after its expiry for which a record is still worth a probe."""
        self._store = store
        self._clock = clock
        self._long_gone = long_gone
        self._last: list[ReplicaAddress] = []

    async def replicas(self) -> Sequence[ReplicaAddress]:
        try:
            entries = await self._store.list(PREFIX)
            found = [await self._read(entry.key) for entry in entries if entry.key.endswith(".json")]
        except StoreError:
            return self._last
        self._last = [address for address in found if address is not None]
        return self._last

    async def _read(self, key: str) -> ReplicaAddress | None:
        try:
            record: Any = json.loads((await self._store.load(key)).data)
            expires, url = float(record["expires"]), record["address"]
            if self._clock.time() > expires + self._long_gone or not url.startswith(("http://", "https://")):
                return None
            return ReplicaAddress(str(record["id"]), url.rstrip("/"), record)
        except (NotFound, ValueError, KeyError, TypeError, AttributeError):
            # A record is a hint: one that was withdrawn or cannot be read names no replica.
            return None

    async def close(self) -> None:
        await self._store.close()


def open_static(url: str, **options: Any) -> Pool:
    """``static:http://a:1,http://b:2``."""
    return StaticPool([part for part in url.removeprefix("static:").split(",") if part], **options)


def open_store(url: str, **options: Any) -> Pool:
    """``store:file:/dir``: the records in the store that the rest of the URL names."""
    return StorePool(open_store_url(url.removeprefix("store:")), SystemClock(), **options)
