"""Receiving in a process of its own, off SGLang's GIL: the child, ``python -m stitch_sglang.pull_worker``."""

from __future__ import annotations

import argparse
import asyncio
import os
from pathlib import Path
from typing import Any

from stitch_core.files import PosixFiles
from stitch_core.host_checkpoint import HostCheckpoint
from stitch_core.manifest import Manifest
from stitch_core.ports import SystemClock
from stitch_core.replica.child import niceness, obey, spare_workers, tell
from stitch_core.replica.progress import reported
from stitch_core.replica.stage_worker import marks_to_json, table_to_json

from .pull import Puller


async def serve(puller: Puller) -> None:
    """Answer the commands ``boot`` and ``pull``."""

    clock = SystemClock()

    def carry_out(command: dict[str, Any]) -> Manifest:
        puller.boot_state = command["boot_state"] or puller.boot_state
        if command["do"] == "boot":
            return puller.boot()
        return puller.pull(Path(command["source"]), command["target"])

    async def answer(command: dict[str, Any]) -> dict[str, Any]:
        what = "reading the boot checkpoint" if command["do"] == "boot" else "pulling"
        with reported(lambda activity: tell(activity=activity), what, clock) as puller.host.progress:
            manifest = await asyncio.to_thread(carry_out, command)
        return {
            "key": manifest.key,
            "manifest": manifest.encode().decode(),
            "directory": str(puller.host.directory),
            "table": table_to_json(puller.host.table),
            "boot_marks": marks_to_json(puller.boot_marks),
        }

    await obey(answer)


def main() -> None:
    parser = argparse.ArgumentParser(prog="stitch_sglang.pull_worker", description=__doc__)
    parser.add_argument("--name", required=True)
    parser.add_argument("--boot", required=True, type=Path)
    parser.add_argument("--host-dir", required=True, type=Path)
    parser.add_argument("--root", required=True, action="append", type=Path)
    args = parser.parse_args()
    os.nice(niceness())
    host = HostCheckpoint(args.host_dir, PosixFiles(), workers=spare_workers())
    asyncio.run(serve(Puller(args.name, host, args.boot, args.root)))


if __name__ == "__main__":
    main()
