"""What the gateway counts: requests, holding, replicas, and how stale answers are."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator

from aiohttp import web

from stitch_core.metrics import CONTENT_TYPE, VERSIONS, Labels, Registry
from stitch_core.replica.asgi import clean_path
from stitch_core.replica.routes import BLOCKED, ROUTES
from stitch_core.versions import HEADER_CONSUMER

from .consumers import Consumers
from .dispatch import Dispatcher
from .fleet import admitted_version

PATHS = frozenset((*ROUTES, *BLOCKED, "/status", "/workers", "/list_workers", "/add_worker"))
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class GatewayMetrics:
    """Of one gateway; paths that are no route of an engine or a gateway are counted together."""

    def __init__(self, dispatcher: Dispatcher, consumers: Consumers) -> None:
        self.registry = r = Registry()
        self._dispatcher, self._consumers = dispatcher, consumers
        self._requests = r.counter(
            "stitch_gateway_requests_total", "Answers by route and status.", ("route", "code")
        )
        self._seconds = r.histogram(
            "stitch_gateway_request_seconds", "From the request's head to the answer's end.", ("route",)
        )
        self._held = r.histogram(
            "stitch_gateway_held_seconds", "Time that a request waited for a replica before each try."
        )
        self._staleness = r.histogram(
            "stitch_gateway_staleness_versions",
            "By how many versions the one that admitted a request was behind the head when the answer ended.",
            ("run", "consumer"), VERSIONS,
        )  # fmt: skip
        gauge, fleet = r.gauge, dispatcher.fleet
        gauge("stitch_gateway_held_requests", "Held now.", read=lambda: [((), len(dispatcher.held))])
        gauge(
            "stitch_gateway_running_requests", "At replicas now.",
            read=lambda: [((), len(dispatcher.calls) - len(dispatcher.held))],
        )  # fmt: skip
        gauge("stitch_gateway_replicas", "Replicas by state.", ("state",), self._replicas)
        gauge("stitch_gateway_served_version", "Of ready replicas.", ("run", "which"), self._served)
        gauge("stitch_gateway_head_version", "As last read.", ("run",), self._head)
        gauge("stitch_gateway_head_age_seconds", "Since the store last said it.", ("run",), self._head_age)
        gauge(
            "stitch_gateway_pool_failed", "1 while replicas cannot be looked up.",
            read=lambda: [((), fleet.pool_error is not None)],
        )  # fmt: skip
        gauge(
            "stitch_gateway_tries_failed_total", "Tries that were made again elsewhere.", ("reason",),
            lambda: [((reason,), dispatcher.counters[reason]) for reason in ("failures", "refusals")],
            "counter",
        )  # fmt: skip
        gauge(
            "stitch_gateway_evictions_total", "Replicas taken out of rotation by what happened to a request.",
            read=lambda: [((), fleet.evictions)], kind="counter",
        )  # fmt: skip
        gauge(
            "stitch_gateway_provenance_answers_total", "Answers in the provenance log, and not in it.",
            ("outcome",), self._logged, "counter",
        )  # fmt: skip
        dispatcher.on_acquired = self._held.observe

    async def page(self, request: web.Request) -> web.Response:
        """``GET /metrics``."""
        return web.Response(body=self.registry.render().encode(), headers={"content-type": CONTENT_TYPE})

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Counts every answer; goes around what makes refusals of exceptions."""
        began, code = asyncio.get_running_loop().time(), 499  # 499: the client did not wait
        try:
            answer = await handler(request)
            code = answer.status
            self._stale(request, answer)
            return answer
        finally:
            path = clean_path(request.path)
            route = path if path in PATHS else "other"
            self._requests.add(route, str(code))
            self._seconds.observe(asyncio.get_running_loop().time() - began, route)

    def _stale(self, request: web.Request, answer: web.StreamResponse) -> None:
        head, version = self._consumers.head, admitted_version(answer.headers)
        if head is None or head.number is None or version is None or version.run != head.run:
            return
        consumer = request.headers.get(HEADER_CONSUMER, self._consumers.default)
        self._staleness.observe(max(0, head.number - version.number), version.run, consumer)

    def _replicas(self) -> Iterator[tuple[Labels, float]]:
        replicas = self._dispatcher.fleet.replicas
        ready = sum(replica.ready for replica in replicas)
        alive = sum(replica.alive for replica in replicas)
        yield ("ready",), ready
        yield ("not_ready",), alive - ready
        yield ("lost",), len(replicas) - alive

    def _served(self) -> Iterator[tuple[Labels, float]]:
        served: dict[str, list[int]] = {}
        for replica in self._dispatcher.fleet.replicas:
            if replica.ready and replica.serving:
                served.setdefault(replica.serving.run, []).append(replica.serving.number)
        for run, numbers in sorted(served.items()):
            yield (run, "oldest"), min(numbers)
            yield (run, "newest"), max(numbers)

    def _logged(self) -> Iterator[tuple[Labels, float]]:
        if (log := self._dispatcher.attempt.log) is not None:
            yield ("written",), log.written
            yield ("dropped",), log.dropped

    def _head(self) -> Iterator[tuple[Labels, float | None]]:
        if (head := self._consumers.head) is not None:
            yield (head.run,), head.number

    def _head_age(self) -> Iterator[tuple[Labels, float | None]]:
        if (head := self._consumers.head) is not None:
            yield (head.run,), head.age
