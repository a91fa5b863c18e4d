"""The gateway's HTTP face, and the coroutine that runs it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

from stitch_core.ports import Pool, Store
from stitch_core.replica.routes import BLOCKED
from stitch_core.replica.server import listen
from stitch_core.requests import Refused, json_object
from stitch_core.versions import Refusal, VersionError, check_run_id, unavailable

from .attempt import FAILURES, Attempt
from .call import parse_call
from .consumers import Consumers, check_consumer
from .dispatch import Dispatcher
from .facade import Facade
from .fleet import Fleet
from .head_view import HeadView
from .metrics import GatewayMetrics
from .routing import Replica

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
    is read every ``head_poll``; a facade that can read it allows none unless told. Raises VersionError.
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
    drain: float = 60.0
    max_body: int = 64 << 20
    max_response: int = 256 << 20

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
        head: HeadView | None = None,
    ) -> None:
        self.fleet = Fleet(pool, session, rng, interval=settings.poll, timeout=settings.probe_timeout)
        attempt = Attempt(self.fleet, session, connect=settings.connect, max_response=settings.max_response)
        self.dispatcher = Dispatcher(self.fleet, attempt, rng, settings.hold, settings.attempts)
        self._session = session
        self._settings = settings
        self._control = aiohttp.ClientTimeout(total=settings.control)
        lag = 0 if settings.lag is None and settings.facade and head is not None else settings.lag
        self.consumers = Consumers(settings.run, settings.consumer, lag, head)
        self.metrics = GatewayMetrics(self.dispatcher, self.consumers)
        self.facade = None
        if settings.facade:
            self.facade = Facade(
                self.consumers, self.dispatcher, everyone=self._fan_out, one=self._post,
                patience=settings.hold, engine=settings.engine,
            )  # fmt: skip

    def app(self) -> web.Application:
        """The aiohttp application."""
        middlewares = [self.metrics.middleware, _envelope]
        app = web.Application(client_max_size=self._settings.max_body, middlewares=middlewares)
        app.add_routes([web.post(path, self._generate) for path in GENERATE])
        anyones = ANYONES if self.facade else (*ANYONES, *ANYONES_WITHOUT_FACADE)
        app.add_routes([web.get(path, self._anyones) for path in anyones])
        if self.facade:
            app.add_routes(self.facade.routes())
        app.add_routes(
            [
                web.post("/abort_request", self._abort),
                web.post("/wake", self._wake),
                web.get("/health", self._health),
                web.get("/ready", self._ready),
                web.get("/status", self._status),
                web.get("/metrics", self.metrics.page),
            ]
        )
        return app

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        headers: dict[str, str] = {}
        for name, value in request.headers.items():
            key = name.lower()
            headers[key] = f"{headers[key]}, {value}" if key in headers else value
        body = await request.read()
        call = await parse_call(request.path, body, headers, self.consumers, self._settings.hold)
        return await self.dispatcher.run(request, call)

    async def _anyones(self, request: web.Request) -> web.StreamResponse:
        """What every replica answers alike."""
        for replica in sorted(self.fleet.replicas, key=lambda r: (not r.ready, not r.alive, r.load)):
            try:
                async with self._session.get(replica.url + request.path, timeout=self._control) as answer:
                    if answer.status == 200:
                        return web.Response(body=await answer.read(), content_type=answer.content_type)
            except FAILURES:
                continue
        raise Refused(unavailable("no replica answers", retry="here"))

    async def _abort(self, request: web.Request) -> web.Response:
        body = json_object(await request.read())
        rid = body.get("rid")
        if self.facade and body.get("abort_all") and not rid:
            return await self.facade.abort_all(request)
        if body.get("abort_all") or not isinstance(rid, str) or not rid:
            message = "abort_request needs the rid of one request: abort_all would reach everybody's"
            raise Refused(Refusal(403, "RouteBlocked", message, "never"))
        held = self.dispatcher.abort(rid)
        reached = await self._fan_out("/abort_request", {"rid": rid})
        return web.json_response({"held": held, "replicas": reached})

    async def _wake(self, request: web.Request) -> web.Response:
        return web.json_response({"replicas": await self._fan_out("/wake", {})}, status=202)

    async def _fan_out(self, path: str, body: dict[str, Any]) -> int:
        """POST to every replica; how many took it. Those that are gone have nothing to abort or to wake."""
        posts = [self._post(replica.url, path, body) for replica in self.fleet.replicas]
        return sum(await asyncio.gather(*posts))

    async def _post(self, url: str, path: str, body: dict[str, Any]) -> bool:
        try:
            async with self._session.post(url + path, json=body, timeout=self._control) as answer:
                return answer.status < 300
        except FAILURES:
            return False

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _ready(self, request: web.Request) -> web.Response:
        ready = sum(replica.ready for replica in self.fleet.replicas)
        return web.json_response({"ready": ready > 0, "replicas": ready}, status=200 if ready else 503)

    async def _status(self, request: web.Request) -> web.Response:
        replicas = self.fleet.replicas
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
            "head": _describe_head(self.consumers.head),
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
        "others": replica.others,
        "error": replica.error,
    }


def _describe_head(head: HeadView | None) -> dict[str, Any] | None:
    return None if head is None else {"number": head.number, "age": head.age, "error": head.error}


@web.middleware
async def _envelope(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Every answer of the gateway's own that is no success, in the one envelope."""
    try:
        return await handler(request)
    except Refused as error:
        refusal = error.refusal
    except web.HTTPRequestEntityTooLarge:
        refusal = Refusal(413, "PayloadTooLarge", "the request body is too large", "never")
    except web.RequestPayloadError:  # aiohttp's, while it reads: broken gzip, broken chunks
        refusal = Refusal(
            400, "InvalidRequest", "the request body does not decode as its headers say", "never"
        )
        answer = web.json_response(refusal.body(), status=400)
        answer.force_close()  # where the next request begins on this connection cannot be told
        return answer
    except web.HTTPMethodNotAllowed as error:
        refusal = Refusal(405, "MethodNotAllowed", f"{request.path} does not take {request.method}", "never")
        return web.json_response(refusal.body(), status=405, headers={"allow": error.headers["allow"]})
    except web.HTTPNotFound:
        if request.path.rstrip("/") in BLOCKED:
            refusal = Refusal(
                403, "RouteBlocked", f"{request.path} would bypass the replicas' gates", "never"
            )
        else:
            refusal = Refusal(404, "RouteUnknown", f"{request.path} is not served", "never")
    return web.json_response(refusal.body(), status=refusal.status, headers=refusal.headers())


