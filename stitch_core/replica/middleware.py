"""The ASGI middleware in front of an engine: admission, the report, and only the routes that are safe.

``docs/http.md`` is its contract. The engine app speaks the SGLang subset and labels tokens with the text
of ``PolicyVersion``; it may be an engine's own server or the sidecar's proxy.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from ..ports import EngineError, EngineReplaced
from ..request_ids import Abort, Name, Running, named, own_id, take_ids
from ..requests import Refused, json_object
from ..versions import (
    HEADER_CONSUMER,
    HEADER_EXACT,
    HEADER_MIN,
    HEADER_REPLICA,
    HEADER_RUN,
    Refusal,
    VersionConstraint,
    VersionError,
    malformed,
    unavailable,
)
from .admission import Gate, Ticket
from .answer import Answer
from .asgi import (
    App,
    Disconnected,
    Message,
    Receive,
    Scope,
    Send,
    call_for_json,
    clean_path,
    encode_json,
    header_map,
    read_body,
    send_json,
    send_refusal,
    without,
)
from .exchange import Exchange
from .outbox import STALL_SECONDS, Kept, Outbox
from .report import Checker
from .routes import Kind, classify
from .stamp import GenerateStamper, OpenAIStamper, Stamper

# Fields of an engine's own /server_info that are nobody's business.
SECRETS = frozenset(("api_key", "admin_api_key", "ssl_keyfile_password"))

# Not passed on: what no longer fits the changed body, what is meant for us, what would compress the answer.
_DROPPED = (
    "accept-encoding", "content-encoding", "content-length", "transfer-encoding", "expect",
    HEADER_MIN, HEADER_EXACT, HEADER_RUN, HEADER_CONSUMER,
)  # fmt: skip


class StitchMiddleware:
    """Wraps an engine's ASGI app, on one event loop of any ASGI 3 server."""

    def __init__(
        self,
        app: App,
        gate: Gate,
        *,
        status: Callable[[], dict[str, Any]],
        wake: Callable[[], None],
        mismatch: Callable[[str], None],
        abort: Callable[[str], Awaitable[None]],
        max_body: int = 64 << 20,
        grace: float = 2.0,
        stall: float = STALL_SECONDS,
        kv_across: str = "mixed",
        cache_key: bool = False,
        vouch: Callable[[], Awaitable[None]] | None = None,
        replica: str | None = None,
    ) -> None:
        """``status``, ``wake`` and ``mismatch`` are the reconciler's, ``abort`` the engine's.

        ``max_body``: bytes of a request body. ``grace``: seconds that the engine app gets at each step to
        end a request. ``stall``: seconds for which a client may take nothing of its answer. ``kv_across``:
        what "kv" says where the engine does not. ``cache_key``: give each request an ``extra_key`` of its
        version, for an engine whose prefix cache outlives an activation.
        ``vouch``, for an engine that others may restart: returns once it is sure that what the app has just
        begun to answer comes from the instance that ``Engine.identity`` told of last. Raises EngineReplaced
        if it does not, EngineError if that cannot be known; then nothing of it is handed out.
        ``replica``: the name that every answer carries in ``X-Stitch-Replica``.
        """
        self._app = app
        self._gate = gate
        self._status = status
        self._wake = wake
        self._mismatch = mismatch
        self._abort = abort
        self._max_body = max_body
        self._grace = grace
        self._stall, self._kept = stall, Kept()
        self._kv_across = kv_across
        self._cache_key = cache_key
        self._vouch = vouch
        self._name = [] if replica is None else [(HEADER_REPLICA.encode(), replica.encode())]
        self._running = Running()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008, "reason": "websockets are not served"})
        elif scope["type"] == "http":
            await self._http(scope, receive, self._named(send))

    def _named(self, send: Send) -> Send:
        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *self._name]}
            await send(message)

        return named

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = clean_path(scope["path"])
        allowed, kind = classify(path)
        method = scope["method"]
        if kind in (Kind.BLOCKED, Kind.UNKNOWN):
            await send_refusal(send, _no_route(path, kind))
            return
        methods = {"GET": "GET, HEAD, OPTIONS"}.get(allowed, f"{allowed}, OPTIONS")
        if method == "OPTIONS":
            await send(
                {"type": "http.response.start", "status": 204, "headers": [(b"allow", methods.encode())]}
            )
            await send({"type": "http.response.body", "body": b""})
            return
        if method != allowed and (method, allowed) != ("HEAD", "GET"):
            refusal = Refusal(405, "MethodNotAllowed", f"{path} takes {methods}, not {method}", "never")
            await send_json(send, 405, refusal.body(), {"allow": methods})
            return
        # The app routes by exactly the path that was judged here.
        scope = {**scope, "path": path, "raw_path": path.encode(), "extensions": {}}
        await self._dispatch(kind, scope, receive, send)

    async def _dispatch(self, kind: Kind, scope: Scope, receive: Receive, send: Send) -> None:
        head = scope["method"] == "HEAD"
        try:
            if kind in (Kind.GENERATE, Kind.OPENAI):
                await self._generate(kind, scope, receive, send)
            elif kind is Kind.ABORT:
                await self._abort_request(scope, receive, send)
            elif kind is Kind.INFO:
                await self._info(scope, send, head)
            elif kind is Kind.HEALTH:
                failed = self._gate.failed
                answer: dict[str, Any] = {"status": "ok" if failed is None else "failed", "reason": failed}
                await send_json(send, 200 if failed is None else 503, answer, head=head)
            elif kind is Kind.READY:
                answer = {**self._status(), **self._summary()}
                await send_json(send, 200 if self._gate.ready else 503, answer, head=head)
            elif kind is Kind.WAKE:
                self._wake()
                await send_json(send, 202, {"status": "accepted"})
            else:
                await self._app(scope, receive, send)
        except Refused as error:
            await send_refusal(send, error.refusal)
        except Disconnected:
            return

    # -------------------------------------------------------------------------------------- generation

    async def _generate(self, kind: Kind, scope: Scope, receive: Receive, send: Send) -> None:
        headers = header_map(scope["headers"])
        body = json_object(await read_body(receive, headers, self._max_body))
        try:
            constraint = VersionConstraint.parse(body.pop("weight_version", None), headers)
        except VersionError as error:
            raise Refused(malformed(str(error))) from None
        _, consumer = named({}, headers)
        names = self._running.add(take_ids(body), constraint.run, consumer)
        rids = [name.engine for name in names]
        body["rid"] = rids if isinstance(body["rid"], list) else rids[0]
        try:
            ticket = await self._gate.admit(constraint, rids[0])
            if isinstance(ticket, Refusal):
                await send_refusal(send, ticket)
                return
            for name in names:
                name.run = ticket.admitted.run
            if self._cache_key:
                _add_cache_key(body, str(ticket.admitted))
            try:
                await self._exchange(kind, scope, receive, send, ticket, names, encode_json(body))
            finally:
                self._gate.release(ticket)
        finally:
            self._running.drop(names)

    async def _exchange(
        self,
        kind: Kind,
        scope: Scope,
        receive: Receive,
        send: Send,
        ticket: Ticket,
        names: Sequence[Name],
        body: bytes,
    ) -> None:
        make = GenerateStamper if kind is Kind.GENERATE else OpenAIStamper
        stamper: Stamper = make(
            Checker(ticket.admitted, ticket.constraint, self._kv_across),
            lambda: self._gate.serving or ticket.admitted,
            lambda given: own_id(names, given),
        )

        def release() -> None:
            self._gate.release(ticket, answering=True)
            self._running.drop(names)

        outbox = Outbox(send, self._kept, self._stall)
        answer = Answer(
            outbox,
            ticket,
            stamper,
            release=release,
            mismatch=self._mismatch,
            answering=self._gate.answering,
        )

        async def vouched(message: Message) -> None:
            if message["type"] == "http.response.start" and self._vouch and ticket.revoked is None:
                try:
                    await self._vouch()
                except EngineReplaced as error:
                    self._mismatch(str(error))
                    raise
            await answer.send(message)

        exchange = Exchange(
            self._app, ticket, answer, outbox, receive=receive, body=body,
            request_ids=[name.engine for name in names], abort=self._abort, release=release,
            grace=self._grace, send=vouched,
        )  # fmt: skip
        with contextlib.suppress(EngineError):  # the client was told
            await exchange.run(_with_body(scope, body))

    async def _abort_request(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The engine hears whole ids of its own only: it would take whatever begins with a shorter one."""
        headers = header_map(scope["headers"])
        abort = Abort.parse(json_object(await read_body(receive, headers, self._max_body)), headers)
        meant = self._running.meant(abort)
        done = await asyncio.gather(*(self._abort(engine) for engine in meant), return_exceptions=True)
        for error in done:
            if isinstance(error, EngineError):
                raise Refused(unavailable(f"the engine does not abort: {error}", retry="here"))
        await send_json(send, 200, {"requests": len(meant)})

    async def _info(self, scope: Scope, send: Send, head: bool) -> None:
        headers = without(scope["headers"], _DROPPED)
        asked = {**scope, "method": "GET", "headers": headers}
        try:
            code, fields = await call_for_json(self._app, asked)
        except Exception as error:  # a broken engine must not hide what we know of it
            code, fields = 500, {"error": repr(error)}
        if code != 200 or not isinstance(fields, dict):
            fields = {"engine_error": {"status": code, "body": fields}}
        fields = {key: value for key, value in fields.items() if key not in SECRETS}
        ours = {**self._summary(), "stitch": self._status()}
        await send_json(send, 200, {**fields, **ours}, head=head)

    def _summary(self) -> dict[str, Any]:
        """What routers and scripts read first."""
        serving = self._gate.serving
        return {
            "ready": self._gate.ready,
            "run": serving.run if serving else None,
            "weight_version": str(serving.number) if serving else None,
            "active_requests": self._gate.active,
        }


def _no_route(path: str, kind: Kind) -> Refusal:
    if kind is Kind.BLOCKED:
        message = f"{path} would bypass the gate: weights and generation are Stitch's to control here"
        return Refusal(403, "RouteBlocked", message, "never")
    return Refusal(404, "RouteUnknown", f"{path} is not served; docs/http.md lists what is", "never")


def _add_cache_key(body: dict[str, Any], version: str) -> None:
    given = body.get("extra_key")
    if isinstance(given, list):
        body["extra_key"] = [f"{version};{key}" for key in given]
    else:
        body["extra_key"] = f"{version};{given or ''}"


def _with_body(scope: Scope, body: bytes) -> Scope:
    headers = without(scope["headers"], _DROPPED)
    headers.append((b"content-length", str(len(body)).encode()))
    return {**scope, "headers": headers}
