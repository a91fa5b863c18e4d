"""``stitch claim --adopt``: what the public reference has in a store becomes versions of a run.

Each version keeps its number. Its files are read from ``updates/`` of the same store, proven on the version
before it, and published; nothing of the reference is written. A run that was interrupted goes on where it
stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from pathlib import Path

from ..chain import ChainReader, NoHead
from ..checkpoint import Checkpoint
from ..files import PosixFiles
from ..legacy import LegacyPointer, legacy_pointer, legacy_versions
from ..manifest import Manifest
from ..ports import Entry, Store
from ..publisher import Publisher
from ..stores.sources import CHUNK
from .common import UsageError, say
from .publish import given_delta, given_full, is_delta_directory, rebuild

PRODUCER = "stitch claim --adopt"


async def check(store: Store, run: str) -> None:
    """Whether there is something to adopt into ``run``, asked before anybody is fenced. UsageError."""
    await _pointer(store)
    chain = ChainReader(store)
    with contextlib.suppress(NoHead):
        head, _ = await chain.head(run)
        newest = await chain.manifest(run, head)
        if newest.number and newest.producer.get("name") != PRODUCER:
            raise UsageError(
                f"--adopt: run {run} goes on from versions that were not adopted, at {newest.number}: adopt "
                "into a new run"
            )


async def _pointer(store: Store) -> LegacyPointer:
    """The pointer, if what it names is there. UsageError."""
    pointer = await legacy_pointer(store)
    if pointer is None or pointer.number is None:
        raise UsageError(f"--adopt: {pointer or 'the store has no pointer of the public reference'}")
    if pointer.number and pointer.number not in await legacy_versions(store):
        raise UsageError(f"--adopt: {pointer}; that is not there")
    return pointer


async def adopt(store: Store, publisher: Publisher, base: Path, work: Path) -> tuple[int, ...]:
    """Publish what is not in the run yet, up to what the pointer names in the end; their numbers.

    ``publisher`` has claimed, after ``check``. Raises UsageError, PublishError, StoreError, and what a
    version that cannot be proven raises: the versions before it are published then.
    """
    files, done = PosixFiles(), list[int]()
    while True:
        # Its trainer may still be moving it: what came meanwhile is adopted as well.
        pointer = await _pointer(store)
        there = await legacy_versions(store)
        wanted = [n for n in sorted(there) if publisher.head.number < n <= (pointer.number or 0)]
        if not wanted:
            return tuple(done)
        for number in wanted:
            say(f"adopting version {number}")
            directory = work / "adopted"
            await asyncio.to_thread(files.remove_tree, directory)
            await _fetch(store, there[number], directory, files)
            await _publish(store, publisher, number, directory, base, work, files)
            done.append(number)


async def _fetch(store: Store, entries: list[Entry], directory: Path, files: PosixFiles) -> None:
    files.make_dirs(directory)
    for entry in entries:
        path = directory / entry.key.rpartition("/")[2]
        files.write_new(path, b"")
        for at in range(0, entry.size, CHUNK):
            data = await store.read(entry.key, at, min(CHUNK, entry.size - at))
            await asyncio.to_thread(files.write_at, path, at, data)


async def _publish(
    store: Store,
    publisher: Publisher,
    number: int,
    directory: Path,
    base: Path,
    work: Path,
    files: PosixFiles,
) -> Manifest:
    options = argparse.Namespace(directory=directory, encoding=None, step=None)
    if is_delta_directory(directory, files):
        head = publisher.head
        with contextlib.closing(await rebuild(store, head, base, work / "host", files)) as host:
            payload = await asyncio.to_thread(given_delta, options, host, work, number - 1)
    else:
        boot = await asyncio.to_thread(lambda: Checkpoint.open(base, files).table())
        payload = await asyncio.to_thread(given_full, directory, boot, files, None)
    while (reserved := publisher.reserve()) < number:
        pass
    return await publisher.publish(payload, reserved)
