"""Engines that answer every request at once, whatever it says, on the routes that a replica passes on."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

from stitch_core.ports import SystemClock
from stitch_core.replica.admission import Gate
from stitch_core.replica.asgi import App, Receive, Scope, Send, send_json
from stitch_core.replica.auth import Guard, Tokens
from stitch_core.replica.metering import Metered, ReplicaMetrics
from stitch_core.replica.middleware import StitchMiddleware
from stitch_core.replica.server import listen, serve
from stitch_core.versions import PolicyVersion

SERVED = PolicyVersion("r", 7)
SPANS = [{"version": str(SERVED), "start": 0, "end": 2}]
REPORT = {"weight_version": str(SERVED), "weight_versions": SPANS}
STATUS: dict[str, Any] = {
    "/server_info": {"tp_size": 1},
    "/model_info": {"model_path": "echo", "weight_version": str(SERVED)},
    "/v1/models": {"object": "list", "data": [{"id": "echo", "object": "model"}]},
    "/v1/loads": {"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 0}]},
    "/get_load": [{"num_reqs": 0, "num_waiting_reqs": 0}],
    "/health_generate": {},
    "/abort_request": {},
}
STATUS |= {"/get_server_info": STATUS["/server_info"], "/get_model_info": STATUS["/model_info"]}


def id_of(body: dict[str, Any]) -> str:
    return str(body["rid"] if isinstance(body["rid"], str) else body["rid"][0])


def generated(body: dict[str, Any]) -> dict[str, Any]:
    meta = {"id": id_of(body), "finish_reason": {"type": "stop"}, "completion_tokens": 2, **REPORT}
    return {"text": "ok", "output_ids": [1, 2], "meta_info": meta}


def completed(body: dict[str, Any]) -> dict[str, Any]:
    choice = {"index": 0, "text": "ok", "finish_reason": "stop"}
    return {"id": id_of(body), "choices": [choice], "usage": {"completion_tokens": 2}, "metadata": REPORT}


async def engine(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "lifespan":
        for step in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{step}.complete"})
        return
    path, data = scope["path"], b""
    while (message := await receive())["type"] == "http.request":
        data += message.get("body", b"")
        if not message.get("more_body"):
            break
    if path in STATUS:
        await send_json(send, 200, STATUS[path], head=scope["method"] == "HEAD")
        return
    body = json.loads(data)
    value = generated(body) if path == "/generate" else completed(body)
    if not body.get("stream"):
        await send_json(send, 200, value)
        return
    headers = [(b"content-type", b"text/event-stream")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    events = f"data: {json.dumps(value)}\n\ndata: [DONE]\n\n".encode()
    await send({"type": "http.response.body", "body": events})


def replica(tokens: Tokens | None = None, engine: App = engine) -> App:
    """All that a replica puts before its engine."""
    clock = SystemClock()
    gate = Gate(clock, hold=0.0)
    gate.open(SERVED)

    async def abort(request_id: str) -> None:
        pass

    app = StitchMiddleware(
        engine, gate, status=lambda: {"target": str(SERVED)}, wake=lambda: None, mismatch=gate.forget,
        abort=abort, replica="echo",
    )  # fmt: skip
    return Guard(Metered(app, ReplicaMetrics(gate, clock, dict), clock), tokens)


@contextlib.asynccontextmanager
async def running(tokens: Tokens | None = None) -> AsyncIterator[str]:
    """The URL of a replica that is there as long as the block."""
    listener, end = listen("127.0.0.1", 0), asyncio.Event()
    serving = asyncio.ensure_future(serve(replica(tokens), listener, end, grace=1))
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        end.set()
        await serving
        listener.close()
