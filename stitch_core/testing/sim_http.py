"""HTTP inside the simulation: the engine's /generate as an ASGI app, and a client that calls one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..replica.asgi import App, Message, Receive, Scope, Send, send_json
from .sim_engine import Generation, SimulatedEngine, Token


class EngineGone(Exception):
    """The connection to the engine broke in the middle of a request."""


@dataclass(frozen=True)
class Response:
    status: int
    headers: dict[str, str]
    body: Any


def engine_app(engine: SimulatedEngine) -> App:
    """SGLang's /generate over a simulated engine.

    A request is ``{"rid", "prompt", "max_new_tokens"}``, both counts of tokens. Beside what a real engine
    tells, an answer has the truth: ``true_states`` of its tokens, ``true_lies``, which of them are of other
    weights than the engine was told to have, and ``true_mixed``, its KV.
    """

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        request = json.loads((await receive())["body"])
        await asyncio.sleep(engine.faults.near())
        generation = engine.submit(request["rid"], request["prompt"], request["max_new_tokens"])
        await _ended_or_disconnected(generation, receive)
        if generation.outcome is None:
            # As real engines do, it notices late that nobody waits any more.
            await asyncio.sleep(engine.faults.random.random() * 2.0)
            await engine.abort(generation.request_id)
            return
        if generation.outcome == "lost":
            raise EngineGone(f"request {generation.request_id} was lost with its engine")
        await asyncio.sleep(engine.faults.near())
        await send_json(send, 200, _answer(generation))

    return app


def _answer(generation: Generation) -> dict[str, Any]:
    meta = {
        "id": generation.request_id,
        # A real engine answers an aborted request with 200 and what it has.
        "finish_reason": {"type": "length" if generation.outcome == "done" else "abort"},
        "completion_tokens": len(generation.tokens),
        "weight_versions": _spans(generation.tokens),
    }
    return {
        "meta_info": meta,
        "true_states": [token.state for token in generation.tokens],
        "true_lies": [token.lie for token in generation.tokens],
        "true_mixed": generation.mixed,
    }


def _spans(tokens: list[Token]) -> list[dict[str, Any]]:
    spans: list[dict[str, Any]] = []
    for i, token in enumerate(tokens):
        if spans and spans[-1]["version"] == token.label:
            spans[-1]["end"] = i + 1
        else:
            spans.append({"version": token.label, "start": i, "end": i + 1})
    return spans


async def _ended_or_disconnected(generation: Generation, receive: Receive) -> None:
    ended = asyncio.ensure_future(generation.ended.wait())
    left = asyncio.ensure_future(receive())
    try:
        await asyncio.wait([ended, left], return_when=asyncio.FIRST_COMPLETED)
    finally:
        ended.cancel()
        left.cancel()


async def call(
    app: App,
    method: str,
    path: str,
    body: Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
    leave: asyncio.Event | None = None,
) -> Response | None:
    """One request to an ASGI app; None if the client left, as it does when ``leave`` is set."""
    leave = leave or asyncio.Event()
    requests = iter([{"type": "http.request", "body": json.dumps(body or {}).encode(), "more_body": False}])
    start: Message = {}
    parts: list[bytes] = []

    async def receive() -> Message:
        request = next(requests, None)
        if request is None:
            await leave.wait()
            return {"type": "http.disconnect"}
        return request

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            start.update(message)
        else:
            parts.append(message.get("body", b""))

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": b"",
        "headers": [(name.encode(), text.encode()) for name, text in (headers or {}).items()],
    }
    await app(scope, receive, send)
    if leave.is_set():
        return None
    received = {name.decode(): value.decode() for name, value in start.get("headers", ())}
    data = b"".join(parts)
    return Response(start["status"], received, json.loads(data) if data else None)
