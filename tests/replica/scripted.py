"""A gate that serves run `r` at version 7, and an engine app that answers what a test tells it to."""

import asyncio
import json
from typing import Any

from stitch_core.replica.admission import Gate
from stitch_core.replica.asgi import Receive, Scope, Send, header_map
from stitch_core.replica.middleware import StitchMiddleware
from stitch_core.testing.asgi_client import AsgiClient
from stitch_core.versions import PolicyVersion
from tests.virtual_time import LoopClock


def label(number: int, run: str = "r") -> str:
    return str(PolicyVersion(run, number))


def span(version: int | str, start: int, end: int) -> dict[str, Any]:
    return {"version": label(version) if isinstance(version, int) else version, "start": start, "end": end}


def generated(*spans: dict[str, Any], **meta: Any) -> dict[str, Any]:
    """An answer of /generate with these spans."""
    tokens = spans[-1]["end"] if spans else 0
    fields = {
        "finish_reason": {"type": "length"},
        "completion_tokens": tokens,
        "weight_versions": list(spans),
    }
    return {"text": "x" * tokens, "meta_info": {"id": "e", "weight_version": label(7), **fields, **meta}}


class ScriptedEngine:
    """Answers ``status`` and ``body``, or the byte ``pieces`` of an event stream; may hang before its end."""

    def __init__(self) -> None:
        self.status = 200
        self.body: Any = generated(span(7, 0, 3))
        self.pieces: list[bytes] | None = None
        self.hang = asyncio.Event()
        self.hang.set()
        self.deaf = False
        self.seen: dict[str, Any] = {}
        self.called = asyncio.Event()
        self.headers: dict[str, str] = {}
        self.path = ""
        self.disconnected = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await send({"type": "lifespan.startup.complete"})
            return
        # A gateway asks at any time; this engine does not tell.
        if scope["path"] == "/v1/loads" and scope.get("query_string") == b"include=core":
            await send({"type": "http.response.start", "status": 404, "headers": []})
            await send({"type": "http.response.body", "body": b"{}"})
            return
        self.path, self.headers = scope["path"], header_map(scope["headers"])
        message = await receive()
        if message.get("body"):
            assert int(self.headers["content-length"]) == len(message["body"])
            self.seen = json.loads(message["body"])
        self.called.set()
        kind = b"application/json" if self.pieces is None else b"text/event-stream"
        start = {"type": "http.response.start", "status": self.status, "headers": [(b"content-type", kind)]}
        await send(start)
        for piece in self.pieces or ():
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await self._wait(receive)
        if self.disconnected:
            return
        body = b"" if self.pieces is not None else self.body
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        await send({"type": "http.response.body", "body": data, "more_body": False})

    async def _wait(self, receive: Receive) -> None:
        """Until the test lets go, or the client leaves (which a deaf engine does not notice)."""
        if self.hang.is_set():
            return
        hang, gone = asyncio.ensure_future(self.hang.wait()), asyncio.ensure_future(receive())
        waiting = {hang} if self.deaf else {hang, gone}
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            self.disconnected = gone.done()
        finally:
            hang.cancel()
            gone.cancel()


class Replica:
    """The middleware with everything around it."""

    def __init__(self, **options: Any) -> None:
        self.gate = Gate(LoopClock(), hold=0.2)
        self.engine = ScriptedEngine()
        self.mismatches: list[str] = []
        self.aborted: list[str] = []
        self.wakes = 0
        self.app = StitchMiddleware(
            self.engine, self.gate, status=lambda: {"state": "serving", "target": None}, wake=self._wake,
            mismatch=self.mismatches.append, abort=self._abort, **{"grace": 0.05, **options},
        )  # fmt: skip
        self.client = AsgiClient(self.app)
        self.gate.open(PolicyVersion("r", 7))

    def _wake(self) -> None:
        self.wakes += 1

    async def _abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        self.engine.hang.set()
