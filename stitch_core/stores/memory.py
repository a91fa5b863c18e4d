"""A store in this process: for tests, for the simulator, and for fleets within one process."""

from __future__ import annotations

import builtins
import hashlib
import threading
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from ..ports import AlreadyExists, Blob, Buffer, Capabilities, Conflict, Entry, FileSource, NotFound
from .keys import check_key, check_prefix, check_range
from .sources import source_chunks


@dataclass
class MemoryObjects:
    """The objects of any number of MemoryStores; ``lock`` makes a step of one atomic for the others."""

    objects: dict[str, bytes] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


class MemoryStore:
    """A view of ``state``; without one, of an empty state of its own.

    Tags are content digests, the weakest that a store may have, so that code which needs more fails here.
    """

    def __init__(self, state: MemoryObjects | None = None) -> None:
        self.state = state or MemoryObjects()

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities()

    async def load(self, key: str) -> Blob:
        data = self._get(key)
        return Blob(data, _tag(data))

    async def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        check_range(start, length)
        data = self._get(key)
        return data[start:] if length is None else data[start : start + length]

    async def size(self, key: str) -> int:
        return len(self._get(key))

    async def create(self, key: str, source: Buffer | FileSource) -> None:
        check_key(key)
        data = b"".join(source_chunks(source))
        with self.state.lock:
            if key in self.state.objects:
                raise AlreadyExists(f"{key} exists")
            self.state.objects[key] = data

    async def swap(self, key: str, expected: str | None, data: bytes) -> str:
        check_key(key)
        with self.state.lock:
            current = self.state.objects.get(key)
            if expected != (None if current is None else _tag(current)):
                raise Conflict(f"{key} is not as it was read")
            self.state.objects[key] = bytes(data)
        return _tag(data)

    async def replace(self, key: str, data: bytes) -> None:
        check_key(key)
        with self.state.lock:
            self.state.objects[key] = bytes(data)

    async def list(self, prefix: str) -> list[Entry]:
        check_prefix(prefix)
        with self.state.lock:
            found = [(key, len(data)) for key, data in self.state.objects.items() if key.startswith(prefix)]
        return [Entry(key, size) for key, size in sorted(found)]

    async def folders(self, prefix: str) -> builtins.list[str]:
        """See BrowsableStore."""
        rests = [entry.key[len(prefix) :] for entry in await self.list(prefix)]
        return sorted({rest.partition("/")[0] for rest in rests if "/" in rest})

    async def delete(self, key: str) -> None:
        check_key(key)
        with self.state.lock:
            self.state.objects.pop(key, None)

    async def close(self) -> None:
        pass

    def _get(self, key: str) -> bytes:
        try:
            return self.state.objects[check_key(key)]
        except KeyError:
            raise NotFound(f"{key}: no such object") from None


def _tag(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


_shared: dict[str, MemoryObjects] = {}


def open_url(url: str) -> MemoryStore:
    """``memory://name``: every store of that name in this process has the same objects."""
    parts = urlsplit(url)
    return MemoryStore(_shared.setdefault(parts.netloc + parts.path, MemoryObjects()))
