"""Staging in a process of its own: the parent's end, for engines whose process must not share its GIL.

The child opens the store by its URL and owns the host checkpoint. If it dies, the next call starts another,
which proves by hashing what the copy holds.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..manifest import Manifest
from ..stores.cache import DEFAULT_BYTES
from .boot import BootCheckpoint
from .child import Child, CommandFailed
from .stage_worker import marks_from_json, table_from_json
from .staging import Announce, Staged, WrongBase, tell_nobody


class StagingFailed(Exception):
    """What the child says went wrong, or that it ended."""


class StagerProcess:
    """A Stager in a child process; see Stager. Owned by one task, except ``close``."""

    def __init__(
        self,
        store_url: str,
        boot: Path,
        host_dir: Path,
        *,
        activity: Callable[[str], None] = lambda text: None,
        cache: Path | None = None,
        cache_bytes: int = DEFAULT_BYTES,
        anchor_every: int | None = None,
    ) -> None:
        self.fetching: tuple[str, ...] = ()
        self._activity = activity
        arguments = ["--store", store_url, "--boot", str(boot), "--host-dir", str(host_dir)]
        if cache is not None:
            arguments += ["--cache", str(cache), "--cache-bytes", str(cache_bytes)]
        if anchor_every is not None:
            arguments += ["--anchor-every", str(anchor_every)]
        self._announce: Announce = tell_nobody
        self._child = Child(
            "stitch_core.replica.stage_worker", tuple(arguments), self._note, lambda: self._announce()
        )
        self._read: BootCheckpoint | None = None

    @property
    def pid(self) -> int | None:
        """The child, if there is one."""
        return self._child.pid

    async def boot(self) -> BootCheckpoint:
        """The boot checkpoint, read once. Raises StagingFailed."""
        if self._read is None:
            result = await self._call(do="boot")
            self._read = BootCheckpoint(table_from_json(result["table"]), marks_from_json(result["marks"]))
        return self._read

    async def stage(self, target: Manifest, announce: Announce = tell_nobody) -> Staged:
        """As Stager.stage; every failure is StagingFailed, except WrongBase."""
        self._announce = announce
        result = await self._call(do="stage", key=target.key, manifest=target.encode().decode())
        table, directory = table_from_json(result["table"]), Path(result["directory"])
        return Staged(result["bytes"], result["fetch"], result["apply"], directory, table)

    async def close(self) -> None:
        """End the child; closing twice is fine."""
        await self._child.close()

    async def _call(self, **command: Any) -> dict[str, Any]:
        try:
            result: dict[str, Any] = await self._child.call(**command)
            return result
        except CommandFailed as error:
            kind = WrongBase if error.kind == WrongBase.__name__ else StagingFailed
            raise kind(f"staging: {error}" if not error.kind else str(error)) from None
        finally:
            self.fetching = ()

    def _note(self, message: dict[str, Any]) -> None:
        self._activity(message["activity"])
        self.fetching = tuple(message["fetching"])
