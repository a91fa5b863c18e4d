"""Where replicas may be: a fixed list, their records in the store, or the addresses of a name."""

from __future__ import annotations

import asyncio
import functools
import json
import socket
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from stitch_core.digits import whole
from stitch_core.gathering import all_of
from stitch_core.manifest import read_time
from stitch_core.ports import Clock, NotFound, Pool, ReplicaAddress, Store, StoreError, SystemClock
from stitch_core.stores import open_store as open_store_url
from stitch_core.urls import is_http

PREFIX = "replicas/"
# A record that expired longer ago (seconds) is of a replica that was killed, not of one that is late.
LONG_GONE = 600.0
# Seconds for which a record is not read again, whenever it says that it expires.
LONGEST_UNREAD = 30.0
PARALLEL = 32
RESOLVE_SECONDS = 5.0

Resolve = Callable[[str, int], Awaitable[list[str]]]


class StaticPool:
    """The replicas at these URLs, whatever happens to them."""

    def __init__(self, urls: Sequence[str]) -> None:
        """Raises ValueError for what is not an http URL."""
        for url in urls:
            if not is_http(url):
                raise ValueError(f"{url!r} is not the URL of a replica, such as http://10.0.0.7:30100")
        if not urls:
            raise ValueError("no replicas were named")
        self._replicas = [ReplicaAddress(urlsplit(url).netloc, url.rstrip("/")) for url in urls]

    async def replicas(self, doubted: Collection[str] = ()) -> Sequence[ReplicaAddress]:
        return self._replicas

    async def close(self) -> None:
        return


@dataclass(frozen=True)
class _Record:
    """What a record said when it was last read. ``again``: when to read it again, of the monotonic clock.

    ``fresh``: when it was last known to be no older than it says; None: it was long gone when it was first
    seen, and has not changed since.
    """

    data: bytes
    address: ReplicaAddress
    again: float
    fresh: float | None


class StorePool:
    """The replicas whose records are in the store. While it cannot be read, those that were there last.

    Every look lists; a record is read when it is new, while its replica does not answer (it may have come
    back elsewhere), and once it should have been renewed, so that 1,000 replicas cost a gateway some 70 reads
    a second and not 1,000.

    Wall clocks, the gateway's and the replicas', may be hours off or jump: they are believed only of a record
    that was never seen to change. One that is being renewed is of a living replica whatever they say.
    """

    def __init__(self, store: Store, clock: Clock, *, long_gone: float = LONG_GONE) -> None:
        """``long_gone``: seconds after its expiry for which a record is still worth a probe."""
        self._store = store
        self._clock = clock
        self._long_gone = long_gone
        self._read: dict[str, _Record] = {}
        self._last: list[ReplicaAddress] = []

    async def replicas(self, doubted: Collection[str] = ()) -> Sequence[ReplicaAddress]:
        try:
            keys = [e.key for e in await self._store.list(PREFIX) if e.key.endswith(".json")]
            listed = frozenset(keys)
            now = self._clock.monotonic()
            kept = {
                key: record
                for key, record in self._read.items()
                if key in listed and now < record.again and record.address.id not in doubted
            }
            unread = [key for key in keys if key not in kept]
            found = await all_of([functools.partial(self._load, key) for key in unread], PARALLEL)
        except StoreError:
            return self._last
        self._read = kept | {key: read for key, read in zip(unread, found, strict=True) if read is not None}
        now = self._clock.monotonic()
        records = [self._read[key] for key in keys if key in self._read]
        self._last = [r.address for r in records if r.fresh is not None and now <= r.fresh + self._long_gone]
        return self._last

    async def _load(self, key: str) -> _Record | None:
        """What a record says; None if it names no replica."""
        try:
            data = (await self._store.load(key)).data
            record: Any = json.loads(data)
            expires, url = read_time(record["expires"], "expires"), record["address"]
            if not url.startswith(("http://", "https://")):
                return None
            wall, now, before = self._clock.time(), self._clock.monotonic(), self._read.get(key)
            # Both times are of the replica's own clock, so that their difference is right even if it is not.
            lifetime = min(max(expires - read_time(record.get("time", wall), "time"), 0.0), LONGEST_UNREAD)
            if before is None:
                fresh = now + min(expires - wall, lifetime) if wall <= expires + self._long_gone else None
            else:
                fresh = before.fresh if before.data == data else now + lifetime
            address = ReplicaAddress(str(record["id"]), url.rstrip("/"), record)
            return _Record(data, address, now + lifetime, fresh)
        except (NotFound, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            # A record is a hint: one that was withdrawn or cannot be read names no replica.
            return None

    async def close(self) -> None:
        await self._store.close()


class DnsPool:
    """The addresses of a name, each a replica: a Kubernetes headless service, or any round-robin name.

    While it cannot be resolved, those that were there last; a name without addresses has no replicas.
    """

    def __init__(self, host: str, port: int, resolve: Resolve | None = None) -> None:
        self._host, self._port = host, port
        self._resolve = resolve or _resolve
        self._last: list[ReplicaAddress] = []

    async def replicas(self, doubted: Collection[str] = ()) -> Sequence[ReplicaAddress]:
        try:
            async with asyncio.timeout(RESOLVE_SECONDS):
                found = await self._resolve(self._host, self._port)
        except socket.gaierror as error:
            if error.errno not in (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)):
                return self._last
            found = []
        except (OSError, TimeoutError):
            return self._last
        hosts = sorted({f"[{host}]" if ":" in host else host for host in found})
        self._last = [ReplicaAddress(f"{h}:{self._port}", f"http://{h}:{self._port}") for h in hosts]
        return self._last

    async def close(self) -> None:
        return


async def _resolve(host: str, port: int) -> list[str]:
    rows = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(row[4][0]) for row in rows]


def open_static(url: str, **options: Any) -> Pool:
    """``static:http://a:1,http://b:2``."""
    return StaticPool([part for part in url.removeprefix("static:").split(",") if part], **options)


def open_store(url: str, **options: Any) -> Pool:
    """``store:file:/dir``: the records in the store that the rest of the URL names."""
    return StorePool(open_store_url(url.removeprefix("store:")), SystemClock(), **options)


def open_dns(url: str, **options: Any) -> Pool:
    """``dns:replicas.namespace.svc.cluster.local:30100``. Raises ValueError."""
    host, _, port = url.removeprefix("dns:").rpartition(":")
    try:
        number = whole(port, least=1, most=2**16 - 1)
    except ValueError:
        number = 0
    if not number or not host or "/" in host:
        raise ValueError(
            f"{url!r} is not dns:NAME:PORT, such as dns:replicas.default.svc.cluster.local:30100"
        )
    return DnsPool(host, number, **options)
