"""The little of ASGI 3 that the middleware needs: types, headers, bodies, JSON answers. Knows no versions."""

from __future__ import annotations

import asyncio
import json
import posixpath
import zlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any

from ..requests import Refused
from ..versions import Refusal, malformed

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

# Seconds for which a client may take to send a body.
BODY_SECONDS = 60.0

JSON_TYPE = (b"content-type", b"application/json")


class Disconnected(Exception):
    """The client left before its request was read."""


def header_map(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """Lower-case names; a repeated header is joined with commas, as HTTP defines it."""
    found: dict[str, str] = {}
    for name, value in headers:
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        found[key] = f"{found[key]}, {text}" if key in found else text
    return found


def without(headers: Iterable[tuple[bytes, bytes]], names: Iterable[str]) -> Headers:
    """The headers whose lower-case name is not in ``names``."""
    drop = {name.encode("latin-1") for name in names}
    return [(name, value) for name, value in headers if name.lower() not in drop]


def clean_path(path: str) -> str:
    """The one spelling of an already percent-decoded path: no '//', no '..', no slash at the end."""
    return posixpath.normpath("/" + path.lstrip("/")) if path.isprintable() else path


async def read_body(receive: Receive, headers: Mapping[str, str], limit: int) -> bytes:
    """The whole request body, decompressed; neither form may exceed ``limit`` bytes.

    Raises Refused (413, 415, 400; 408 where it does not come in time) and Disconnected.
    """
    length = headers.get("content-length", "")
    if length.isascii() and length.isdecimal() and int(length) > limit:
        raise Refused(_too_large(limit))
    try:
        async with asyncio.timeout(BODY_SECONDS):
            body = await _received(receive, limit)
    except TimeoutError:
        raise Refused(late_body(BODY_SECONDS)) from None
    return decoded(body, headers.get("content-encoding", "identity"), limit)


async def _received(receive: Receive, limit: int) -> bytes:
    parts, size, more = [], 0, True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            raise Disconnected
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limit:
            raise Refused(_too_large(limit))
        more = message.get("more_body", False)
    return b"".join(parts)


def late_body(seconds: float) -> Refusal:
    """408: the client did not send its body in time."""
    return Refusal(408, "RequestTimeout", f"the request body did not come within {seconds:g} s", "never")


def decoded(body: bytes, encoding: str, limit: int) -> bytes:
    """A body without its ``content-encoding``, up to ``limit`` bytes. Raises Refused (413, 415, 400)."""
    encoding = encoding.strip().lower()
    if encoding == "identity":
        return body
    body = _decompress(body, encoding, limit)
    if len(body) > limit:
        raise Refused(_too_large(limit))
    return body


def _too_large(limit: int) -> Refusal:
    return Refusal(413, "PayloadTooLarge", f"the request body exceeds {limit} bytes", "never")


def _decompress(body: bytes, encoding: str, limit: int) -> bytes:
    """At most ``limit`` + 1 bytes of the decompressed body."""
    if encoding not in ("gzip", "x-gzip", "deflate"):
        message = f"content-encoding {encoding!r} is not supported: send gzip, deflate or none"
        raise Refused(Refusal(415, "UnsupportedEncoding", message, "never"))
    # 47: zlib or gzip by its header. Some clients send deflate without the zlib header.
    for window_bits in (47, -15) if encoding == "deflate" else (47,):
        stream = zlib.decompressobj(window_bits)
        try:
            plain = stream.decompress(body, limit + 1)
        except zlib.error:
            continue
        if stream.eof or len(plain) > limit:
            return plain
    raise Refused(malformed(f"the request body is not valid {encoding}"))


def encode_json(value: Any) -> bytes:
    """Compact JSON bytes."""
    return json.dumps(value, separators=(",", ":")).encode()


async def send_json(
    send: Send, status: int, value: Any, headers: Mapping[str, str] | None = None, *, head: bool = False
) -> None:
    """A whole response; with ``head`` its headers only."""
    body = encode_json(value)
    listed = [JSON_TYPE, (b"content-length", str(len(body)).encode())]
    listed += [(k.encode("latin-1"), v.encode("latin-1")) for k, v in (headers or {}).items()]
    await send({"type": "http.response.start", "status": status, "headers": listed})
    await send({"type": "http.response.body", "body": b"" if head else body})


async def send_refusal(send: Send, refusal: Refusal) -> None:
    """A refusal as a whole response."""
    await send_json(send, refusal.status, refusal.body(), refusal.headers())


async def call_app(app: App, scope: Scope) -> tuple[int, Headers, bytes]:
    """Ask the app as a client without a body would: status, headers, body."""
    status, headers, parts, asked = 500, Headers(), list[bytes](), False

    async def receive() -> Message:
        nonlocal asked
        if asked:
            await asyncio.Event().wait()  # this client never leaves
        asked = True
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status, headers
        if message["type"] == "http.response.start":
            status, headers = message["status"], list(message.get("headers", ()))
        elif message["type"] == "http.response.body":
            parts.append(message.get("body", b""))

    await app(scope, receive, send)
    return status, headers, b"".join(parts)


async def call_for_json(app: App, scope: Scope) -> tuple[int, Any]:
    """As ``call_app``: the status, and the JSON or None if it is none."""
    status, _, body = await call_app(app, scope)
    try:
        return status, json.loads(body)
    except (ValueError, RecursionError):
        return status, None
