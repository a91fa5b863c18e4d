"""HTTP inside the simulation: the engine's /generate as an ASGI app, and a client that calls one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..replica.asgi import App, Message, Receive, Scope, Send, send_json
from ..replica.sse import with_data
from .sim_engine import Generation, SimulatedEngine, Token


class EngineGone(Exception):
    """The connection to the engine broke in the middle of a request."""


@dataclass(frozen=True)
class Response:
    status: int
    headers: dict[str, str]
    body: Any


def engine_app(engine: SimulatedEngine, on_end: Callable[[str], None] = lambda _: None) -> App:
    """SGLang's /generate over a simulated engine.

    A request is ``{"rid", "prompt", "max_new_tokens", "stream"}``, with counts of tokens. Beside what a real
    engine tells, an answer has the truth: ``true_states`` of its tokens, ``true_lies``, which of them are of
    other weights than the engine was told to have, and ``true_mixed``, its KV. ``on_end`` is told the id of a
    stream that was begun when the engine has done with it, whatever its client does.
    """

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        request = json.loads((await receive())["body"])
        await asyncio.sleep(engine.faults.near())
        generation = engine.submit(request["rid"], request["prompt"], request["max_new_tokens"])
        back = engine.faults.near()
        news = _Stream(send) if request["stream"] else None
        if news is not None:
            asyncio.ensure_future(_tell(generation, news, back, on_end))  # noqa: RUF006
        await _ended_or_disconnected(generation, receive, news, engine.step_seconds)
        if generation.outcome is None:
            # As real engines do, it notices late that nobody waits any more.
            await asyncio.sleep(engine.faults.random.random() * 2.0)
            await engine.abort(generation.request_id)
            return
        if generation.outcome == "lost":
            raise EngineGone(f"request {generation.request_id} was lost with its engine")
        await asyncio.sleep(back)
        if news is None:
            await send_json(send, 200, _answer(generation))
        else:
            await news.end(_answer(generation))

    return app


class _Stream:
    """The events of an answer. Who sends them waits for the client if the server makes it wait."""

    def __init__(self, send: Send) -> None:
        self.begun = asyncio.Event()
        self._send = send
        self._started = False
        self._told = 0

    async def news(self, generation: Generation) -> None:
        if len(generation.tokens) > self._told:
            self._told = len(generation.tokens)
            meta = {"id": generation.request_id, "finish_reason": None, "completion_tokens": self._told}
            await self._event({"meta_info": meta})

    async def end(self, answer: dict[str, Any]) -> None:
        await self._event(answer)
        await self._send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    async def _event(self, value: dict[str, Any]) -> None:
        if not self._started:
            self._started = True
            headers = [(b"content-type", b"text/event-stream")]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            self.begun.set()
        await self._send({"type": "http.response.body", "body": with_data(b"", value), "more_body": True})


async def _tell(generation: Generation, stream: _Stream, back: float, on_end: Callable[[str], None]) -> None:
    await generation.ended.wait()
    await stream.begun.wait()
    await asyncio.sleep(back)
    on_end(generation.request_id)


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


async def _ended_or_disconnected(
    generation: Generation, receive: Receive, stream: _Stream | None, look: float
) -> None:
    ended = asyncio.ensure_future(generation.ended.wait())
    left = asyncio.ensure_future(receive())
    seconds = None if stream is None else look
    try:
        while not ended.done() and not left.done():
            await asyncio.wait([ended, left], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if stream is not None and not left.done():
                await stream.news(generation)
    finally:
        ended.cancel()
        left.cancel()


@dataclass(frozen=True)
class Client:
    """What a client does beside waiting: it has left once ``left`` is set, it takes nothing of its answer
    while ``reads`` is not.
    """

    left: asyncio.Event = field(default_factory=asyncio.Event)
    reads: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.reads.set()

    def leave(self) -> None:
        self.left.set()
        self.reads.set()


async def call(
    app: App,
    method: str,
    path: str,
    body: Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
    client: Client | None = None,
) -> Response | None:
    """One request to an ASGI app; None if the client left, or its answer was cut."""
    client = client or Client()
    requests = iter([{"type": "http.request", "body": json.dumps(body or {}).encode(), "more_body": False}])
    start: Message = {}
    parts: list[bytes] = []
    whole = False

    async def receive() -> Message:
        request = next(requests, None)
        if request is None:
            await client.left.wait()
            return {"type": "http.disconnect"}
        return request

    async def send(message: Message) -> None:
        nonlocal whole
        await client.reads.wait()
        if message["type"] == "http.response.start":
            start.update(message)
        else:
            parts.append(message.get("body", b""))
            whole = not message.get("more_body", False)

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": b"",
        "headers": [(name.encode(), text.encode()) for name, text in (headers or {}).items()],
    }
    await app(scope, receive, send)
    if client.left.is_set() or not whole:
        return None
    received = {name.decode(): value.decode() for name, value in start.get("headers", ())}
    data = b"".join(parts)
    if received.get("content-type") == "text/event-stream":
        return _last(start["status"], received, data)
    return Response(start["status"], received, json.loads(data) if data else None)


def _last(status: int, headers: dict[str, str], data: bytes) -> Response | None:
    """What a stream said in the end; None if it was cut."""
    *events, end = [event.removeprefix("data: ") for event in data.decode().split("\n\n") if event]
    value = json.loads(events[-1] if end == "[DONE]" else end)
    if "error" in value:
        return Response(503, headers, value)
    return Response(status, headers, value) if end == "[DONE]" else None
