"""The fake engine's HTTP face: the SGLang subset that Stitch uses, with a real server's bad manners."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..ports import EngineRefused
from ..replica.asgi import (
    Message,
    Receive,
    Scope,
    Send,
    encode_json,
    header_map,
    send_json,
    without,
)
from .fake_engine import FakeEngine, FakeRequest, state_logprobs

UpdateFault = Literal["success_false", "changed_400", "dropped", "changed_dropped", "hangs"]


class Dropped(Exception):
    """Ends a connection without an answer."""


@dataclass
class Manners:
    """What a real server does to its clients.

    ``split``: bytes per body message of a stream. ``update``: what the next update_weights_from_disk does:
    "success_false" answers 200 and changes nothing; "changed_400" answers 400 although the weights did
    change; "dropped" and "changed_dropped" end the connection without an answer; "hangs" never answers.
    ``versions``: report versions at all; ``kv_versions``: those of the prompt's KV too. ``one_choice``:
    OpenAI routes report the versions of the first choice only and none in streams, as SGLang 0.5.23 does.
    ``deaf``: do not notice that a client left. ``encoding``: gzip or deflate whatever is answered to who does
    not ask for "identity", or to everybody (``stubborn``). ``logprobs``: give those of the prompt when asked.
    """

    split: int = 7
    update: UpdateFault | None = None
    versions: bool = True
    kv_versions: bool = False
    one_choice: bool = False
    deaf: bool = False
    encoding: Literal["gzip", "deflate"] | None = None
    stubborn: bool = False
    logprobs: bool = True


@dataclass
class FakeServer:
    """An ASGI app over a FakeEngine. Text is bytes: one token for each byte of UTF-8."""

    engine: FakeEngine
    manners: Manners = field(default_factory=Manners)

    def __post_init__(self) -> None:
        self.routes = self._routes()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        if self.manners.encoding is not None:
            asked = header_map(scope["headers"]).get("accept-encoding", "*")
            if self.manners.stubborn or asked != "identity":
                send = _encoding(send, self.manners.encoding)
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        value = json.loads(body) if body else {}
        route = f"{scope['method']} {scope['path']}"
        if scope["path"] in ("/generate", "/v1/completions", "/v1/chat/completions"):
            await self._generate(scope["path"], value, receive, send)
            return
        handler = self.routes.get(route)
        if handler is None:
            await send_json(send, 404, {"detail": "Not Found"})
            return
        try:
            status, answer = await handler(value)
        except Dropped:
            await _half_an_answer(send)
            return
        if isinstance(answer, str):
            headers = [(b"content-type", b"text/plain"), (b"content-length", str(len(answer)).encode())]
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": answer.encode()})
        else:
            await send_json(send, status, answer)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while (await receive())["type"] != "lifespan.shutdown":
            await send({"type": "lifespan.startup.complete"})
        await self.engine.close()
        await send({"type": "lifespan.shutdown.complete"})

    # -------------------------------------------------------------------------------------- generation

    async def _generate(self, path: str, value: dict[str, Any], receive: Receive, send: Send) -> None:
        if "weight_version" in value:
            await send_json(send, 400, {"error": {"message": "unknown field weight_version"}})
            return
        requests = _requests(path, value)
        # A real engine listens while it generates; what it hears is that the client left.
        gone = asyncio.ensure_future(_until_disconnect(receive))
        for request in requests:
            self.engine.add(request)
        try:
            if value.get("stream"):
                await self._stream(path, requests, send, gone)
            elif await self._wait(requests, gone):
                await send_json(send, 200, self._answer(path, value, requests))
        except Dropped:
            if not value.get("stream"):
                await _half_an_answer(send)
        finally:
            gone.cancel()
            for request in requests:
                self.engine.drop(request)

    async def _wait(self, requests: list[FakeRequest], gone: asyncio.Future[None]) -> bool:
        """Until all are over; False if the client left first. Raises Dropped if the engine died."""
        for request in requests:
            async for _ in self._news(request, gone):
                pass
        return not gone.done() or self.manners.deaf

    async def _news(self, request: FakeRequest, gone: asyncio.Future[None]) -> AsyncIterator[None]:
        """Once for each time that something came, at least for the end."""
        while not request.over:
            request.news.clear()
            news = asyncio.ensure_future(request.news.wait())
            waiting: set[asyncio.Future[Any]] = {news} if self.manners.deaf else {news, gone}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            news.cancel()
            if gone.done() and not self.manners.deaf:
                return
            yield
        if request.lost:
            raise Dropped("the engine died")

    async def _stream(
        self, path: str, requests: list[FakeRequest], send: Send, gone: asyncio.Future[None]
    ) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for index, request in enumerate(requests):
            async for _ in self._news(request, gone):
                if not request.over:
                    await self._send_event(send, self._chunk(path, requests, index, final=False))
            if gone.done() and not self.manners.deaf:
                return
            await self._send_event(send, self._chunk(path, requests, index, final=True))
        await self._send_event(send, "[DONE]")
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_event(self, send: Send, value: Any) -> None:
        data = b"data: " + (value.encode() if isinstance(value, str) else encode_json(value)) + b"\n\n"
        step = self.manners.split
        for at in range(0, len(data), step):
            await send({"type": "http.response.body", "body": data[at : at + step], "more_body": True})

    # ----------------------------------------------------------------------------------------- answers

    def _answer(self, path: str, value: dict[str, Any], requests: list[FakeRequest]) -> Any:
        if path == "/generate":
            answers = [self._generated(request) for request in requests]
            if value.get("return_logprob") and value.get("logprob_start_len") == 0 and self.manners.logprobs:
                for request, answer in zip(requests, answers, strict=True):
                    answer["meta_info"]["input_token_logprobs"] = _prompt_logprobs(request)
            return answers if _many(value) else answers[0]
        chat = path == "/v1/chat/completions"
        choices = [_choice(request, i, chat) for i, request in enumerate(requests)]
        tokens = sum(len(request.output) for request in requests)
        usage = {"prompt_tokens": len(requests[0].prompt), "completion_tokens": tokens}
        return {
            "id": requests[0].rid, "choices": choices, "usage": usage, "metadata": self._metadata(requests),
        }  # fmt: skip

    def _generated(self, request: FakeRequest) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": request.rid,
            "finish_reason": request.finish_reason,
            "prompt_tokens": len(request.prompt),
            "completion_tokens": len(request.output),
            "cached_tokens": request.cached_tokens,
        }
        if self.manners.versions:
            # What the tokenizer process believes now, wrong or not; spans come with the end only.
            meta["weight_version"] = self.engine.label
            if request.finish_reason is not None:
                meta["weight_versions"] = request.spans()
                if self.manners.kv_versions:
                    meta["kv_versions"] = request.kv_spans()
        return {"text": _text(request.output), "output_ids": list(request.output), "meta_info": meta}

    def _chunk(self, path: str, requests: list[FakeRequest], index: int, *, final: bool) -> dict[str, Any]:
        request = requests[index]
        if path == "/generate":
            value = self._generated(request)
            return {**value, "index": index} if len(requests) > 1 else value
        choice = _choice(request, index, chat=False) if final else {"index": index, "finish_reason": None}
        chunk: dict[str, Any] = {"id": requests[0].rid, "choices": [choice]}
        if final and not self.manners.one_choice:
            chunk["metadata"] = self._metadata([request])
        return chunk

    def _metadata(self, requests: list[FakeRequest]) -> dict[str, Any]:
        if not self.manners.versions:
            return {}
        several = len(requests) > 1 and not self.manners.one_choice
        spans = [request.spans() for request in requests]
        fields: dict[str, Any] = {
            "weight_version": self.engine.label,
            "weight_versions": spans if several else spans[0],
        }
        if self.manners.kv_versions:
            kv = [request.kv_spans() for request in requests]
            fields["kv_versions"] = kv if several else kv[0]
        return fields

    # ----------------------------------------------------------------------------------------- control

    def _routes(self) -> dict[str, Callable[[dict[str, Any]], Awaitable[tuple[int, Any]]]]:
        return {
            "POST /abort_request": self._abort,
            "POST /pause_generation": self._pause,
            "POST /continue_generation": self._continue,
            "POST /update_weights_from_disk": self._update,
            "POST /update_weight_version": self._relabel,
            "POST /flush_cache": self._flush,
            "GET /flush_cache": self._flush,
            "GET /model_info": self._model_info,
            "GET /server_info": self._server_info,
            "GET /health": self._health,
            "GET /v1/models": self._models,
        }

    async def _abort(self, value: dict[str, Any]) -> tuple[int, Any]:
        if value.get("abort_all") or value.get("rid"):
            self.engine.abort_prefix("" if value.get("abort_all") else value["rid"])
        return 200, ""

    async def _pause(self, value: dict[str, Any]) -> tuple[int, Any]:
        await self.engine.pause(value.get("mode", "abort"))
        return 200, {"message": "Generation paused successfully.", "status": "ok"}

    async def _continue(self, value: dict[str, Any]) -> tuple[int, Any]:
        await self.engine.resume()
        return 200, {"message": "Generation continued successfully.", "status": "ok"}

    async def _update(self, value: dict[str, Any]) -> tuple[int, Any]:
        fault, self.manners.update = self.manners.update, None
        if fault == "success_false":
            return 200, {"success": False, "message": "Failed to update weights."}
        if fault == "dropped":
            raise Dropped
        if fault == "hangs":
            await asyncio.Event().wait()
        try:
            tensors = await asyncio.to_thread(self.engine.read, Path(value["model_path"]), None)
        except EngineRefused as error:
            return 400, {"success": False, "message": str(error)}
        label = value.get("weight_version") or self.engine.label
        if fault == "changed_400":
            self.engine.take(tensors, self.engine.label)
            return 400, {"success": False, "message": "Weights were updated, but something else failed."}
        self.engine.take(tensors, label)
        if fault == "changed_dropped":
            raise Dropped
        if value.get("flush_cache", True) and not self.engine.flush_cache():
            text = "Weights were updated, but the cache was not flushed: requests are running or queued."
            return 400, {"success": False, "message": text}
        return 200, {
            "success": True,
            "message": "Succeeded to update model weights.",
            "num_paused_requests": 0,
        }

    async def _relabel(self, value: dict[str, Any]) -> tuple[int, Any]:
        if value.get("abort_all_requests", True):
            self.engine.abort_prefix("")
        self.engine.label = value["new_version"]
        return 200, {"success": True, "message": "", "new_version": self.engine.label}

    async def _flush(self, value: dict[str, Any]) -> tuple[int, Any]:
        return (200, "Cache flushed.\n") if self.engine.flush_cache() else (400, "Requests are running.\n")

    async def _model_info(self, value: dict[str, Any]) -> tuple[int, Any]:
        return 200, {"model_path": str(self.engine.boot), "weight_version": self.engine.label}

    async def _server_info(self, value: dict[str, Any]) -> tuple[int, Any]:
        # Durations of its start, which no two starts share.
        seconds = int(self.engine.instance[:8], 16) / 1e6
        return 200, {"startup_time": {"load_weight": seconds}, "version": "fake", "internal_states": []}

    async def _health(self, value: dict[str, Any]) -> tuple[int, Any]:
        return 200, ""

    async def _models(self, value: dict[str, Any]) -> tuple[int, Any]:
        return 200, {"object": "list", "data": [{"id": "fake", "created": int(time.time())}]}


def _encoding(send: Send, encoding: str) -> Send:
    """As compressing middleware does, piece by piece."""
    packer = zlib.compressobj(wbits=31 if encoding == "gzip" else 15)

    async def packed(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = without(message["headers"], ("content-length",))
            message = {**message, "headers": [*headers, (b"content-encoding", encoding.encode())]}
        else:
            more = message.get("more_body", False)
            data = packer.compress(message["body"])
            data += packer.flush(zlib.Z_SYNC_FLUSH if more else zlib.Z_FINISH)
            message = {**message, "body": data}
        await send(message)

    return packed


def _prompt_logprobs(request: FakeRequest) -> list[list[Any]]:
    """[log-probability, token, text], none for the first token; of the weights that computed the rows."""
    values = state_logprobs(request.rows[0].state, len(request.prompt)) if request.rows else ()
    return [[value, token, None] for value, token in zip((None, *values), request.prompt, strict=False)]


async def _half_an_answer(send: Send) -> None:
    """An answer that is never completed: the server cuts the connection."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"9")]})
    await send({"type": "http.response.body", "body": b"{", "more_body": True})


