"""Staging in a process of its own: the child, ``python -m stitch_core.replica.stage_worker``."""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import socket
from pathlib import Path
from typing import Any

from .. import logs
from ..chain import ChainReader
from ..digits import whole
from ..files import PosixFiles
from ..host_checkpoint import HostCheckpoint
from ..manifest import Manifest
from ..ports import FileMarks, SystemClock
from ..state import TensorInfo, TensorTable
from ..stores import open_store
from ..stores.bounded import BoundedStore
from ..stores.cache import DEFAULT_BYTES, DigestCache, opened_cache
from .anchoring import ReplicaAnchors
from .child import ask, niceness, obey, spare_workers, tell
from .fetching import Fetcher
from .room import free_room
from .staging import Stager

STORE_SECONDS = 60.0


def table_to_json(table: TensorTable) -> dict[str, Any]:
    return {name: [info.dtype, list(info.shape), info.digest] for name, info in table.items()}


def table_from_json(value: dict[str, Any]) -> TensorTable:
    return {name: TensorInfo(dtype, tuple(shape), digest) for name, (dtype, shape, digest) in value.items()}


def marks_to_json(marks: FileMarks) -> dict[str, Any]:
    return {name: list(numbers) for name, numbers in marks.items()}


def marks_from_json(value: dict[str, Any]) -> FileMarks:
    return {name: tuple(numbers) for name, numbers in value.items()}


async def serve(
    store_url: str,
    boot: Path,
    host_dir: Path,
    cache: DigestCache | None = None,
    anchor_every: int | None = None,
) -> None:
    """Answer the commands ``boot`` and ``stage``."""
    store = BoundedStore(open_store(store_url), STORE_SECONDS)
    fetcher = Fetcher(
        store, PosixFiles(), asyncio.to_thread, random.Random(), cache=cache,
        say=lambda text: logs.tell(f"stitch: {text}"),
    )  # fmt: skip
    anchors = None
    if anchor_every is not None:
        name = f"{socket.gethostname()}-{os.getpid()}"
        anchors = ReplicaAnchors.of(store, name, anchor_every, None, asyncio.to_thread)
    host = HostCheckpoint(host_dir, PosixFiles(), workers=spare_workers())
    stager = Stager(
        store, ChainReader(store), host, boot, files=PosixFiles(), clock=SystemClock(),
        rng=random.Random(), run_blocking=asyncio.to_thread,
        activity=lambda activity: tell(activity=activity, fetching=stager.fetching),
        fetcher=fetcher, anchors=anchors, room=free_room,
    )  # fmt: skip

    async def announce() -> None:
        await ask(activity="fetching", fetching=stager.fetching)

    async def answer(command: dict[str, Any]) -> dict[str, Any]:
        if command["do"] == "boot":
            boot = await stager.boot()
            return {"table": table_to_json(boot.table), "marks": marks_to_json(boot.marks)}
        target = Manifest.decode(command["manifest"].encode(), command["key"])
        staged = await stager.stage(target, announce)
        return {
            "bytes": staged.bytes,
            "fetch": staged.fetch,
            "apply": staged.apply,
            "directory": str(staged.directory),
            "table": table_to_json(staged.table),
        }

    await obey(answer)


def main() -> None:
    parser = argparse.ArgumentParser(prog="stitch_core.replica.stage_worker", description=__doc__)
    parser.add_argument("--store", required=True)
    parser.add_argument("--boot", required=True, type=Path)
    parser.add_argument("--host-dir", required=True, type=Path)
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--cache-bytes", type=whole, default=DEFAULT_BYTES)
    parser.add_argument("--anchor-every", type=whole)
    args = parser.parse_args()
    os.nice(niceness())
    cache = opened_cache(args.cache, args.cache_bytes)
    asyncio.run(serve(args.store, args.boot, args.host_dir, cache, args.anchor_every))


if __name__ == "__main__":
    main()
