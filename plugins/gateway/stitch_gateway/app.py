"""The gateway's HTTP face, and the coroutine that runs it."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import random
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from stitch_core.ports import Pool, Store
from stitch_core.replica.auth import Tokens
from stitch_core.replica.server import listen
from stitch_core.request_ids import Abort, check_consumer
from stitch_core.requests import Refused, json_object
from stitch_core.versions import VersionError, check_run_id, unavailable

from .attempt import FAILURES, Attempt, TooLarge, whole
from .auth import GatewayGuard
from .call import parse_call
from .connection import Runner
from .consumer_rules import RulesView
from .consumers import Consumers, Scope
from .dispatch import Dispatcher
from .facade import Facade
from .fleet import MOST_STATUS, Fleet
from .front import Router, envelope, path_of, read_body
from .head_view import Heads
from .metrics import GatewayMetrics
from .provenance import ProvenanceLog
from .reach import HEADER_FORWARDED, Reach
from .routing import Replica
from .watch import Watch

GENERATE = ("/generate", "/v1/completions", "/v1/chat/completions")
ANYONES = ("/v1/models",)
# A facade answers these itself: trainers ask before there is a replica.
ANYONES_WITHOUT_FACADE = ("/model_info", "/get_model_info")
# uvicorn closes a connection that was idle for 5 s; we must be the first, or a request meets the closing.
KEEP_ALIVE = 2.0


@dataclass(frozen=True)
class GatewaySettings:
    """Times in seconds, sizes in bytes. ``run`` and ``consumer``: of requests that name none.

    ``facade``: answer a stock trainer as one engine with its router, whose ``/server_info`` has the fields
    of ``engine``. ``lag``: versions by which an answer to the default consumer may be behind the head, which
    is read every ``head_poll``; a facade that can read it allows none unless told. ``leave``: for how long a
    gateway that is to end says so on ``/ready`` before it takes no more connections; ``drain``: how long
    requests may go on after that. ``provenance``: the directory of the log of what made which answer.
    ``tokens`` are those of who may ask, ``replica_token`` is what replicas want. Raises VersionError.
    """

    run: str | None = None
    consumer: str = "rollout"
    facade: bool = False
    engine: Mapping[str, Any] = field(default_factory=dict)
    lag: int | None = None
    head_poll: float = 0.5
    hold: float = 50.0
    attempts: int = 5
    poll: float = 0.25
    probe_timeout: float = 2.0
    connect: float = 5.0
    control: float = 5.0
    leave: float = 0.0
    drain: float = 60.0
    max_body: int = 64 << 20
    max_response: int = 256 << 20
    provenance: Path | None = None
    tokens: Tokens | None = None
    replica_token: Callable[[], str | None] = lambda: None

    def __post_init__(self) -> None:
        if self.run is not None:
            check_run_id(self.run)
        check_consumer(self.consumer)
        if self.run is None and (self.facade or self.lag is not None):
            raise VersionError("a facade and a lag are of one run: name it")


class Gateway:
    """Stateless: what it knows of replicas it can learn again, what it holds are open connections."""

    def __init__(
        self,
        pool: Pool,
        session: aiohttp.ClientSession,
        settings: GatewaySettings,
        rng: random.Random,
        heads: Heads | None = None,
        rules: RulesView | None = None,
        peers: Pool | None = None,
    ) -> None:
        """``peers``: the other gateways, which are told of aborts."""
        self.fleet = Fleet(pool, session, rng, interval=settings.poll, timeout=settings.probe_timeout)
        attempt = Attempt(self.fleet, session, connect=settings.connect, max_response=settings.max_response)
        self.dispatcher = Dispatcher(self.fleet, attempt, rng, settings.hold, settings.attempts)
        self._session = session
        self._settings = settings
        self._control = aiohttp.ClientTimeout(total=settings.control)
        lag = 0 if settings.lag is None and settings.facade and heads is not None else settings.lag
        self.consumers = Consumers(settings.run, settings.consumer, lag, heads, rules)
        self.reach = Reach(self.fleet, session, settings.control, peers)
        self.dispatcher.on_held = self.reach.wake
        self.metrics = GatewayMetrics(self.dispatcher, self.consumers)
        self.guard = GatewayGuard(session, settings.tokens, settings.replica_token)
        self.leaving = False
        self.facade = None
        if settings.facade:
            self.facade = Facade(
                self.consumers, self.dispatcher, self.reach, patience=settings.hold, engine=settings.engine
            )

    def app(self) -> web.Application:
        """The aiohttp application, for a ``Runner``: its connections leave bodies as they were sent."""
        middlewares = [self.metrics.middleware, self.guard.middleware, envelope]
        app = web.Application(client_max_size=self._settings.max_body, middlewares=middlewares)
        app.router.add_route("*", "/{path:.*}", Router(self.routes()).__call__)
        app.on_response_prepare.append(self._part)
        return app

    async def _part(self, request: web.BaseRequest, response: web.StreamResponse) -> None:
        """Clients of a gateway that leaves find another one with their next request."""
        if self.leaving:
            response.headers["connection"] = "close"
            response.force_close()

    def routes(self) -> list[web.RouteDef]:
        """What is served, by clean paths."""
        anyones = ANYONES if self.facade else (*ANYONES, *ANYONES_WITHOUT_FACADE)
        return [
            *(web.post(path, self._generate) for path in GENERATE),
            *(web.get(path, self._anyones) for path in anyones),
            *(self.facade.routes() if self.facade else ()),
            web.post("/abort_request", self._abort),
            web.post("/wake", self._wake),
            web.get("/health", self._health),
            web.get("/ready", self._ready),
            web.get("/status", self._status),
            web.get("/metrics", self.metrics.page),
        ]

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        headers: dict[str, str] = {}
        for name, value in request.headers.items():
            key = name.lower()
            headers[key] = f"{headers[key]}, {value}" if key in headers else value
        if self.guard.keeps_tokens:
            headers.pop("authorization", None)
        body = await read_body(request)
        call = await parse_call(path_of(request), body, headers, self.consumers, self._settings.hold)
        return await self.dispatcher.run(request, call)

    async def _anyones(self, request: web.Request) -> web.StreamResponse:
        """What every replica answers alike."""
        for replica in sorted(self.fleet.replicas, key=lambda r: (not r.ready, not r.alive, r.load)):
            try:
                async with self._session.get(
                    replica.url + path_of(request),
                    headers=replica.headers,
                    timeout=self._control,
                    allow_redirects=False,
                ) as answer:
                    if answer.status == 200:
                        body = await whole(answer, MOST_STATUS)
                        return web.Response(body=body, content_type=answer.content_type)
            except (*FAILURES, TooLarge):
                continue
        raise Refused(unavailable("no replica answers", retry="here"))

    async def _abort(self, request: web.Request) -> web.Response:
        body = json_object(await read_body(request))
        everybody = body.get("abort_all") is True
        if HEADER_FORWARDED in request.headers and everybody:
            return await self._abort_forwarded(body)
        if self.facade and everybody and not body.get("rid"):
            return await self.facade.abort_all(request)
        abort = self.consumers.abort(Abort.parse(body, request.headers))
        held, told = self.dispatcher.abort(abort), abort.body()
        reached, gateways = await asyncio.gather(
            self.reach.everyone("/abort_request", told),
            self.reach.other_gateways("/abort_request", told, request.headers),
        )
        return web.json_response({"held": held, "replicas": reached, "gateways": gateways})

    async def _abort_forwarded(self, body: dict[str, Any]) -> web.Response:
        """Another gateway has aborted all requests of one consumer, and told the replicas."""
        scope = Scope(str(body.get("run")), str(body.get("consumer")))
        calls = self.dispatcher.abort_scope(scope)
        if self.facade:
            self.facade.chase(calls)
        return web.json_response({"requests": len(calls)})

    async def _wake(self, request: web.Request) -> web.Response:
        return web.json_response({"replicas": await self.reach.wake_all()}, status=202)

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _ready(self, request: web.Request) -> web.Response:
        replicas = sum(replica.ready for replica in self.fleet.replicas)
        ready = replicas > 0 and not self.leaving
        status = {"ready": ready, "replicas": replicas, "leaving": self.leaving}
        return web.json_response(status, status=200 if ready else 503)

    async def _status(self, request: web.Request) -> web.Response:
        replicas, head, rules = self.fleet.replicas, self.consumers.head, self.consumers.view
        versions = {str(r.serving): 0 for r in replicas if r.serving}
        for replica in replicas:
            if replica.serving and replica.ready:
                versions[str(replica.serving)] += 1
        status = {
            "replicas": [_describe(replica) for replica in replicas],
            "versions": versions,
            "in_flight": sum(replica.in_flight for replica in replicas),
            "held": len(self.dispatcher.held),
            "counters": {**self.dispatcher.counters, "evictions": self.fleet.evictions},
            "pool_error": self.fleet.pool_error,
            "run": self._settings.run,
            "head": _describe_watch(head, number=head.number) if head else None,
            "consumers": _describe_watch(rules, count=len(rules.rules)) if rules else None,
        }
        return web.json_response(status)


def _describe(replica: Replica) -> dict[str, Any]:
    return {
        "id": replica.id,
        "url": replica.url,
        "alive": replica.alive,
        "ready": replica.ready,
        "run": replica.serving.run if replica.serving else None,
        "applied": replica.serving.number if replica.serving else None,
        "in_flight": replica.in_flight,
        "sequences": replica.sequences,
        "others": replica.others,
        "error": replica.error,
    }


def _describe_watch(watch: Watch, **said: Any) -> dict[str, Any]:
    return {**said, "age": watch.age, "error": watch.error}


@contextlib.asynccontextmanager
async def open_gateway(
    pool: Pool,
    settings: GatewaySettings | None = None,
    rng: random.Random | None = None,
    store: Store | None = None,
    peers: Pool | None = None,
) -> AsyncIterator[Gateway]:
    """A gateway that follows its pool, and in ``store`` what consumers get and runs' heads.

    Pools and store stay the caller's to close.
    """
    settings, rng = settings or GatewaySettings(), rng or random.Random()
    heads = rules = None
    if store is not None:
        clock = asyncio.get_running_loop().time
        heads = Heads(store, rng, interval=settings.head_poll, clock=clock, keep=settings.run)
        rules = RulesView(store, rng, interval=settings.head_poll, clock=clock)
    if settings.lag is not None and heads is None:
        raise VersionError("a lag needs the store that the head of the run is in")
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE, **_watched_sockets())
    session = aiohttp.ClientSession(
        connector=connector, auto_decompress=False, headers={"accept-encoding": "identity"},
        cookie_jar=aiohttp.DummyCookieJar(),  # what one client's replica sets is no other's
    )  # fmt: skip
    async with session:
        gateway = Gateway(pool, session, settings, rng, heads, rules, peers)
        log = gateway.dispatcher.attempt.log = _provenance(settings, heads)
        following = [asyncio.create_task(gateway.fleet.run())]
        if rules is not None:
            following.append(asyncio.create_task(rules.follow()))
        try:
            yield gateway
        finally:
            for task in following:
                task.cancel()
            await asyncio.gather(*following, return_exceptions=True)
            await gateway.reach.close()
            if gateway.facade:
                await gateway.facade.close()
            if heads is not None:
                await heads.close()
            if log is not None:
                await asyncio.to_thread(log.close)


def _provenance(settings: GatewaySettings, heads: Heads | None) -> ProvenanceLog | None:
    if settings.provenance is None:
        return None
    return ProvenanceLog(settings.provenance, head=lambda run: heads.of(run).number if heads else None)


def _watched_sockets() -> dict[str, Any]:
    """Options of a connector, so that a host that died without a word ends its connections within 25 s."""
    if "socket_factory" not in inspect.signature(aiohttp.TCPConnector).parameters:  # aiohttp before 3.12
        return {}

    def make(info: Any) -> socket.socket:
        made = socket.socket(info[0], info[1], info[2])
        made.setblocking(False)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, name):
                made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        return made

    return {"socket_factory": make}


async def run_gateway(
    pool: Pool,
    host: str,
    port: int,
    *,
    store: Store | None = None,
    peers: Pool | None = None,
    stop: asyncio.Event | None = None,
    on_ready: Callable[[int], None] | None = None,
    rng: random.Random | None = None,
    **options: Any,
) -> None:
    """Serve until ``stop`` is set or this is cancelled, leave rotation, let requests end. Signals are the
    caller's.

    ``options`` are the fields of GatewaySettings. Port 0 takes a free one; ``on_ready`` is called with the
    port once connections are accepted. Raises PortInUse and VersionError.
    """
    settings = GatewaySettings(**options)
    listener = listen(host, port)
    try:
        async with open_gateway(pool, settings, rng, store, peers) as gateway:
            runner = Runner(gateway.app(), shutdown_timeout=settings.drain)
            await runner.setup()
            try:
                await web.SockSite(runner, listener).start()
                if on_ready is not None:
                    on_ready(listener.getsockname()[1])
                await (stop or asyncio.Event()).wait()
                gateway.leaving = True
                await asyncio.sleep(settings.leave)
            finally:
                await runner.cleanup()
    finally:
        listener.close()
