"""Anchors: every so many versions a full of one is uploaded beside the chain, without the trainer.

They come from a verified host checkpoint: a replica's own (replica/anchoring.py), or one that a job builds by
staging. Whoever is about to upload one asks first whether a full is there, and for a lease, so that one of
many does it. The lease is a hint: two that overlap cost bytes, and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .fulls import Damage, upload_full
from .manifest import Manifest, canonical_json, floor_number, run_prefix
from .ports import Clock, Conflict, Files, NotFound, RunBlocking, Store, StoreError, Unavailable, stamp_of
from .records import Record, list_records
from .retry import Retry

LEASE_FORMAT = "stitch.anchor-lease/1"
LEASE_SECONDS = 60.0


class Abandoned(OSError):
    """The files are about to change: whoever reads them must stop, and take nothing of it for whole."""


class GuardedFiles:
    """Reads of files that somebody else may have to change: after ``revoke`` every one of them fails.

    Writes pass through. ``revoke`` waits for the read that is under way, of a few megabytes at most.
    """

    def __init__(self, files: Files) -> None:
        self._files = files
        self._reading = threading.Lock()
        self._revoked = False

    def revoke(self) -> None:
        with self._reading:
            self._revoked = True

    def check(self) -> None:
        if self._revoked:
            raise Abandoned("the checkpoint moves on to another version")

    def read(self, path: Path, offset: int = 0, length: int | None = None) -> bytes:
        with self._reading:
            self.check()
            return self._files.read(path, offset, length)

    def read_into(self, path: Path, offset: int, out: memoryview) -> int:
        with self._reading:
            self.check()
            return self._files.read_into(path, offset, out)

    def size(self, path: Path) -> int:
        self.check()
        return self._files.size(path)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)


class Lease:
    """Who uploads a record of a ``kind`` just now: a small object that is swapped, and expires by itself.

    By the store's time, where that tells it: any host's clock may be wrong, or be set.
    """

    def __init__(self, store: Store, run: str, name: str, clock: Clock, *, kind: str = "fulls") -> None:
        self._store, self._name, self._clock = store, name, clock
        self._key = f"{run_prefix(run)}{kind}/lease"
        self._tag: str | None = None

    async def take(self) -> bool:
        """Whether this process may go on; False while another's lease lasts. Raises Unavailable."""
        now = self._clock.time()
        try:
            blob = await self._store.load(self._key)
        except NotFound:
            tag = None
        else:
            tag = blob.tag
            with contextlib.suppress(ValueError, TypeError, KeyError):
                lease = json.loads(blob.data)
                if lease["name"] != self._name and await self._lasts(float(lease["until"]), now):
                    return False
        return await self._swap(tag, now + LEASE_SECONDS)

    async def _lasts(self, until: float, now: float) -> bool:
        """Whether another's lease was not given back, and was renewed less than its time ago."""
        stamp = None
        if until > 0.0:
            with contextlib.suppress(NotFound):
                stamp = await stamp_of(self._store, self._key)
        if stamp is not None and stamp.age is not None:
            return stamp.age < LEASE_SECONDS
        # A clock that is far ahead of ours must not hold us up for long.
        return now < until < now + 10 * LEASE_SECONDS

    async def give_back(self) -> None:
        if self._tag is not None:
            with contextlib.suppress(StoreError):
                await self._swap(self._tag, 0.0)

    async def _swap(self, tag: str | None, until: float) -> bool:
        data = canonical_json({"format": LEASE_FORMAT, "name": self._name, "until": until})
        try:
            self._tag = await self._store.swap(self._key, tag, data)
        except Conflict:
            return False
        except Unavailable:
            raise
        except StoreError:
            return True  # a store that cannot compare and swap: then there is no lease
        return True

    @contextlib.asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """Renew it until the block ends."""

        async def renew() -> None:
            while True:
                await asyncio.sleep(LEASE_SECONDS / 3)
                with contextlib.suppress(StoreError):
                    await self.take()

        task = asyncio.ensure_future(renew())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await self.give_back()


@dataclass(frozen=True)
class Anchored:
    """What came of one attempt. ``record`` is None while somebody else uploads; ``new``: it was not there."""

    record: Record | None
    new: bool = False


class Anchors:
    """Decides when a full is due in a run, and uploads it. ``every``: versions between two fulls."""

    def __init__(
        self,
        store: Store,
        name: str,
        *,
        every: int,
        clock: Clock,
        rng: random.Random,
        run_blocking: RunBlocking,
        policy: Retry | None = None,
    ) -> None:
        """``name`` tells this process from others; ``run_blocking`` is busy for as long as hashing takes."""
        self.every = every
        self._store, self._name, self._clock, self._rng = store, name, clock, rng
        self._run_blocking, self._policy = run_blocking, policy
        self._newest: dict[str, int] = {}

    async def due(self, manifest: Manifest, damage: Damage | None = None) -> bool:
        """Whether a version is ``every`` or more after the newest full that is not known to be damaged.

        Lists only when it may be.
        """
        damaged = damage.problems if damage else {}
        newest = floor = floor_number(manifest)
        if not damaged:
            newest = max(floor, self._newest.get(manifest.run, 0))
        if damaged or manifest.number - newest >= self.every:
            places = await list_records(self._store, manifest.run, ("fulls",))
            places = [place for place in places if place.key is not None]
            sound = {place.number for place in places if place.digest not in damaged}
            lost = {place.number for place in places} - sound
            if manifest.floor is not None and manifest.floor.digest in damaged:
                lost.add(floor)
            newest = max(sound | ({floor, 0} - lost))
            self._newest[manifest.run] = newest
        return manifest.number - newest >= self.every

    async def anchor(
        self,
        manifest: Manifest,
        directory: Path,
        files: Files,
        *,
        check: Callable[[], None] = lambda: None,
        damage: Damage | None = None,
    ) -> Anchored:
        """Upload ``directory`` as a full of the version, unless one is there or another process is at it.

        ``check`` is asked before the record is written, and raises if the directory is not what it was.
        ``damage``: see fulls.upload_full.
        Raises RecordRefused, CheckpointError, StoreError, OSError.
        """
        lease = Lease(self._store, manifest.run, self._name, self._clock)
        if not await lease.take():
            return Anchored(None)
        async with lease.kept():
            record, new = await upload_full(
                self._store, manifest, directory, files, rng=self._rng, run_blocking=self._run_blocking,
                policy=self._policy, check=check, damage=damage,
            )  # fmt: skip
        self._newest[manifest.run] = max(manifest.number, self._newest.get(manifest.run, 0))
        return Anchored(record, new)
