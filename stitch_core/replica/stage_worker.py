"""Staging in a process of its own: the child, ``python -m stitch_core.replica.stage_worker``.

Commands come as JSON lines on stdin and are answered on stdout, one at a time; ``stage_process`` is the other
end. It exits when stdin ends: the host checkpoint stands any moment of that.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

from ..chain import ChainReader
from ..files import PosixFiles
from ..host_checkpoint import HostCheckpoint
from ..manifest import Manifest
from ..ports import SystemClock
from ..state import TensorTable
from ..stores import open_store
from ..stores.bounded import BoundedStore
from .staging import Stager, WrongBase

STORE_SECONDS = 60.0


def tell(**message: Any) -> None:
    """One line to the parent."""
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def table_to_json(table: TensorTable) -> dict[str, Any]:
    return {name: [info.dtype, list(info.shape), info.digest] for name, info in table.items()}


async def answer(stager: Stager, command: dict[str, Any]) -> dict[str, Any]:
    """Carry out one command."""
    if command["do"] == "boot_table":
        return {"table": table_to_json(await stager.boot_table())}
    target = Manifest.decode(command["manifest"].encode(), command["key"])
    staged = await stager.stage(target)
    return {
        "bytes": staged.bytes,
        "fetch": staged.fetch,
        "apply": staged.apply,
        "directory": str(staged.directory),
        "table": table_to_json(staged.table),
    }


async def serve(store_url: str, boot: Path, host_dir: Path) -> None:
    """Answer commands; never returns, since the end of stdin ends the process."""
    commands: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def read() -> None:
        for line in sys.stdin:
            loop.call_soon_threadsafe(commands.put_nowait, json.loads(line))
        os._exit(0)

    store = BoundedStore(open_store(store_url), STORE_SECONDS)
    stager = Stager(
        store, ChainReader(store), HostCheckpoint(host_dir, PosixFiles()), boot, files=PosixFiles(),
        clock=SystemClock(), rng=random.Random(), run_blocking=asyncio.to_thread,
        activity=lambda activity: tell(activity=activity, fetching=stager.fetching),
    )  # fmt: skip
    reading = loop.run_in_executor(None, read)
    while not reading.done():
        command = await commands.get()
        try:
            result = await answer(stager, command)
        except Exception as error:  # the parent decides what a failure means
            tell(error=str(error) or type(error).__name__, wrong_base=isinstance(error, WrongBase))
        else:
            tell(result=result)


def main() -> None:
    parser = argparse.ArgumentParser(prog="stitch_core.replica.stage_worker", description=__doc__)
    parser.add_argument("--store", required=True)
    parser.add_argument("--boot", required=True, type=Path)
    parser.add_argument("--host-dir", required=True, type=Path)
    args = parser.parse_args()
    # A signal to the process group is the parent's to act upon.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(serve(args.store, args.boot, args.host_dir))


if __name__ == "__main__":
    main()
