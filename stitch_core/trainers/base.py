"""What a trainer's next delta builds on, as a directory on every host that its snapshot can be taken from.

That is the boot checkpoint, as long as nothing below version 0 can be collected. Once the run's floor has
risen, deltas from version 0 are refused, and a version at or above the floor is checked out instead.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from ..checkout import CheckoutRefused, checkout
from ..manifest import Row
from ..ports import Files, Store, TrainerGroup
from ..state import state_digest
from .boot import Proven, prove_copies
from .group import RanksFailed, together
from .hosts import host_of
from .settings import TrainerSettings

PREFIX = "base-"


class BaseCheckout:
    """The base of a resumed trainer's deltas on this host. Every call is collective."""

    def __init__(
        self,
        settings: TrainerSettings,
        group: TrainerGroup,
        store: Store,
        files: Files,
        run: Callable[[Coroutine[Any, Any, Any]], Any],
    ) -> None:
        """``run`` carries out a coroutine and returns its result."""
        self._settings, self._group, self._store, self._files = settings, group, store, files
        self._run = run
        self._mine: Path | None = None

    def check_out(self, row: Row) -> Proven:
        """The version in a directory, as all ranks have hashed it. Raises RanksFailed."""
        settings, files = self._settings, self._files
        what = f"checking out version {row.number} of run {settings.run}, which the next delta builds on"

        def where() -> str:
            files.make_dirs(settings.work)
            return host_of(settings.work)

        hosts = together(self._group, what, where)
        mine = hosts[self._group.rank]
        # Hosts and runs may share the directory: each has a copy of its own in it all the same.
        tail = hashlib.sha256(f"{settings.run} {mine}".encode()).hexdigest()[:8]
        directory = settings.work / f"{PREFIX}{row.state.removeprefix('sha256:')[:16]}-{tail}"
        if hosts.index(mine) == self._group.rank:
            self._mine = directory

        def here() -> None:
            if self._mine is None:
                return
            for name in files.list(settings.work):
                old = name.startswith((PREFIX, f".{PREFIX}")) and f"-{tail}" in name
                if old and directory.name not in name:
                    files.remove_tree(settings.work / name)
            try:
                self._run(self._build(row, directory))
            except CheckoutRefused:
                if not files.exists(directory):
                    raise
                files.remove_tree(directory)  # a trainer that died left it, and it is not what it was
                self._run(self._build(row, directory))

        together(self._group, what, here)
        proven = prove_copies(directory, files, self._group)
        state = state_digest(proven.table)
        if state != row.state:  # every rank has the same table
            raise RanksFailed(f"{what}: {directory} has state {state}, expected {row.state}")
        return proven

    async def _build(self, row: Row, directory: Path) -> None:
        settings = self._settings
        await checkout(
            self._store, settings.run, row.number, directory, files=self._files, base=settings.boot
        )

    def release(self) -> None:
        """The snapshot is taken on every rank: remove what was checked out."""
        together(self._group, "taking the snapshot", lambda: None)
        if self._mine is not None:
            with contextlib.suppress(OSError):  # only room on a disk
                self._files.remove_tree(self._mine)
            self._mine = None
