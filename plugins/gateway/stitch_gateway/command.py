"""``stitch gateway``: one address for a fleet of replicas."""

from __future__ import annotations

import argparse

from stitch_core.cli.common import Commands, add_command, emit, opened_store, stop_on_signals
from stitch_core.ports import Pool, SystemClock
from stitch_core.versions import check_run_id


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands, "gateway", run, "route requests to replicas that serve the version they demand",
        "Send each request to a ready replica whose run and version it allows, the least loaded one. Where\n"
        "none has the version yet, hold the request until one has, or answer 409 after --hold seconds.\n\n"
        "Replicas are found in the store, where they announce themselves, or listed with --replica.",
    )  # fmt: skip
    pool = parser.add_mutually_exclusive_group(required=True)
    pool.add_argument("--store", metavar="URL", help="find replicas by their records in this store")
    pool.add_argument("--replica", action="append", metavar="URL", help="a replica's address; repeatable")
    parser.add_argument("--run", metavar="ID", dest="run_id", help="the run of requests that name none")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    parser.add_argument("--port", type=int, default=30000, help="port; 0 takes a free one (30000)")
    parser.add_argument(
        "--hold", type=float, default=50.0, metavar="S",
        help="seconds that a request waits for its version (50: below the idle limit of load balancers)",
    )  # fmt: skip
    parser.add_argument("--poll", type=float, default=0.25, metavar="S", help="between looks at replicas")


async def run(options: argparse.Namespace) -> int:
    from .pools import StaticPool, StorePool

    if options.run_id:
        check_run_id(options.run_id)
    if options.replica:
        await _serve(options, StaticPool(options.replica))
    else:
        async with opened_store(options.store) as store:
            await _serve(options, StorePool(store, SystemClock()))
    return 0


async def _serve(options: argparse.Namespace, pool: Pool) -> None:
    from .app import run_gateway  # aiohttp, which few commands need

    def ready(port: int) -> None:
        url = f"http://{options.host}:{port}"
        emit({"url": url}, options.json, lambda: f"gateway listens on {url}")

    await run_gateway(
        pool, options.host, options.port, run=options.run_id, hold=options.hold, poll=options.poll,
        on_ready=ready, stop=stop_on_signals(),
    )  # fmt: skip
