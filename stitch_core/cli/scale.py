"""``stitch scale``: set how many replicas a pool runs, where the pool can."""

from __future__ import annotations

import argparse

from .. import plugins
from .common import Commands, UsageError, add_command, count, emit


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands, "scale", run, "set how many replicas a pool runs",
        "Set the number of replicas of a pool that starts them itself.\n\n"
        "  stitch scale modal_flash:my-app/Replica 16\n\n"
        "Modal: containers that are taken away leave rotation first and end what they have within their\n"
        "grace period; deploying the app again brings its own numbers back. Replicas of other pools are\n"
        "started by who runs them, such as 'kubectl scale', and are found by themselves.",
    )  # fmt: skip
    parser.add_argument("pool", metavar="POOL", help="the pool's URL, as for 'stitch gateway --pool'")
    parser.add_argument("count", type=count, metavar="N", help="replicas")


async def run(options: argparse.Namespace) -> int:
    kind = options.pool.partition(":")[0]
    pool = plugins.load("stitch.pools", kind)(options.pool)
    try:
        if not hasattr(pool, "scale"):
            raise UsageError(
                f"a {kind} pool starts no replicas: start and end them where they run (Kubernetes: kubectl "
                "scale); gateways find them by themselves"
            )
        done = await pool.scale(options.count)
    finally:
        await pool.close()
    emit({"pool": options.pool, "count": options.count, "set": done}, options.json, lambda: f"set {done}")
    return 0
