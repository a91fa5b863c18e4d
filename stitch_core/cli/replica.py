"""``stitch replica``: one versioned rollout replica."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import secrets
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from .. import logs
from ..files import PosixFiles
from ..head import DEFAULT_CHANNEL
from ..host_checkpoint import HostCheckpoint
from ..ports import Store, SystemClock
from ..replica.activation import ActivationSettings
from ..replica.admission import Gate
from ..replica.anchoring import ReplicaAnchors
from ..replica.auth import Guard
from ..replica.engines import OpenedEngine, open_engine
from ..replica.fetching import FETCH_THREADS, Fetcher
from ..replica.metering import Metered, ReplicaMetrics
from ..replica.middleware import StitchMiddleware
from ..replica.outbox import STALL_SECONDS
from ..replica.probe import Probe
from ..replica.reconciler import Follow, Reconciler
from ..replica.server import listen, serve
from ..replica.service import Announcer, live
from ..scratch import temporary_directory
from ..stores.cache import DEFAULT_BYTES, DigestCache, opened_cache
from ..threads import Threads
from ..urls import is_http
from ..versions import check_run_id
from .common import (
    Commands,
    UsageError,
    absolute_path,
    add_base,
    add_command,
    add_store,
    add_tokens,
    check_lasting,
    check_name,
    emit,
    interval,
    key_values,
    opened_store,
    port,
    positive,
    say,
    seconds,
    stop_on_signals,
    tokens_of,
)


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands, "replica", run, "serve a run's newest version, and follow it",
        "Serve requests with an engine, and follow a run in the store: stage and verify each next version\n"
        "while serving, activate it in a short pause, say in every response which version made it.\n\n"
        "--engine embedded runs a small engine in this process, for tests and the local demo. --engine\n"
        "http://127.0.0.1:30001 puts this replica as a sidecar in front of a stock SGLang server that was\n"
        "started on the same --base checkpoint; clients then talk to the sidecar only. It pauses while\n"
        "SGLang loads a checkpoint; 'sglang serve' with the plugin only copies (SGLANG_FORK.md).\n\n"
        "  stitch replica --store file:/data/stitch --run my-run --base /models/base \\\n"
        "      --engine http://127.0.0.1:30001 --port 30100\n\n"
        "An empty store is waited for; stderr and /ready say why. SIGTERM leaves rotation, lets requests\n"
        "end, and exits.",
    )  # fmt: skip
    add_store(parser)
    add_base(parser)
    follow = parser.add_mutually_exclusive_group()
    follow.add_argument("--run", metavar="ID", dest="run_id", help="follow this run")
    follow.add_argument("--channel", metavar="NAME", help=f"follow this channel (default: {DEFAULT_CHANNEL})")
    parser.add_argument(
        "--engine", default="embedded", metavar="NAME|URL", help="embedded (default), or a server's URL"
    )
    parser.add_argument(
        "--engine-opt", action="append", default=[], metavar="KEY=VALUE",
        help="an engine option, of a server control_timeout=S (30) or update_timeout=S (540), its load of a "
        "version in the pause; repeatable",
    )  # fmt: skip
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    parser.add_argument(
        "--port", type=port, default=30100, help="port to listen on; 0 takes a free one (30100)"
    )
    parser.add_argument(
        "--address", metavar="URL", help="how others reach this replica, if not by host and port"
    )
    parser.add_argument(
        "--id", metavar="ID", help="this replica's name (default: host name and a random part)"
    )
    parser.add_argument(
        "--host-dir", type=absolute_path, metavar="DIR",
        help="where the host checkpoint lives; a tmpfs where it fits (default: a temporary directory)",
    )  # fmt: skip
    parser.add_argument(
        "--kv-mode", choices=("in_place", "retract"), default="in_place",
        help="at an activation keep the KV that running requests have computed (default), or recompute it",
    )  # fmt: skip
    parser.add_argument(
        "--no-probe", action="store_true",
        help="do not compare weights that come back (a rollback, a restart) with what they were",
    )  # fmt: skip
    parser.add_argument("--drain-all", action="store_true", help="let all requests end before an activation")
    parser.add_argument(
        "--poll", type=interval, default=5.0, metavar="S", help="seconds between looks at the store (5)"
    )
    add_tokens(parser)
    add_cache(parser)
    parser.add_argument(
        "--anchor-every", type=positive, metavar="K",
        help="upload a full beside the chain when the newest is K versions old; joiners start from it",
    )  # fmt: skip
    parser.add_argument(
        "--anchor-scratch", type=absolute_path, metavar="DIR",
        help="copy the checkpoint here before it is uploaded as a full, so that the next version does not "
        "end the upload; takes the model's size",
    )  # fmt: skip
    parser.add_argument(
        "--pin-drain", type=seconds, default=60.0, metavar="S",
        help="seconds that requests for an exact version may hold an activation up (60)",
    )  # fmt: skip
    parser.add_argument(
        "--switch-drain", type=seconds, default=600.0, metavar="S",
        help="seconds that requests may hold a switch to another run up (600)",
    )  # fmt: skip
    parser.add_argument(
        "--stall", type=interval, default=STALL_SECONDS, metavar="S",
        help="seconds for which a client may take nothing of its answer before it is given up (60)",
    )  # fmt: skip
    parser.add_argument(
        "--drain", type=seconds, default=60.0, metavar="S",
        help="seconds that requests get after SIGTERM (60)",
    )  # fmt: skip


def add_cache(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cache", type=absolute_path, metavar="DIR",
        help="keep fetched files here, by digest, for all replicas of this host that name this directory",
    )  # fmt: skip
    parser.add_argument(
        "--cache-bytes", type=positive, default=DEFAULT_BYTES, metavar="N",
        help=f"bytes that the cache may take ({DEFAULT_BYTES})",
    )  # fmt: skip


async def run(options: argparse.Namespace) -> int:
    replica_id = f"{socket.gethostname()[:60]}-{secrets.token_hex(3)}" if options.id is None else options.id
    check_name("--id", replica_id)
    follow = _follow(options)
    _check_address(options.address)
    _check_base(options.base)
    _make_directory("--host-dir", options.host_dir)
    _make_directory("--anchor-scratch", options.anchor_scratch)
    check_lasting(options.store)
    options.tokens = tokens_of(options)
    stop = stop_on_signals()
    temporary = contextlib.ExitStack()
    listener = listen(options.host, options.port)
    # One thread, so that the host checkpoint is let go of after the last call that changes it.
    blocking = Threads(1, "stitch-replica")
    fetching = Threads(FETCH_THREADS, "stitch-fetch")
    cache = opened_cache(options.cache, options.cache_bytes)
    try:
        opened = await open_engine(
            options.engine, options.base, key_values(options.engine_opt, "--engine-opt")
        )
        root = options.host_dir
        if root is None:
            root = temporary.enter_context(temporary_directory(PosixFiles(), options.base)) / "host"
            say(f"the host checkpoint is in {root} and ends with this process; keep one with --host-dir")
        host = HostCheckpoint(root, PosixFiles())
        try:
            await _serve(options, replica_id, follow, listener, opened, host, blocking, fetching, cache, stop)
        finally:
            await opened.close()
            await blocking(host.close)
    finally:
        if cache is not None:
            cache.close()
        fetching.close()
        blocking.close()
        listener.close()
        with contextlib.suppress(OSError):
            temporary.close()
    return 0


def _versions(gate: Gate, reconciler: Reconciler) -> dict[str, Any]:
    """For log lines."""
    serving = gate.serving
    return {
        "run": serving.run if serving else reconciler.follow.run,
        "version": serving.number if serving else None,
        "target": reconciler.status()["target"],
    }


def _follow(options: argparse.Namespace) -> Follow:
    if options.run_id is not None:
        return Follow(run=check_run_id(options.run_id))
    channel = DEFAULT_CHANNEL if options.channel is None else options.channel
    return Follow(channel=check_name("--channel", channel))


def _check_address(address: str | None) -> None:
    """Gateways pass over what is no URL, without a word here."""
    if address is None:
        return
    if not is_http(address) or not address.isascii():
        raise UsageError(f"--address {address!r} is not a URL such as http://10.0.0.7:30100")


def _check_base(base: Path) -> None:
    """A server that runs already may have booted from it long ago; this replica still has to read it."""
    if not base.is_dir():
        what = "is a file" if base.exists() else "no such directory"
        raise UsageError(f"--base {base}: {what}; name the checkpoint directory that the engine boots from")


def _make_directory(option: str, directory: Path | None) -> None:
    try:
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{option} {directory} cannot be a directory: {error.strerror}") from None


def _url(options: argparse.Namespace, listener: socket.socket) -> str:
    """How others reach this replica; an address that stands for all of this machine's is nobody's."""
    if options.address is not None:
        return str(options.address)
    host = socket.gethostname() if options.host in ("", "0.0.0.0", "::") else options.host
    return f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"


@contextlib.asynccontextmanager
async def _anchors(
    options: argparse.Namespace, replica_id: str, store: Store
) -> AsyncIterator[ReplicaAnchors | None]:
    if options.anchor_every is None:
        if options.anchor_scratch is not None:
            raise UsageError("--anchor-scratch is for --anchor-every")
        yield None
        return
    threads = Threads(2, "stitch-anchor")
    anchors = ReplicaAnchors.of(store, replica_id, options.anchor_every, options.anchor_scratch, threads)
    try:
        yield anchors
    finally:
        await anchors.close()
        threads.close()


async def _serve(
    options: argparse.Namespace,
    replica_id: str,
    follow: Follow,
    listener: socket.socket,
    opened: OpenedEngine,
    host: HostCheckpoint,
    blocking: Threads,
    fetching: Threads,
    cache: DigestCache | None,
    stop: asyncio.Event,
) -> None:
    clock = SystemClock()
    gate = Gate(clock)
    probe = None
    if not options.no_probe:
        probe = Probe.kept_in(host.root, opened.engine, clock, PosixFiles(), blocking, say)
    async with opened_store(options.store) as store, _anchors(options, replica_id, store) as anchors:
        reconciler = Reconciler(
            store, opened.engine, gate, host, follow, options.base, PosixFiles(), clock, random.Random(),
            blocking, ActivationSettings(
                options.kv_mode, options.drain_all, options.pin_drain, options.switch_drain
            ),
            poll=options.poll, say=say,
            fetcher=Fetcher(store, PosixFiles(), fetching, random.Random(), cache=cache, say=say),
            anchors=anchors, probe=probe,
        )  # fmt: skip
        gate.on_refused = reconciler.wake
        app = StitchMiddleware(
            opened.app, gate, status=lambda: {"id": replica_id, **reconciler.status()}, wake=reconciler.wake,
            mismatch=reconciler.mismatch, abort=opened.engine.abort, replica=replica_id,
            stall=options.stall,
            cache_key=opened.cache_key, kv_across="uniform" if options.kv_mode == "retract" else "mixed",
            vouch=opened.vouch,
        )  # fmt: skip
        logs.set_context(lambda: {"replica": replica_id, **_versions(gate, reconciler)})
        metrics = ReplicaMetrics(gate, clock, reconciler.status)
        metrics.follow(reconciler)
        guarded = Guard(Metered(app, metrics, clock), options.tokens)
        url = _url(options, listener)
        announcer = Announcer(store, reconciler, replica_id, url)
        emit({"id": replica_id, "url": url}, options.json, lambda: f"replica {replica_id} listens on {url}")
        await live(
            reconciler, announcer, stop, lambda end: serve(guarded, listener, end),
            gate=gate, clock=clock, drain=options.drain,
        )  # fmt: skip
