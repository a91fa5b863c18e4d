"""Reading a run: its head, and the manifests that hang on the head by digest. Nothing else is trusted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from .head import Channel, Head, channel_key, head_key
from .manifest import FormatError, Manifest, Row, floor_number, run_prefix
from .ports import NoStore, NotFound, Store
from .stores.reading import load_named

PARALLEL_READS = 16


class ChainBroken(FormatError):
    """A manifest that the head's chain names is not there, or is not what the chain says."""


class NoHead(Exception):
    """The run has no head: nobody has claimed it yet."""


class ChainReader:
    """Reads one store. Manifests are kept by digest, since they never change; owned by one event loop."""

    def __init__(self, store: Store, *, keep: int = 4096) -> None:
        self._store = store
        self._keep = keep
        self._cache: dict[str, Manifest] = {}

    async def channel(self, name: str) -> Channel:
        """What the channel says now. Raises NotFound, FormatError, Unavailable."""
        key = channel_key(name)
        return Channel.decode((await self._store.load(key)).data, key)

    async def head(self, run: str) -> tuple[Head, str]:
        """The head and the tag to swap it with. Raises NoHead, FormatError, Unavailable."""
        key = head_key(run)
        try:
            blob = await self._store.load(key)
        except NoStore as error:
            raise NoHead(f"run {run} has no head yet: {error}") from None
        except NotFound:
            raise NoHead(f"run {run} has no head yet: no trainer has claimed it") from None
        return Head.decode(blob.data, key), blob.tag

    async def manifest(self, run: str, reference: Head | Row) -> Manifest:
        """The manifest that a trusted head or row names. Raises ChainBroken, Unavailable."""
        key = run_prefix(run) + reference.key
        manifest = self._cache.get(reference.digest)
        if manifest is None:
            manifest = await self._read(run, key, reference.digest)
        if manifest.run != run or not _fits(manifest, reference):
            raise ChainBroken(
                f"{key}, as run {run} names it, is the manifest {manifest.key} of {manifest.version}"
            )
        return manifest

    async def _read(self, run: str, key: str, digest: str) -> Manifest:
        try:
            data, found = await load_named(self._store, key, digest)
        except NotFound:
            raise ChainBroken(f"{key} is named by the chain of run {run} and is not there") from None
        if found != digest:
            raise ChainBroken(f"{key} has digest {found}, the chain of run {run} names {digest}")
        manifest = Manifest.decode(data, key)
        if len(self._cache) >= self._keep:
            del self._cache[next(iter(self._cache))]
        self._cache[digest] = manifest
        return manifest

    async def boot(self, manifest: Manifest) -> Manifest:
        """The version 0 of a manifest's run."""
        return manifest if manifest.boot is None else await self.manifest(manifest.run, manifest.boot)

    async def back_to(
        self, newest: Manifest, states: Collection[str] = (), *, number: int = 0, above_floor: bool = True
    ) -> list[Manifest]:
        """``newest`` and what is before it, newest first, as far back as a plan can need.

        That is down to a version whose state is one of ``states``, to version ``number``, or (unless
        ``above_floor`` is off) to the floor of ``newest``, since below it nothing is needed to reach it.
        """
        lowest = max(number, newest.floor.number if newest.floor and above_floor else 0)
        if newest.floor is None and above_floor:
            lowest = max(lowest, newest.number)
        chain = [newest]
        while chain[-1].number > lowest and chain[-1].state not in states:
            rows: list[Row] = []
            for row in chain[-1].history:
                if row.number < lowest or len(rows) == PARALLEL_READS:
                    break
                rows.append(row)
                if row.state in states:
                    break
            if not rows:
                break
            chain += await asyncio.gather(*(self.manifest(newest.run, row) for row in rows))
        return chain

    async def rows(
        self, newest: Manifest, states: Collection[str] = (), *, number: int | None = None
    ) -> list[Row]:
        """The rows of ``newest`` and of what is before it, newest first: one manifest is read for 64 of them.

        At least down to a version whose state is one of ``states``, or to version ``number``, which is the
        floor of ``newest`` by default.
        """
        lowest = floor_number(newest) if number is None else number
        rows, at = [newest.row(), *newest.history], newest
        while at.history and rows[-1].number > lowest and not any(row.state in states for row in rows):
            at = await self.manifest(newest.run, at.history[-1])
            rows += at.history
        return rows

    async def find(self, newest: Manifest, wanted: Callable[[Row], bool]) -> Manifest | None:
        """The newest version on the chain of ``newest`` (itself included) that ``wanted`` accepts."""
        if wanted(newest.row()):
            return newest
        at = newest
        while at.history:
            for row in at.history:
                if wanted(row):
                    return await self.manifest(newest.run, row)
            at = await self.manifest(newest.run, at.history[-1])
        return None


def _fits(manifest: Manifest, reference: Head | Row) -> bool:
    """Whether a reference says of the manifest that its digest names what is true of it."""
    if isinstance(reference, Row):
        size = manifest.representation.bytes
        return reference == Row(manifest.number, manifest.key, reference.digest, manifest.state, size)
    return (reference.number, reference.key) == (manifest.number, manifest.key)
