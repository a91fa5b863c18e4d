"""Staging in a process of its own: the parent's end, for engines whose process must not share its GIL.

The child opens the store by its URL and owns the host checkpoint. If it dies, the next call starts another,
which proves by hashing what the copy holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..manifest import Manifest
from ..state import TensorInfo, TensorTable
from .staging import Staged, WrongBase

LINE_BYTES = 1 << 30  # a table of every tensor is one line


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
    ) -> None:
        self.fetching: tuple[str, ...] = ()
        self._arguments = ("--store", store_url, "--boot", str(boot), "--host-dir", str(host_dir))
        self._activity = activity
        self._child: Process | None = None
        self._boot_table: TensorTable | None = None

    async def boot_table(self) -> TensorTable:
        """The tensors of the boot checkpoint, read once. Raises StagingFailed."""
        if self._boot_table is None:
            self._boot_table = _table((await self._call({"do": "boot_table"}))["table"])
        return self._boot_table

    async def stage(self, target: Manifest) -> Staged:
        """As Stager.stage; every failure is StagingFailed, except WrongBase."""
        manifest = {"key": target.key, "manifest": target.encode().decode()}
        result = await self._call({"do": "stage", **manifest})
        return Staged(
            result["bytes"],
            result["fetch"],
            result["apply"],
            Path(result["directory"]),
            _table(result["table"]),
        )

    async def close(self) -> None:
        """End the child; closing twice is fine."""
        child, self._child = self._child, None
        if child is not None:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()

    async def _call(self, command: dict[str, Any]) -> dict[str, Any]:
        if self._child is None:
            self._child = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "stitch_core.replica.stage_worker", *self._arguments,
                stdin=PIPE, stdout=PIPE, limit=LINE_BYTES,
            )  # fmt: skip
        try:
            return await self._converse(self._child, command)
        except (StagingFailed, WrongBase):
            raise
        except BaseException:
            # Half a conversation: the next answer would not be the next question's.
            await self.close()
            raise
        finally:
            self.fetching = ()

    async def _converse(self, child: Process, command: dict[str, Any]) -> dict[str, Any]:
        assert child.stdin is not None
        assert child.stdout is not None
        with contextlib.suppress(ConnectionError):  # a child that is gone shows at the read
            child.stdin.write(json.dumps(command).encode() + b"\n")
            await child.stdin.drain()
        while line := await child.stdout.readline():
            message = json.loads(line)
            if "activity" in message:
                self._activity(message["activity"])
                self.fetching = tuple(message["fetching"])
            elif "error" in message:
                raise (WrongBase if message["wrong_base"] else StagingFailed)(message["error"])
            else:
                result: dict[str, Any] = message["result"]
                return result
        self._child = None
        raise StagingFailed(f"the staging process ended with status {await child.wait()}")


def _table(value: dict[str, Any]) -> TensorTable:
    return {name: TensorInfo(dtype, tuple(shape), digest) for name, (dtype, shape, digest) in value.items()}
