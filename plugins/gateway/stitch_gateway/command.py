"""``stitch gateway``: one address for a fleet of replicas."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
from typing import Any

from stitch_core import plugins
from stitch_core.cli.common import (
    Commands,
    UsageError,
    absolute_path,
    add_command,
    add_tokens,
    count,
    emit,
    interval,
    key_values,
    opened_store,
    port,
    say,
    seconds,
    stop_on_signals,
    tokens_of,
)
from stitch_core.hints import RECORDS
from stitch_core.ports import Pool, Store, StoreError, SystemClock
from stitch_core.replica.auth import REPLICA_VARIABLE, outgoing
from stitch_core.versions import check_run_id, request_scope


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands, "gateway", run, "route requests to replicas that serve the version they demand",
        "Send each request to a ready replica whose run and version it allows, the least loaded one. Where\n"
        "none has the version yet, hold the request until one has, or answer 409 after --hold seconds.\n\n"
        "Replicas are found in the store, where they announce themselves, in another --pool, or listed with\n"
        "--replica. SIGTERM: /ready says 503 for --leave seconds, then it takes no new\n"
        "connections, lets requests end for --drain seconds, and exits.\n\n"
        "  stitch gateway --store file:/data/stitch --port 30000\n\n"
        "With --facade it is to slime and Miles one external engine with its router: their updates succeed\n"
        "once the version is published, since replicas follow the store by themselves, and what they abort\n"
        "or count are the requests of their run and consumer only. docs/http.md has the routes.",
    )  # fmt: skip
    parser.add_argument(
        "--store", metavar="URL",
        help="the store: heads, consumers, and, with no other pool, replicas by their records in it",
    )  # fmt: skip
    pool = parser.add_mutually_exclusive_group()
    pool.add_argument("--replica", action="append", metavar="URL", help="a replica's address; repeatable")
    pool.add_argument(
        "--pool", metavar="POOL",
        help="where replicas are: dns:NAME:PORT (a Kubernetes headless service), modal_flash:APP/SERVER, "
        "store:URL, static:http://a:30100,http://b:30100",
    )  # fmt: skip
    parser.add_argument(
        "--peers", metavar="POOL",
        help="the other gateways, told of aborts of what they hold: static:http://a:30000,http://b:30000",
    )  # fmt: skip
    parser.add_argument("--run", metavar="ID", dest="run_id", help="the run of requests that name none")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    parser.add_argument("--port", type=port, default=30000, help="port; 0 takes a free one (30000)")
    parser.add_argument(
        "--hold", type=seconds, default=50.0, metavar="S",
        help="seconds that a request waits for its version (50: below the idle limit of load balancers)",
    )  # fmt: skip
    parser.add_argument(
        "--leave", type=seconds, default=5.0, metavar="S",
        help="seconds for which SIGTERM makes /ready say 503 before new connections are refused (5: until "
        "load balancers have looked)",
    )  # fmt: skip
    parser.add_argument(
        "--drain", type=seconds, default=60.0, metavar="S",
        help="seconds after that in which requests may end (60); what is left then is cut",
    )  # fmt: skip
    parser.add_argument(
        "--poll", type=interval, default=0.25, metavar="S", help="seconds between looks at replicas (0.25)"
    )
    parser.add_argument(
        "--consumer",
        default="rollout",
        metavar="NAME",
        help="the consumer of requests that name none (rollout)",
    )
    parser.add_argument(
        "--lag", type=count, metavar="N",
        help="versions by which an answer to that consumer may be behind the head, where its request says "
        "nothing; needs --store and --run (with --facade: 0, for a synchronous loop)",
    )  # fmt: skip
    parser.add_argument(
        "--head-poll", type=interval, default=0.5, metavar="S", help="seconds between looks at the head (0.5)"
    )
    parser.add_argument(
        "--provenance", type=absolute_path, metavar="DIR",
        help="log there which versions made each answer, in files of 64 MiB of which 64 are kept for a host; "
        "'stitch provenance' reads them",
    )  # fmt: skip
    add_tokens(parser)
    parser.add_argument(
        "--replica-token-file", type=absolute_path, metavar="FILE",
        help=f"the token that replicas want; read again when it changes (or {REPLICA_VARIABLE})",
    )  # fmt: skip
    parser.add_argument(
        "--facade",
        action="store_true",
        help="answer a stock trainer as one engine with its router; needs --run",
    )
    parser.add_argument(
        "--engine", action="append", default=[], metavar="KEY=JSON",
        help="with --facade: a field of /server_info that the trainer compares, such as base_gpu_id=8; "
        "repeatable",
    )  # fmt: skip


async def run(options: argparse.Namespace) -> int:
    from .pools import StaticPool, StorePool

    options.tokens = tokens_of(options)
    options.replica_token = outgoing(options.replica_token_file)
    if options.run_id is not None:
        check_run_id(options.run_id)
    for option in ("store", "pool"):
        if getattr(options, option) == "":
            raise UsageError(f"--{option} is empty")
    request_scope("run", options.consumer)
    if options.run_id is None and (options.facade or options.lag is not None):
        raise UsageError("--facade and --lag are of one run: name it with --run")
    if options.engine and not options.facade:
        raise UsageError("--engine describes the engine of a facade: add --facade")
    if options.lag is not None and not options.store:
        raise UsageError("--lag needs --store, where the head of the run is")
    if not (options.store or options.replica or options.pool):
        raise UsageError("where are the replicas? Give --store, --pool or --replica")
    async with contextlib.AsyncExitStack() as stack:
        store = await stack.enter_async_context(opened_store(options.store)) if options.store else None
        if store is not None:
            looking = asyncio.create_task(_tell_if_away(store))
            stack.callback(looking.cancel)
        if options.pool:
            pool = _opened_pool(options.pool)
            stack.push_async_callback(pool.close)
        elif options.replica:
            pool = StaticPool(options.replica)
        else:
            assert store is not None
            pool = StorePool(store, SystemClock())
        await _serve(options, pool, store)
    return 0


async def _tell_if_away(store: Store) -> None:
    """A store that is away is waited for; one that was mistyped would be for good, without a word."""
    try:
        await store.list(RECORDS)
    except StoreError as error:
        say(f"the store cannot be read, and is tried again: {error}")


async def _serve(options: argparse.Namespace, pool: Pool, store: Store | None) -> None:
    from .app import run_gateway  # aiohttp, which few commands need

    def ready(port: int) -> None:
        url = f"http://{options.host}:{port}"
        emit({"url": url}, options.json, lambda: f"gateway listens on {url}")

    peers = _opened_pool(options.peers) if options.peers else None
    await run_gateway(
        pool, options.host, options.port, run=options.run_id, hold=options.hold, poll=options.poll,
        consumer=options.consumer, lag=options.lag, head_poll=options.head_poll, facade=options.facade,
        engine=_engine_fields(options.engine), store=store, peers=peers, on_ready=ready,
        stop=stop_on_signals(), leave=options.leave, drain=options.drain,
        provenance=options.provenance, tokens=options.tokens, replica_token=options.replica_token,
    )  # fmt: skip


def _opened_pool(url: str) -> Pool:
    """The pool at an URL. Raises PluginMissing and ValueError."""
    pool: Pool = plugins.load("stitch.pools", url.partition(":")[0])(url)
    return pool


def _engine_fields(pairs: list[str]) -> dict[str, Any]:
    """``KEY=JSON`` options; what is no JSON is text. Raises UsageError."""
    fields: dict[str, Any] = {}
    for key, text in key_values(pairs, "--engine").items():
        try:
            fields[key] = json.loads(text)
        except ValueError:
            fields[key] = text
    return fields
