"""One try of a request at one replica. Until a byte went to the client, a failure can be tried again."""

from __future__ import annotations

import io
import json
import zlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
from aiohttp import web

from stitch_core.replica.sse import Splitter, with_data
from stitch_core.requests import Refused
from stitch_core.versions import HEADER_ADMITTED, HEADER_REPLICA, HEADER_RUN, Refusal, unavailable

from .call import Call
from .connection import Connection
from .fleet import Fleet, admitted_version
from .provenance import ProvenanceLog, Trace
from .routing import Replica

PASSED_HEADERS = ("content-type", "retry-after", HEADER_ADMITTED, HEADER_RUN, HEADER_REPLICA)
# Bytes of one event of a stream.
MOST_EVENT = 64 << 20
LARGE = 1 << 20
# A front that routes by these (Modal's) would overrule the gateway.
STEERING = ("modal-session-id", "modal-flash-upstream")
FAILURES = (aiohttp.ClientError, TimeoutError, OSError)


@dataclass(frozen=True)
class Again:
    """Nothing was sent to the client. ``failure``: the replica could not do it, rather than should not.

    ``repeat``: whether another try cannot do it twice, or may.
    """

    reason: str
    failure: bool
    repeat: bool = True


class TooLarge(Exception):
    """An answer that is not read to its end."""


class _ClientLeft(Exception):
    """Writing to the client failed; says nothing about the replica."""


class Attempt:
    """Sends a call to a replica, and its answer to the client."""

    def __init__(
        self, fleet: Fleet, session: aiohttp.ClientSession, *, connect: float, max_response: int
    ) -> None:
        """``connect``: seconds to connect; a generation has no time limit. ``max_response``: bytes."""
        self._fleet = fleet
        self._session = session
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect)
        self._max_response = max_response
        self.log: ProvenanceLog | None = None

    async def run(self, request: web.Request, call: Call, replica: Replica) -> web.StreamResponse | Again:
        """What to answer (a stream is already sent), or why to try again. Raises Refused."""
        # From a file it is sent in pieces: others have their turn meanwhile.
        body = call.body if len(call.body) < LARGE else io.BytesIO(call.body)
        try:
            async with self._session.post(
                replica.url + call.path,
                data=body,
                headers=_asked(call, replica),
                timeout=self._timeout,
                allow_redirects=False,
            ) as answer:
                return await self._judge(request, call, replica, answer)
        except FAILURES as error:
            again = self._failed(replica, _text(error), answered=False)
            # A connection that was never made carried no request.
            return replace(again, repeat=call.repeatable or isinstance(error, aiohttp.ClientConnectorError))

    def _failed(self, replica: Replica, error: str, *, answered: bool) -> Again:
        self._fleet.failed(replica, error, answered=answered)
        return Again(f"{replica.id}: {error}", failure=True)

    async def _judge(
        self, request: web.Request, call: Call, replica: Replica, answer: aiohttp.ClientResponse
    ) -> web.StreamResponse | Again:
        trace = None
        if answer.status == 200:
            version = admitted_version(answer.headers)
            if version is None or not call.constraint.allows(version):
                return self._failed(replica, f"it admitted the request under {version}", answered=True)
            self._fleet.answered(replica, version)
            trace = self.log.trace(call, replica, version) if self.log else None
            if answer.content_type == "text/event-stream":
                return await self._stream(request, replica, answer, trace)
        if 300 <= answer.status < 400:
            # Only the pool says where replicas are: a prompt must not be sent where an answer points to.
            return self._failed(replica, f"it answered {answer.status}, which no replica does", answered=True)
        # Wholly read before anything is sent on: a replica that dies now costs time, not an error.
        try:
            body = await whole(answer, self._max_response)
        except TooLarge as large:
            raise Refused(Refusal(502, "ResponseTooLarge", str(large), "never")) from None
        if answer.status == 200 and trace is not None:
            trace.end("whole", body)
        error = _error(body) if answer.status in (409, 503) else {}
        if answer.status == 503 and error.get("retry") != "never":
            # A gate that closed for a moment, as each does in an update, is no failure of its replica.
            again = self._failed(replica, str(error.get("message", "it answered 503")), answered=True)
            return replace(again, failure="retry" not in error)
        if answer.status == 409 and error.get("retry") in ("here", "elsewhere"):
            self._fleet.refused(replica, error.get("run"), error.get("applied"))
            return Again(str(error.get("message")), failure=False)
        return web.Response(status=answer.status, body=body, headers=_headers(answer, replica))

    async def _stream(
        self,
        request: web.Request,
        replica: Replica,
        answer: aiohttp.ClientResponse,
        trace: Trace | None,
    ) -> web.StreamResponse:
        events = _whole_events(answer)
        # Before the response is begun: a failure up to here is one before the first byte.
        first = await anext(events, b"")
        response = web.StreamResponse(headers=_headers(answer, replica))
        outcome = "left"
        try:
            await _to_client(response, request, first)
            if trace is not None:
                trace.feed(first)
            try:
                async for data in events:
                    await _to_client(response, request, data)
                    if trace is not None:
                        trace.feed(data)
                outcome = "whole"
            except FAILURES as error:
                outcome = "cut"
                self._failed(replica, _text(error), answered=False)
                refusal = unavailable(f"the replica was lost in mid-stream: {_text(error)}")
                await _to_client(response, request, with_data(b"", refusal.body()))
        except _ClientLeft:
            pass
        finally:  # also when this is cancelled, as it is when the client leaves
            if trace is not None:
                trace.end(outcome)
        return response


