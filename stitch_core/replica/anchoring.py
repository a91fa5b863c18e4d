"""Fulls from a replica's own host checkpoint, uploaded while it serves."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Self, cast

from ..anchors import Abandoned, Anchors, GuardedFiles
from ..files import PosixFiles
from ..fulls import Damage
from ..host_data import copy_files
from ..manifest import Manifest
from ..ports import Files, RunBlocking, Store, SystemClock

logger = logging.getLogger("stitch")


class ReplicaAnchors:
    """Uploads the version that was staged last, when a full is due. Owned by the stager's task.

    The next version never waits for it, but for one read of a few megabytes: deltas are applied in place, so
    an upload that still reads the checkpoint is given up, and tried again ``anchors.every`` versions later.
    With ``scratch``, a directory with room for the model, only the copy to there can be given up.
    """

    def __init__(
        self,
        anchors: Anchors,
        *,
        files: Files,
        run_blocking: RunBlocking,
        scratch: Path | None = None,
        say: Callable[[str], None] = logger.info,
    ) -> None:
        """``run_blocking`` must not be the stager's, which would wait for it."""
        self._anchors, self._files, self._run_blocking = anchors, files, run_blocking
        self._scratch, self._say = scratch, say
        self._task: asyncio.Task[None] | None = None
        self._guard: GuardedFiles | None = None
        self._not_before: dict[str, int] = {}

    def staged(self, manifest: Manifest, directory: Path, damaged: Collection[str] = ()) -> None:
        """The host checkpoint holds this version now, in ``directory``.

        ``damaged``: digests of what this process found damaged in the store; a full among them is none.
        """
        if self._task is not None and not self._task.done():
            return
        if manifest.number < self._not_before.get(manifest.run, 0):
            return
        self._guard = GuardedFiles(self._files)
        self._task = asyncio.ensure_future(self._anchor(manifest, directory, self._guard, damaged))

    async def make_way(self) -> None:
        """The host checkpoint is about to change: afterwards nobody reads it any more."""
        if self._guard is not None:
            await self._run_blocking(self._guard.revoke)
            self._guard = None
            if self._task is not None:
                self._task.cancel()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    @classmethod
    def of(cls, store: Store, name: str, every: int, scratch: Path | None, blocking: RunBlocking) -> Self:
        """One for this machine; ``blocking`` runs on threads of its own."""
        anchors = Anchors(
            store, name, every=every, clock=SystemClock(), rng=random.Random(), run_blocking=blocking
        )
        return cls(anchors, files=PosixFiles(), run_blocking=blocking, scratch=scratch)

    async def _anchor(
        self, manifest: Manifest, directory: Path, guard: GuardedFiles, damaged: Collection[str]
    ) -> None:
        """Never raises: a full that was not uploaded is somebody else's, or a later version's."""
        damage = Damage(self._say, dict.fromkeys(damaged, "damaged"))
        try:
            if not await self._anchors.due(manifest, damage):
                return
            self._not_before[manifest.run] = manifest.number + self._anchors.every
            async with contextlib.AsyncExitStack() as stack:
                files, check = cast(Files, guard), guard.check
                if self._scratch is not None:
                    directory = await self._copy(directory, guard, stack)
                    files, check = self._files, lambda: None
                done = await self._anchors.anchor(manifest, directory, files, check=check, damage=damage)
            if done.new and done.record is not None:
                self._say(f"uploaded a full of {manifest.version}, {done.record.representation.bytes} bytes")
        except asyncio.CancelledError:
            self._say(f"no full of {manifest.version} was uploaded: the host checkpoint moved on")
            raise
        except Exception as error:  # whatever it is, the replica serves on
            self._say(f"no full of {manifest.version} was uploaded: {error}")

    async def _copy(self, directory: Path, guard: GuardedFiles, stack: contextlib.AsyncExitStack) -> Path:
        """A copy that nobody changes, until the stack ends; from then on nothing is given up any more."""
        assert self._scratch is not None
        copy = self._scratch / "anchor"

        def make() -> None:
            self._files.remove_tree(copy)
            names = self._files.list(directory)
            size = sum(self._files.size(directory / name) for name in names)
            self._files.make_dirs(copy)
            if self._files.free_bytes(copy) < size:
                raise OSError(f"{copy} has no room for {size} bytes")
            copy_files(cast(Files, guard), directory, copy, names)

        stack.push_async_callback(self._run_blocking, self._files.remove_tree, copy)
        await self._run_blocking(make)
        guard.check()
        if self._guard is guard:
            self._guard = None
        else:
            raise Abandoned("the checkpoint moved on while it was copied")
        return copy
