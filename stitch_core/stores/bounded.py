"""A store whose every call ends: what takes too long is Unavailable, with the outcome unknown."""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import Awaitable
from typing import TypeVar, cast

from ..ports import (
    Blob,
    Buffer,
    Capabilities,
    DigestingStore,
    Entry,
    FileSource,
    Stamp,
    Store,
    Unavailable,
    room_of,
    stamp_of,
)
from .sources import source_size

T = TypeVar("T")


class BoundedStore:
    """Delegates to ``store``; a call has ``seconds``, and one more per ``slowest`` bytes that it moves."""

    def __init__(self, store: Store, seconds: float, *, slowest: float = 1e6) -> None:
        self._store, self._seconds, self._slowest = store, seconds, slowest

    @property
    def capabilities(self) -> Capabilities:
        return self._store.capabilities

    async def load(self, key: str) -> Blob:
        return await self._bounded(self._store.load(key), f"reading {key}")

    async def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        seconds = (length or 0) / self._slowest
        return await self._bounded(self._store.read(key, start, length), f"reading {key}", seconds)

    async def size(self, key: str) -> int:
        return await self._bounded(self._store.size(key), f"looking at {key}")

    async def create(self, key: str, source: Buffer | FileSource) -> None:
        seconds = source_size(source) / self._slowest
        await self._bounded(self._store.create(key, source), f"writing {key}", seconds)

    async def swap(self, key: str, expected: str | None, data: bytes) -> str:
        return await self._bounded(self._store.swap(key, expected, data), f"swapping {key}")

    async def replace(self, key: str, data: bytes) -> None:
        await self._bounded(self._store.replace(key, data), f"writing {key}")

    async def list(self, prefix: str) -> list[Entry]:
        return await self._bounded(self._store.list(prefix), f"listing {prefix}")

    async def delete(self, key: str) -> None:
        await self._bounded(self._store.delete(key), f"deleting {key}")

    async def digest(self, key: str) -> tuple[int, str | None]:
        """As DigestingStore.digest, where the capabilities say that the store is one."""
        return await self._bounded(cast(DigestingStore, self._store).digest(key), f"looking at {key}")

    async def folders(self, prefix: str) -> builtins.list[str] | None:
        """As BrowsableStore.folders; None where the store is none."""
        ask = getattr(self._store, "folders", None)
        return None if ask is None else await self._bounded(ask(prefix), f"listing {prefix}")

    async def stamp(self, key: str) -> Stamp | None:
        """As BrowsableStore.stamp; None where the store is none."""
        return await self._bounded(stamp_of(self._store, key), f"looking at {key}")

    async def room(self) -> int | None:
        """See ``room_of``."""
        return await self._bounded(room_of(self._store), "looking how much room there is")

    async def close(self) -> None:
        await self._store.close()

    async def _bounded(self, call: Awaitable[T], what: str, extra: float = 0.0) -> T:
        seconds = self._seconds + extra
        try:
            async with asyncio.timeout(seconds):
                return await call
        except TimeoutError:
            raise Unavailable(f"{what}: no answer from the store in {round(seconds, 3):g} s") from None