@contextlib.asynccontextmanager
async def open_gateway(
    pool: Pool,
    settings: GatewaySettings | None = None,
    rng: random.Random | None = None,
    store: Store | None = None,
) -> AsyncIterator[Gateway]:
    """A gateway that follows its pool, and its run's head in ``store``. Both stay the caller's to close."""
    settings, rng = settings or GatewaySettings(), rng or random.Random()
    head = None
    if store is not None and settings.run is not None:
        clock = asyncio.get_running_loop().time
        head = HeadView(store, settings.run, rng, interval=settings.head_poll, clock=clock)
    if settings.lag is not None and head is None:
        raise VersionError("a lag needs the store that the head of the run is in")
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE)
    async with aiohttp.ClientSession(connector=connector, json_serialize=json.dumps) as session:
        gateway = Gateway(pool, session, settings, rng, head)
        following = [asyncio.create_task(gateway.fleet.run())]
        if head is not None:
            following.append(asyncio.create_task(head.follow()))
        try:
            yield gateway
        finally:
            for task in following:
                task.cancel()
            await asyncio.gather(*following, return_exceptions=True)
            if gateway.facade:
                await gateway.facade.close()


async def run_gateway(
    pool: Pool,
    host: str,
    port: int,
    *,
    store: Store | None = None,
    stop: asyncio.Event | None = None,
    on_ready: Callable[[int], None] | None = None,
    rng: random.Random | None = None,
    **options: Any,
) -> None:
    """Serve until ``stop`` is set or this is cancelled, then let requests end. Signals are the caller's.

    ``options`` are the fields of GatewaySettings. Port 0 takes a free one; ``on_ready`` is called with the
    port once connections are accepted. Raises PortInUse and VersionError.
    """
    settings = GatewaySettings(**options)
    listener = listen(host, port)
    try:
        async with open_gateway(pool, settings, rng, store) as gateway:
            # Cancellation of the handler is how a client's disconnect reaches the replica.
            runner = web.AppRunner(
                gateway.app(), handler_cancellation=True, access_log=None, shutdown_timeout=settings.drain
            )
            await runner.setup()
            try:
                await web.SockSite(runner, listener).start()
                if on_ready is not None:
                    on_ready(listener.getsockname()[1])
                await (stop or asyncio.Event()).wait()
            finally:
                await runner.cleanup()
    finally:
        listener.close()
