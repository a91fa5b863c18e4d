"""As much of ASGI as a JSON API needs: bodies in, JSON and event streams out, no framework."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

MAX_BODY = 64 << 20


class HttpError(Exception):
    """Answer with `status` and SGLang's error object."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class Disconnected(Exception):
    """The client has gone: there is nobody to answer."""


async def read_body(receive: Receive) -> bytes:
    """The whole request body. Raises Disconnected, or HttpError 413."""
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Disconnected
        chunks.append(message.get("body", b""))
        size += len(chunks[-1])
        if size > MAX_BODY:
            raise HttpError(413, f"the body is larger than {MAX_BODY} bytes")
        if not message.get("more_body", False):
            return b"".join(chunks)


async def read_json(receive: Receive, default: Any = ...) -> Any:
    """The body as JSON; an empty one is `default` where there is one. Raises Disconnected, or HttpError
    400.
    """
    body = await read_body(receive)
    if not body.strip() and default is not ...:
        return default
    try:
        return json.loads(body)
    except ValueError as error:  # also bytes that are no UTF-8
        raise HttpError(400, f"the body is not JSON: {error}") from None


async def until_disconnect(receive: Receive) -> None:
    """Return when the client has gone. To be called when the body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(receive: Receive, work: Awaitable[Any]) -> Any:
    """The result of `work`; when the client goes first `work` is cancelled and Disconnected raised."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(until_disconnect(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Disconnected
        return task.result()
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def send_bytes(send: Send, status: int, body: bytes, content_type: str) -> None:
    """One whole response."""
    headers = [(b"content-type", content_type.encode()), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def send_json(send: Send, status: int, value: Any) -> None:
    """One whole JSON response. Floats are written so that they read back as the same double."""
    await send_bytes(send, status, encode(value), "application/json")


async def send_text(send: Send, status: int, text: str) -> None:
    """One whole plain text response."""
    await send_bytes(send, status, text.encode(), "text/plain; charset=utf-8")


async def send_error(send: Send, status: int, message: str) -> None:
    """SGLang's error object."""
    kind = "BadRequestError" if status == 400 else "NotFoundError" if status == 404 else "EngineError"
    await send_json(send, status, {"object": "error", "message": message, "type": kind, "code": status})


async def send_events(send: Send, events: AsyncIterator[Any]) -> None:
    """Server-sent events, one for each value, then SGLang's `[DONE]`."""
    headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    async for value in events:
        await send(
            {"type": "http.response.body", "body": b"data: " + encode(value) + b"\n\n", "more_body": True}
        )
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})


def encode(value: Any) -> bytes:
    """Compact JSON."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")
