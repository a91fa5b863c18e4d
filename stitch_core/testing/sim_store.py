"""One bucket, and its handle for each simulated process, with everything that happens to calls on a network.

A call travels to the bucket, takes effect there at one instant, and its answer travels back. Once sent it
belongs to nobody: it takes effect although its caller was cancelled, was told that it failed, or died.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from ..ports import (
    AlreadyExists,
    Blob,
    Buffer,
    Capabilities,
    Conflict,
    Entry,
    FileSource,
    NotFound,
    Stamp,
    StoreError,
    Unavailable,
    WriteRefused,
)
from ..stores.keys import check_key, check_prefix, check_range
from ..stores.sources import source_chunks
from .faults import Faults
from .loop import OUTSIDE, SimulatedLoop
from .process import SimulatedClock, SimulatedProcess

T = TypeVar("T")

Observer = Callable[[str, bytes | None, bytes | None, str], None]
"""Called with (key, old bytes, new bytes, name of the writer) at the instant when a write takes effect."""


class SimulatedBucket:
    """The objects. Visible to all at once; tags are content digests, the weakest that a store may have.

    ``on_call`` is told of every call that is sent: whose, what, and its key.
    """

    def __init__(self, loop: SimulatedLoop, faults: Faults) -> None:
        self.loop = loop
        self.faults = faults
        self.objects: dict[str, bytes] = {}
        self.written: dict[str, float] = {}
        self.clock = SimulatedClock(loop)
        self.observers: list[Observer] = []
        self.on_call: Callable[[SimulatedProcess, str, str], None] = lambda process, what, key: None

    def store(self, process: SimulatedProcess) -> SimulatedStore:
        """This bucket as ``process`` reaches it."""
        return SimulatedStore(self, process)

    def get(self, key: str) -> bytes:
        if key not in self.objects:
            raise NotFound(f"{key}: no such object")
        return self.objects[key]

    def put(self, key: str, data: bytes | None, who: str = "-") -> None:
        """Write or (None) delete, and tell the observers; what one of them raises ends the simulation."""
        old = self.objects.get(key)
        if data is None:
            self.objects.pop(key, None)
        else:
            self.objects[key] = data
            self.written[key] = self.loop.time()
        for observer in self.observers:
            try:
                observer(key, old, data, who)
            except Exception as error:
                self.loop.fail(error)

    def create(self, key: str, data: bytes, who: str) -> None:
        if key in self.objects:
            raise AlreadyExists(f"{key} exists")
        self.put(key, data, who)

    def swap(self, key: str, expected: str | None, data: bytes, who: str) -> str:
        current = self.objects.get(key)
        if expected != (None if current is None else _tag(current)):
            raise Conflict(f"{key} is not as it was read")
        self.put(key, data, who)
        return _tag(data)


class SimulatedStore:
    """A ports.Store over a SimulatedBucket."""

    def __init__(self, bucket: SimulatedBucket, process: SimulatedProcess) -> None:
        self._bucket = bucket
        self._process = process

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities()

    async def load(self, key: str) -> Blob:
        data = await self._call("load", key, partial(self._bucket.get, check_key(key)))
        return Blob(data, _tag(data))

    async def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        check_range(start, length)
        data = await self._call("read", key, partial(self._bucket.get, check_key(key)))
        part = data[start:] if length is None else data[start : start + length]
        return self._bucket.faults.as_read(part)

    async def size(self, key: str) -> int:
        return len(await self._call("size", key, partial(self._bucket.get, check_key(key))))

    async def stamp(self, key: str) -> Stamp:
        """As BrowsableStore.stamp: this bucket's clock is right, whatever those of hosts say."""

        def look() -> Stamp:
            self._bucket.get(key)
            now = self._bucket.clock.time()
            return Stamp(now - (self._bucket.loop.time() - self._bucket.written[key]), now)

        return await self._call("stamp", check_key(key), look)

    async def create(self, key: str, source: Buffer | FileSource) -> None:
        check_key(key)
        data = b"".join(source_chunks(source))
        await self._write("create", key, partial(self._bucket.create, key, data, self._process.name))

    async def swap(self, key: str, expected: str | None, data: bytes) -> str:
        check_key(key)
        effect = partial(self._bucket.swap, key, expected, bytes(data), self._process.name)
        return await self._write("swap", key, effect)

    async def replace(self, key: str, data: bytes) -> None:
        check_key(key)
        await self._write("replace", key, partial(self._bucket.put, key, bytes(data), self._process.name))

    async def list(self, prefix: str) -> list[Entry]:
        check_prefix(prefix)
        objects = self._bucket.objects

        def look() -> list[Entry]:
            return [Entry(key, len(objects[key])) for key in sorted(objects) if key.startswith(prefix)]

        return await self._call("list", prefix, look)

    async def delete(self, key: str) -> None:
        check_key(key)
        await self._write("delete", key, partial(self._bucket.put, key, None, self._process.name))

    async def close(self) -> None:
        pass

    # ------------------------------------------------------------------------------------ the network

    async def _call(self, what: str, key: str, effect: Callable[[], T]) -> T:
        """Send a call and wait for its answer; Unavailable if the plan of faults says so."""
        self._process.check()
        self._bucket.on_call(self._process, what, key)
        loop, faults = self._bucket.loop, self._bucket.faults
        answer: asyncio.Future[Any] = loop.create_future()
        if faults.cut_off(self._process.name) or faults.hit(faults.plan.store_lost):
            self._fail(answer, what, key, "did not arrive")
            return await answer
        heard = not faults.hit(faults.plan.store_unknown)

        def arrive() -> None:
            result, error = _outcome(effect)
            if heard:
                loop.call_later(faults.latency(), _answer, answer, result, error, context=OUTSIDE)

        loop.call_later(faults.latency(), arrive, context=OUTSIDE)
        if not heard:
            self._fail(answer, what, key, "was not answered")
        return await answer

    async def _write(self, what: str, key: str, effect: Callable[[], T]) -> T:
        self._process.check()
        loop, faults = self._bucket.loop, self._bucket.faults
        if faults.refused(self._process.name, what):
            self._bucket.on_call(self._process, what, key)
            await asyncio.sleep(faults.latency())
            raise WriteRefused(f"{what} {key}: not possible from here")

        def land_later(seconds: float) -> None:
            loop.call_later(seconds + faults.random.random() * faults.plan.late, land_late, context=OUTSIDE)

        def land_late() -> None:
            _, error = _outcome(effect)
            faults.trace.add(f"{self._process.name}: {what} {key} lands late: {error or 'done'}")

        def land() -> T:
            # A request that its sender's death cut short takes no effect.
            if self._process.dead and faults.random.random() < 0.5:
                raise Unavailable("cut short")
            if faults.hit(faults.plan.store_twice):
                land_later(0.0)
            return effect()

        if faults.hit(faults.plan.store_late):
            self._bucket.on_call(self._process, what, key)
            answer: asyncio.Future[Any] = loop.create_future()
            land_later(self._fail(answer, what, key, "is late"))
            return await answer
        return await self._call(what, key, land)

    def _fail(self, answer: asyncio.Future[Any], what: str, key: str, why: str) -> float:
        """Tell the caller, at once or when it has waited long enough, that there is no answer; when."""
        faults, loop = self._bucket.faults, self._bucket.loop
        seconds = faults.random.choice((faults.latency(), faults.plan.timeout * faults.random.random()))
        error = Unavailable(f"{what} {key} {why}")
        faults.trace.add(f"{self._process.name}: {error}")
        loop.call_later(seconds, _answer, answer, None, error, context=OUTSIDE)
        return seconds


def _outcome(effect: Callable[[], T]) -> tuple[T | None, StoreError | None]:
    try:
        return effect(), None
    except StoreError as error:
        return None, error


def _answer(answer: asyncio.Future[Any], result: Any, error: StoreError | None) -> None:
    if answer.done():
        return
    if error is None:
        answer.set_result(result)
    else:
        answer.set_exception(error)


def _tag(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
