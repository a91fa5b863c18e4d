"""A replica's metrics: an ASGI app around its middleware that counts, and answers ``/metrics``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

from ..metrics import CONTENT_TYPE, Labels, Registry
from ..ports import Clock
from .admission import Gate
from .asgi import App, Message, Receive, Scope, Send, call_app, clean_path, header_map, without
from .reconciler import Reconciler, Update
from .routes import ROUTES

ENGINE_SECONDS = 5.0


class ReplicaMetrics:
    """Counts of one replica. ``status`` is what ``/ready`` says, asked at each look."""

    def __init__(self, gate: Gate, clock: Clock, status: Callable[[], dict[str, Any]]) -> None:
        self.registry = r = Registry()
        self._gate, self._clock, self._status = gate, clock, status
        self._requests = r.counter(
            "stitch_replica_requests_total", "Answers by route and status.", ("route", "code")
        )
        self._seconds = r.histogram(
            "stitch_replica_request_seconds", "From the request's head to the answer's end.", ("route",)
        )
        gauge = r.gauge
        gauge("stitch_replica_ready", "1 while requests are admitted.", read=lambda: [((), gate.ready)])
        gauge(
            "stitch_replica_failed", "1 once the process must be replaced.",
            read=lambda: [((), gate.failed is not None)],
        )  # fmt: skip
        gauge("stitch_replica_active_requests", "Admitted now.", read=lambda: [((), gate.active)])
        gauge("stitch_replica_version", "The version that is served.", ("run",), self._version)
        gauge("stitch_replica_target_version", "The version to serve next.", ("run",), self._target)
        gauge(
            "stitch_replica_problem_age_seconds", "How long something has stood in the way; 0: nothing does.",
            read=self._problem,
        )  # fmt: skip
        gauge(
            "stitch_replica_last_success_age_seconds", "Since the last look at the store that went well.",
            read=lambda: [((), self._status().get("last_success_age"))],
        )  # fmt: skip
        gauge(
            "stitch_replica_probes_total", "States that were asked for their weights, by what came of it.",
            ("outcome",), self._probes, kind="counter",
        )  # fmt: skip
        gauge(
            "stitch_replica_probe_difference_ratio",
            "Of the last weights that came back: difference from what they were, 1: as much as may be noise.",
            read=self._probe_difference,
        )  # fmt: skip
        self._activations = r.counter("stitch_replica_activations_total", "Versions activated.")
        self._bytes = r.counter("stitch_replica_fetched_bytes_total", "Bytes fetched for them.")
        self._phases = r.histogram(
            "stitch_replica_activation_seconds", "Of one activation, by its phase.", ("phase",)
        )

    def follow(self, reconciler: Reconciler) -> None:
        """Count its activations and its failed passes."""
        reconciler.on_activated = self.activated
        self.registry.gauge(
            "stitch_replica_failed_passes_total", "Looks at the store that ended in an error.",
            read=lambda: [((), reconciler.failed_passes)], kind="counter",
        )  # fmt: skip

    def activated(self, update: Update) -> None:
        self._activations.add()
        self._bytes.add(by=update.bytes)
        for phase in ("fetch", "stage", "drain", "pause"):
            self._phases.observe(getattr(update, phase), phase)

    def answered(self, path: str, code: int, seconds: float) -> None:
        route = path if path in ROUTES else "other"
        self._requests.add(route, str(code))
        self._seconds.observe(seconds, route)

    def _version(self) -> Iterator[tuple[Labels, float]]:
        if (serving := self._gate.serving) is not None:
            yield (serving.run,), serving.number

    def _target(self) -> Iterator[tuple[Labels, float]]:
        run, _, name = str(self._status().get("target") or "").rpartition("/weight_v")
        if run and name.isdecimal():
            yield (run,), int(name)

    def _probes(self) -> Iterator[tuple[Labels, float]]:
        for outcome, count in (self._status().get("probe") or {}).get("outcomes", {}).items():
            yield (outcome,), count

    def _probe_difference(self) -> Iterator[tuple[Labels, float]]:
        last = (self._status().get("probe") or {}).get("last") or {}
        if last.get("difference") is not None:
            yield (), last["difference"] / last["tolerance"]

    def _problem(self) -> list[tuple[Labels, float]]:
        problem = self._status().get("problem")
        return [((), problem["age"] if problem else 0.0)]


class Metered:
    """``app``, counted; at ``/metrics`` the engine's own page with ours behind it."""

    def __init__(self, app: App, metrics: ReplicaMetrics, clock: Clock) -> None:
        self._app, self._metrics, self._clock = app, metrics, clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path, began, code = clean_path(scope["path"]), self._clock.monotonic(), 499  # 499: nobody waited

        async def noted(message: Message) -> None:
            nonlocal code
            if message["type"] == "http.response.start":
                code = message["status"]
            await send(message)

        try:
            if path == "/metrics" and scope["method"] == "GET":
                await self._page(scope, noted)
            else:
                await self._app(scope, receive, noted)
        finally:
            self._metrics.answered(path, code, self._clock.monotonic() - began)

    async def _page(self, scope: Scope, send: Send) -> None:
        engine = await self._engine_page(scope)
        body = engine + self._metrics.registry.render().encode()
        headers = [(b"content-type", CONTENT_TYPE.encode()), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _engine_page(self, scope: Scope) -> bytes:
        """Its page in the text format; empty where it has none, or does not say in time."""
        # Where nothing is said it answers in the text format, which can be put together.
        asked = {**scope, "headers": without(scope["headers"], ("accept", "accept-encoding"))}
        try:
            async with asyncio.timeout(ENGINE_SECONDS):
                status, headers, body = await call_app(self._app, asked)
        except Exception:  # an engine without metrics, or one that hangs, must not hide ours
            return b""
        if status != 200 or not header_map(headers).get("content-type", "").startswith("text/plain"):
            return b""
        return body + (b"" if body.endswith(b"\n") else b"\n")
