"""Moving payload files between a machine and a store, verified at both ends.

Sizes are bytes, digests ``sha256:<hex>``. Every function retries Unavailable by its policy, and raises it
when the policy is exhausted.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import random
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from ..ports import (
    AlreadyExists,
    Buffer,
    Files,
    FileSource,
    NotFound,
    RunBlocking,
    Store,
    StoreError,
    Unavailable,
)
from ..retry import Retry, retrying
from .sources import CHUNK, source_size

T = TypeVar("T")

DEFAULT_RETRY = Retry()


class DigestMismatch(StoreError):
    """An object's bytes are not the ones that were announced. Fetching it again will not help."""

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

    A file that is there already is kept if it is that file, else removed first. ``progress`` gets the
    number of bytes of each step. Raises DigestMismatch, NotFound, Unavailable, and OSError of ``files``;
    after those, ``path.part`` may be left and the next download of it starts anew.
    """
    part = path.with_name(path.name + ".part")
    report = progress or (lambda _: None)
    if await _settled(run_blocking(_prepare, files, path, part, size, sha256, chunk)):
        report(size)
        return
    digest, offset = hashlib.sha256(), 0
    try:
        async with contextlib.aclosing(_chunks(store, key, size, chunk, policy, rng)) as chunks:
            async for data in chunks:
                await _settled(run_blocking(_append, files, part, offset, data, digest))
                offset += len(data)
                report(len(data))
        _compare(key, sha256, digest)
    except DigestMismatch:
        await _settled(run_blocking(files.remove, part))
        raise
    await _settled(run_blocking(_finish, files, part, path))


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
) -> None:
    """Create an object, or find these very bytes there: an unknown outcome is settled by reading back.

    Raises AlreadyExists only if there are other bytes under the key, and Unavailable; then these bytes
    may still appear there.
    """

    async def attempt() -> None:
        try:
            await store.create(key, source)
            return
        except (AlreadyExists, Unavailable) as error:
            outcome = error
        try:
            await _verify_once(store, key, source_size(source), sha256, chunk, run_blocking)
        except NotFound:
            raise Unavailable(f"{key} is not there after an unclear write: {outcome}") from outcome
        except DigestMismatch as error:
            raise AlreadyExists(f"{key} exists with other bytes: {error}") from error

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
    """Read an object back and compare it. Raises DigestMismatch, NotFound, Unavailable."""
    await _verify_once(store, key, size, sha256, chunk, run_blocking, policy, rng)


_ONCE = Retry(attempts=1)


async def _verify_once(
    store: Store,
    key: str,
    size: int,
    sha256: str,
    chunk: int,
    run_blocking: RunBlocking,
    policy: Retry = _ONCE,
    rng: random.Random | None = None,
) -> None:
    digest = hashlib.sha256()
    async with contextlib.aclosing(_chunks(store, key, size, chunk, policy, rng)) as chunks:
        async for data in chunks:
            await run_blocking(digest.update, data)
    _compare(key, sha256, digest)


async def _chunks(
    store: Store, key: str, size: int, chunk: int, policy: Retry, rng: random.Random | None
) -> AsyncGenerator[bytes, None]:
    """The ``size`` bytes of an object in order; DigestMismatch if it has fewer or more."""
    rng = rng or random.Random()
    found = await retrying(functools.partial(store.size, key), policy, rng)
    if found != size:
        raise DigestMismatch(key, f"{size} bytes", f"{found} bytes")
    offset = 0
    while offset < size:
        length = min(chunk, size - offset)
        data = await retrying(functools.partial(store.read, key, offset, length), policy, rng)
        if len(data) != length:
            raise DigestMismatch(key, f"{length} bytes at {offset}", f"{len(data)} bytes")
        yield data
        offset += length


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


def _prepare(files: Files, path: Path, part: Path, size: int, sha256: str, chunk: int) -> bool:
    """Whether the wanted file is at ``path``; if not, there is nothing, and ``part`` is empty."""
    files.make_dirs(path.parent)
    if files.exists(path):
        if files.size(path) == size and file_digest(files, path, size, chunk) == sha256:
            # Whoever put it there may have died before its own sync.
            files.sync(path)
            files.sync(path.parent)
            return True
        files.remove(path)
    if files.exists(part):
        files.remove(part)
    files.write_new(part, b"")
    return False


def file_digest(files: Files, path: Path, size: int, chunk: int = CHUNK) -> str:
    """``sha256:<hex>`` of a file's first ``size`` bytes, read in ``chunk`` pieces."""
    digest = hashlib.sha256()
    for start in range(0, size, chunk):
        digest.update(files.read(path, start, min(chunk, size - start)))
    return "sha256:" + digest.hexdigest()


def _append(files: Files, part: Path, offset: int, data: bytes, digest: hashlib._Hash) -> None:
    files.write_at(part, offset, data)
    digest.update(data)


def _finish(files: Files, part: Path, path: Path) -> None:
    files.sync(part)
    files.rename(part, path)
    files.sync(path.parent)
