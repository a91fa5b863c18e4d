"""Moving payload files between a machine and a store, verified at both ends.

Sizes are bytes, digests ``sha256:<hex>``. Every function retries Unavailable by its policy, and raises it
when the policy is exhausted.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import itertools
import random
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar, cast

from ..ports import (
    AlreadyExists,
    Buffer,
    DigestingStore,
    Files,
    FileSource,
    NotFound,
    RunBlocking,
    Store,
    StoreError,
    Unavailable,
)
from ..retry import Retry, retrying
from .room import transfer_room
from .sources import CHUNK, source_size

T = TypeVar("T")

DEFAULT_RETRY = Retry()
_ONCE = Retry(attempts=1)

READ_AHEAD = 8
"""Chunks of one object that are read at a time."""


class DigestMismatch(StoreError):
    """An object's bytes, read twice in a row, are not the ones that were announced."""

    def __init__(self, key: str, expected: str, got: str) -> None:
        super().__init__(f"{key} is not what was announced: expected {expected}, got {got}")
        self.key, self.expected, self.got = key, expected, got


async def download(
    store: Store,
    key: str,
    files: Files,
    path: Path,
    size: int,
    sha256: str,
    *,
    chunk: int = CHUNK,
    run_blocking: RunBlocking = asyncio.to_thread,
    policy: Retry = DEFAULT_RETRY,
    rng: random.Random | None = None,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Fetch an object to ``path``, where there is never anything but the whole, verified, durable file.

    A file that is there already is kept if it is that file, else removed first. Whole chunks that an earlier
    download left in ``path.part`` are hashed and used. Wrong bytes are fetched anew, once: one bad read is no
    damage. ``progress`` gets the number of bytes of each step. Raises DigestMismatch, NotFound, Unavailable,
    and OSError of ``files``; after all but the first, ``path.part`` may be left.
    """
    part = path.with_name(path.name + ".part")
    report = progress or (lambda _: None)
    left = await _settled(run_blocking(_prepare, files, path, part, size, sha256, chunk))
    if left is None:
        report(size)
        return
    report(left.offset)
    for again in (True, False):
        chunks = _chunks(store, key, size, chunk, policy, rng, left.offset)
        try:
            await _fill(chunks, key, files, part, path, sha256, left, run_blocking, report)
            return
        except DigestMismatch:
            if not again:
                await _settled(run_blocking(files.remove, part))
                raise
        left = _Left()
        await _settled(run_blocking(_start, files, part))


async def upload(
    store: Store,
    key: str,
    source: Buffer | FileSource,
    sha256: str,
    *,
    chunk: int = CHUNK,
    run_blocking: RunBlocking = asyncio.to_thread,
    policy: Retry = DEFAULT_RETRY,
    rng: random.Random | None = None,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Create an object, or find these very bytes there: an unknown outcome is settled by reading back.

    ``progress`` gets the number of bytes of each step. Raises AlreadyExists only if there are other bytes
    under the key, and Unavailable; then these bytes may still appear there.
    """
    size, report = source_size(source), progress or (lambda _: None)
    told = 0

    async def attempt() -> None:
        nonlocal told
        done = 0

        def step(count: int) -> None:
            nonlocal told, done
            done += count
            if done > told:
                told, more = done, done - told
                report(more)

        announced = source
        if isinstance(source, FileSource):
            announced = replace(source, sha256=sha256, progress=step)
        try:
            await store.create(key, announced)
            step(size - done)
            return
        except (AlreadyExists, Unavailable) as error:
            outcome = error
        try:
            await verify(store, key, size, sha256, chunk=chunk, run_blocking=run_blocking, policy=_ONCE)
        except NotFound:
            raise Unavailable(f"{key} is not there after an unclear write: {outcome}") from outcome
        except DigestMismatch as error:
            raise AlreadyExists(f"{key} exists with other bytes: {error}") from error
        step(size - done)

    await retrying(attempt, policy, rng or random.Random())


async def verify(
    store: Store,
    key: str,
    size: int,
    sha256: str,
    *,
    chunk: int = CHUNK,
    run_blocking: RunBlocking = asyncio.to_thread,
    policy: Retry = DEFAULT_RETRY,
    rng: random.Random | None = None,
) -> None:
    """Compare an object with what it should be: by the digest that the store found itself, else by reading.

    Twice, if the first read gave something else: one bad read is no damage. Raises DigestMismatch, NotFound,
    Unavailable.
    """
    for again in (True, False):
        try:
            await _read_once(store, key, size, sha256, chunk, run_blocking, policy, rng)
            return
        except DigestMismatch:
            if not again:
                raise


async def _read_once(
    store: Store,
    key: str,
    size: int,
    sha256: str,
    chunk: int,
    run_blocking: RunBlocking,
    policy: Retry,
    rng: random.Random | None,
) -> None:
    if store.capabilities.digests:
        ask = functools.partial(cast(DigestingStore, store).digest, key)
        found, known = await retrying(ask, policy, rng or random.Random())
        if found != size:
            raise DigestMismatch(key, f"{size} bytes", f"{found} bytes")
        if known is not None:
            if known != sha256:
                raise DigestMismatch(key, sha256, known)
            return
    digest = hashlib.sha256()
    async with contextlib.aclosing(_chunks(store, key, size, chunk, policy, rng)) as chunks:
        async for data in chunks:
            await run_blocking(digest.update, data)
    _compare(key, sha256, digest)


def _pieces(size: int, chunk: int, start: int) -> Iterator[tuple[int, int]]:
    """Offset and length of each read. The last one asks for a byte more than there should be."""
    for offset in range(start, size, chunk):
        rest = size - offset
        yield offset, min(chunk, rest + 1)
    if (size - start) % chunk == 0:
        yield size, 1


async def _chunks(
    store: Store,
    key: str,
    size: int,
    chunk: int,
    policy: Retry,
    rng: random.Random | None,
    start: int = 0,
) -> AsyncGenerator[bytes, None]:
    """The bytes of an object from ``start`` on, in order, read ahead; DigestMismatch if it ends elsewhere.

    What is read and not yet consumed has room in the process's bound.
    """
    rng, room = rng or random.Random(), transfer_room()

    async def one(offset: int, length: int) -> tuple[bytes, int]:
        held = await room.acquire(length)
        try:
            data = await retrying(functools.partial(store.read, key, offset, length), policy, rng)
            if len(data) != min(length, size - offset):
                end = "more" if len(data) == length else offset + len(data)
                raise DigestMismatch(key, f"{size} bytes", f"{end} bytes")
        except BaseException:
            room.release(held)
            raise
        return data, held

    pieces = _pieces(size, chunk, start)
    ahead: deque[asyncio.Task[tuple[bytes, int]]] = deque()
    try:
        while True:
            for offset, length in itertools.islice(pieces, READ_AHEAD - len(ahead)):
                ahead.append(asyncio.ensure_future(one(offset, length)))
            if not ahead:
                return
            data, held = await ahead[0]
            ahead.popleft()
            try:
                if data:
                    yield data
            finally:
                room.release(held)
    finally:
        for task in ahead:
            task.cancel()
        for result in await asyncio.gather(*ahead, return_exceptions=True):
            if not isinstance(result, BaseException):
                room.release(result[1])


async def _fill(
    chunks: AsyncGenerator[bytes, None],
    key: str,
    files: Files,
    part: Path,
    path: Path,
    sha256: str,
    left: _Left,
    run_blocking: RunBlocking,
    report: Callable[[int], None],
) -> None:
    """Append to ``part`` and make it ``path`` if it is what was announced."""
    waiting: bytes | None = None
    async with contextlib.aclosing(chunks):
        async for data in chunks:
            if waiting is not None:
                await _settled(run_blocking(_append, files, part, left, waiting))
                report(len(waiting))
            waiting = data
        # One call for the last bytes and the end: small files are many.
        await _settled(run_blocking(_finish, files, part, path, left, waiting or b"", key, sha256))
        report(len(waiting or b""))


async def _settled(call: Awaitable[T]) -> T:
    """Await a call that cancelling does not stop; when cancelled, wait for its end before raising.

    A write that outlived its download could otherwise land in the file of the next one.
    """
    task = asyncio.ensure_future(call)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if not task.done():
            await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # marks it as seen: the caller gets the cancellation
        raise


def _compare(key: str, expected: str, digest: hashlib._Hash) -> None:
    got = "sha256:" + digest.hexdigest()
    if got != expected:
        raise DigestMismatch(key, expected, got)


# ------------------------------------------------------------------------------------ blocking, on files


@dataclass
class _Left:
    """The bytes of a ``.part`` that count, and their digest so far."""

    offset: int = 0
    digest: hashlib._Hash = field(default_factory=hashlib.sha256)


def _prepare(files: Files, path: Path, part: Path, size: int, sha256: str, chunk: int) -> _Left | None:
    """None if the wanted file is at ``path``; else there is nothing, and what is in ``part``."""
    files.make_dirs(path.parent)
    if files.exists(path):
        if files.size(path) == size and file_digest(files, path, size, chunk) == sha256:
            # Whoever put it there may have died before its own sync.
            files.sync(path)
            files.sync(path.parent)
            return None
        files.remove(path)
    left = _Left()
    try:
        there = files.size(part)
    except FileNotFoundError:
        there = 0
    if chunk <= there <= size:
        # A machine that died may have left anything there: the digest of the whole will tell.
        for start in range(0, there // chunk * chunk, chunk):
            left.digest.update(files.read(part, start, chunk))
            left.offset = start + chunk
    else:
        _start(files, part)
    return left


def _start(files: Files, part: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        files.remove(part)
    files.write_new(part, b"")


def file_digest(files: Files, path: Path, size: int, chunk: int = CHUNK) -> str:
    """``sha256:<hex>`` of a file's first ``size`` bytes, read in ``chunk`` pieces."""
    digest = hashlib.sha256()
    for start in range(0, size, chunk):
        digest.update(files.read(path, start, min(chunk, size - start)))
    return "sha256:" + digest.hexdigest()


def _append(files: Files, part: Path, left: _Left, data: bytes) -> None:
    files.write_at(part, left.offset, data)
    left.digest.update(data)
    left.offset += len(data)


def _finish(files: Files, part: Path, path: Path, left: _Left, data: bytes, key: str, sha256: str) -> None:
    if data:
        _append(files, part, left, data)
    _compare(key, sha256, left.digest)
    files.sync(part)
    files.rename(part, path)
    files.sync(path.parent)
