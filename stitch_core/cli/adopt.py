"""``stitch claim --adopt``: what the public reference has in a store becomes versions of a run.

Each version keeps its number. Its files are read from ``updates/`` of the same store, proven on the version
before it, and published; nothing of the reference is written. The first is proven before the run is claimed.
A run that was interrupted goes on where it stopped.
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
from ..payload import Payload
from ..ports import Entry, Store
from ..publisher import Boot, Publisher
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


async def adopt(
    store: Store,
    publisher: Publisher,
    boot: Boot,
    base: Path,
    work: Path,
    *,
    saved: int | None,
    override: bool,
) -> tuple[int, ...]:
    """Claim the run after ``check``, and publish what is not in it yet, up to what the pointer names in the
    end; their numbers.

    Raises UsageError, PublishError, StoreError, and what a version that cannot be proven raises: the versions
    before it are published then, and without any nobody was fenced.
    """
    done = list[int]()
    head = await publisher.look(boot, saved=saved, override=override)
    wanted = await _wanted(store, head)
    first = await _prove(store, head, wanted[0], base, work) if wanted else None
    if first is not None:
        await publisher.check(first, head)
    newest = await publisher.claim(boot, saved=saved, override=override)
    if (newest.number, newest.state) != (head.number, head.state):
        first = None
    # Its trainer may still be moving the pointer: what came meanwhile is adopted as well.
    while wanted := await _wanted(store, publisher.head):
        for number, entries in wanted:
            payload = first or await _prove(store, publisher.head, (number, entries), base, work)
            first = None
            while (reserved := publisher.reserve()) < number:
                pass
            await publisher.publish(payload, reserved)
            done.append(number)
    return tuple(done)


async def _wanted(store: Store, head: Manifest) -> list[tuple[int, list[Entry]]]:
    """The versions after ``head`` that the pointer has passed, with their files, in order. UsageError."""
    pointer = await _pointer(store)
    there = await legacy_versions(store)
    return [(n, there[n]) for n in sorted(there) if head.number < n <= (pointer.number or 0)]


async def _fetch(store: Store, entries: list[Entry], directory: Path, files: PosixFiles) -> None:
    files.make_dirs(directory)
    for entry in entries:
        path = directory / entry.key.rpartition("/")[2]
        files.write_new(path, b"")
        for at in range(0, entry.size, CHUNK):
            data = await store.read(entry.key, at, min(CHUNK, entry.size - at))
            await asyncio.to_thread(files.write_at, path, at, data)


async def _prove(
    store: Store, head: Manifest, version: tuple[int, list[Entry]], base: Path, work: Path
) -> Payload:
    """The payload of a version of the reference, which is fetched and proven on ``head``."""
    files, directory, (number, entries) = PosixFiles(), work / "adopted", version
    say(f"adopting version {number}")
    await asyncio.to_thread(files.remove_tree, directory)
    await _fetch(store, entries, directory, files)
    if is_delta_directory(directory, files):
        options = argparse.Namespace(directory=directory, encoding=None, step=None)
        with contextlib.closing(await rebuild(store, head, base, work / "host", files)) as host:
            return await asyncio.to_thread(given_delta, options, host, work, number - 1)
    boot = await asyncio.to_thread(lambda: Checkpoint.open(base, files).table())
    return await asyncio.to_thread(given_full, directory, boot, files, None)
