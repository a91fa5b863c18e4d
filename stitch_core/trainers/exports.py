"""A framework's exported checkpoints become fulls of versions, where they are what a version is.

An export is often a step off, or of another dtype than the run's weights: nothing is taken on trust. It is
hashed, and only the version whose state it has gets it as a full. That version is mostly published after the
export was saved, so an export waits for the next few.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..anchors import Anchors
from ..checkpoint import Checkpoint, CheckpointError
from ..manifest import Manifest
from ..ports import Files, Store, StoreError, SystemClock
from ..records import RecordRefused
from ..retry import Retry
from ..stores.bounded import BoundedStore

KEEP = 3
STORE_SECONDS = 60.0

logger = logging.getLogger("stitch")


@dataclass
class _Export:
    directory: Path
    state: str
    left: int = KEEP


class Exports:
    """Used on rank 0. Hashes and uploads in a thread of its own; a failure costs only the anchor."""

    def __init__(
        self, open_store: Callable[[], Store], files: Files, policy: Retry, every: int | None = None
    ) -> None:
        """No I/O yet. ``every``: versions between two fulls, whoever uploads them; None takes each export."""
        self._open, self._files, self._policy = open_store, files, policy
        self._every = every or 1
        self._name = f"export-{secrets.token_hex(4)}"
        self._thread = ThreadPoolExecutor(1, "stitch-exports")
        self._waiting: list[_Export] = []
        self._published: list[Manifest] = []

    def saved(self, directory: Path) -> None:
        """An export lies in ``directory``, and nobody changes it any more."""
        self._thread.submit(self._quietly, self._hash, directory)

    def published(self, manifest: Manifest) -> None:
        """The head names this version now."""
        self._thread.submit(self._quietly, self._compare, manifest)

    def close(self) -> None:
        """Wait for what was begun."""
        self._thread.shutdown()

    # ---------------------------------------------------------------------------------- in the thread

    def _quietly(self, call: Callable[[Any], None], what: Any) -> None:
        try:
            call(what)
        except (CheckpointError, RecordRefused, StoreError, OSError) as error:
            logger.warning("an export did not become a full: %s", error)
        except Exception:
            logger.exception("an export did not become a full")

    def _hash(self, directory: Path) -> None:
        export = _Export(directory, Checkpoint.open(directory, self._files).state())
        for manifest in self._published:
            if manifest.state == export.state:
                self._upload(manifest, export)
                return
        self._waiting.append(export)

    def _compare(self, manifest: Manifest) -> None:
        self._published = [*self._published, manifest][-KEEP:]
        waiting, self._waiting = self._waiting, []
        for export in waiting:
            if export.state == manifest.state:
                self._upload(manifest, export)
                continue
            export.left -= 1
            if export.left:
                self._waiting.append(export)
            else:
                logger.info(
                    "the export in %s has state %s, which none of the last versions of run %s has: it is no "
                    "full of any (a tensor more or less, or another dtype, is enough)",
                    export.directory, export.state, manifest.run,
                )  # fmt: skip

    def _upload(self, manifest: Manifest, export: _Export) -> None:
        async def upload() -> None:
            store = BoundedStore(self._open(), STORE_SECONDS)
            anchors = Anchors(
                store, self._name, every=self._every, clock=SystemClock(), rng=random.Random(),
                run_blocking=asyncio.to_thread, policy=self._policy,
            )  # fmt: skip
            try:
                if not await anchors.due(manifest):
                    return
                done = await anchors.anchor(manifest, export.directory, self._files)
            finally:
                await store.close()
            if done.record is not None and done.new:
                logger.info(
                    "the export in %s is a full of %s now (%d bytes)", export.directory, manifest.version,
                    done.record.representation.bytes,
                )  # fmt: skip

        asyncio.run(upload())