async def _until_disconnect(receive: Receive) -> None:
    message: Message = {"type": ""}
    while message["type"] != "http.disconnect":
        message = await receive()


def _many(value: dict[str, Any]) -> bool:
    """Whether /generate answers with a list."""
    given = value.get("text", value.get("input_ids"))
    nested = isinstance(given, list) and bool(given) and isinstance(given[0], (str, list))
    return nested or value.get("sampling_params", {}).get("n", 1) > 1


def _requests(path: str, value: dict[str, Any]) -> list[FakeRequest]:
    """One for each prompt and copy; ids of several begin with the id of the whole."""
    if path == "/generate":
        params, given = value.get("sampling_params", {}), value.get("text", value.get("input_ids"))
    elif path == "/v1/completions":
        params, given = value, value["prompt"]
    else:
        params, given = value, json.dumps(value["messages"])
    prompts = given if isinstance(given, list) and isinstance(given[0], (str, list)) else [given]
    copies = params.get("n", 1)
    most = params.get("max_new_tokens", params.get("max_tokens", 16))
    rids = value.get("rid") or uuid.uuid4().hex
    if not isinstance(rids, list):
        rids = [rids] if len(prompts) == 1 else [f"{rids}_{i}" for i in range(len(prompts))]
    keys = value.get("extra_key") or ""
    requests = []
    for i, prompt in enumerate(prompts):
        tokens = tuple(prompt.encode() if isinstance(prompt, str) else prompt)
        for copy in range(copies):
            rid = rids[i] if copies == 1 else f"{rids[i]}_{copy}"
            requests.append(FakeRequest(rid, tokens, most, keys[i] if isinstance(keys, list) else keys, copy))
    return requests


def _choice(request: FakeRequest, index: int, chat: bool) -> dict[str, Any]:
    text = _text(request.output)
    body = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
    return {"index": index, **body, "finish_reason": (request.finish_reason or {}).get("type")}


def _text(tokens: list[int]) -> str:
    return "".join(chr(ord("a") + token) for token in tokens)