async def whole(answer: aiohttp.ClientResponse, most: int) -> bytes:
    """The body, decompressed. Raises TooLarge, and FAILURES."""
    body = bytearray()
    async for chunk in plain(answer):
        body += chunk
        if len(body) > most:
            raise TooLarge(f"the replica's answer exceeds {most} bytes")
    return bytes(body)


async def plain(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """What the body says, also if it is compressed, which nobody asked for. Raises ClientPayloadError."""
    encoding = answer.headers.get("content-encoding", "identity").strip().lower()
    if encoding == "identity":
        async for chunk in answer.content.iter_any():
            yield chunk
        return
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise aiohttp.ClientPayloadError(f"it answered in content-encoding {encoding}")
    stream = zlib.decompressobj(47)  # zlib or gzip, by the header
    try:
        async for chunk in answer.content.iter_any():
            # In steps: a few bytes may stand for very many.
            while chunk:
                yield stream.decompress(chunk, LARGE)
                chunk = stream.unconsumed_tail
    except zlib.error as error:
        raise aiohttp.ClientPayloadError(f"its answer is not {encoding}: {error}") from None
    if not stream.eof:
        raise aiohttp.ClientPayloadError(f"its answer in {encoding} was cut")


def _asked(call: Call, replica: Replica) -> dict[str, str]:
    """Headers of a request; who chooses a replica is the gateway, wherever a client would have it routed."""
    if not replica.headers:
        return call.headers
    return {**{name: text for name, text in call.headers.items() if name not in STEERING}, **replica.headers}


async def _whole_events(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Pieces that end where an event ends, so that an error can be put behind any of them."""
    splitter = Splitter()
    async for chunk in plain(answer):
        if events := splitter.feed(chunk):
            yield b"".join(events)
        if splitter.pending > MOST_EVENT:
            raise aiohttp.ClientPayloadError(f"an event exceeds {MOST_EVENT} bytes")
    if rest := splitter.finish():
        yield rest


async def _to_client(response: web.StreamResponse, request: web.Request, data: bytes) -> None:
    try:
        if not response.prepared:
            if isinstance(request.protocol, Connection):
                request.protocol.streams = response.content_type == "text/event-stream"
            await response.prepare(request)
        await response.write(data)
    except FAILURES as error:
        raise _ClientLeft from error


def _headers(answer: aiohttp.ClientResponse, replica: Replica) -> dict[str, str]:
    passed = {name: answer.headers[name] for name in PASSED_HEADERS if name in answer.headers}
    return {HEADER_REPLICA: replica.id, **passed}


def _error(body: bytes) -> dict[str, Any]:
    """The error in the envelope; empty if there is none."""
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}
    return error if isinstance(error, dict) else {}


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")
