"""The HTTP face: SGLang's routes as one plain ASGI app. Control routes answer when the engine has done it.

There is no cache between requests, so flushes have nothing to do; `flush_cache` refuses while requests run
or wait, as SGLang does, and `update_weights_from_disk` succeeds where SGLang would report a failed flush.
It demands a `weight_version`, because one label must not name two sets of weights.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from stitch_core.ports import EngineError, EngineRefused

from . import asgi
from .api import BadRequest, Limits, answer, final_text, make_request, parse_generate
from .asgi import Disconnected, HttpError, Message, Receive, Scope, Send, read_json, unless_gone
from .engine import EmbeddedEngine, Generation
from .openai import OpenAICall, completion, delta, ending, metadata, parse_openai, usage
from .sampling import SamplingParams
from .scheduler import Request
from .tokenizer import Tokenizer, visible
from .worker import EngineFailed

Handler = Callable[[Receive, Send], Awaitable[None]]
HEALTH_GENERATE_TIMEOUT = 20.0


class Server:
    """An ASGI app over one engine. Starts and closes it with the lifespan."""

    def __init__(self, engine: EmbeddedEngine, tokenizer: Tokenizer | None, name: str | None = None) -> None:
        """`name`: the served model's (default: the checkpoint directory's)."""
        self.engine = engine
        self.name = name or Path(engine.model_path).name
        self.limits = Limits(engine.config, engine.max_len, tokenizer)
        both = ("GET", "POST")
        self._routes: dict[str, tuple[tuple[str, ...], Handler]] = {
            "/generate": (("POST", "PUT"), self._generate),
            "/v1/completions": (("POST",), lambda r, s: self._openai(r, s, chat=False)),
            "/v1/chat/completions": (("POST",), lambda r, s: self._openai(r, s, chat=True)),
            "/v1/models": (("GET",), self._models),
            "/v1/loads": (("GET",), self._loads),
            "/pause_generation": (("POST",), self._pause),
            "/continue_generation": (("POST",), self._continue),
            "/abort_request": (("POST",), self._abort),
            "/update_weights_from_disk": (("POST",), self._update),
            "/flush_cache": (both, self._flush),
            "/health": (("GET",), self._health),
            "/health_generate": (("GET",), self._health_generate),
            "/model_info": (("GET",), self._model_info),
            "/get_model_info": (("GET",), self._model_info),
            "/server_info": (("GET",), self._server_info),
            "/get_server_info": (("GET",), self._server_info),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        if scope["type"] != "http":
            raise ValueError(f"no such scope: {scope['type']}")
        started = False

        async def note_start(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._handler(scope)(receive, note_start)
        except Disconnected:
            return
        except (BadRequest, HttpError, EngineFailed, EngineError) as error:
            if started:
                raise
            status = (
                error.status
                if isinstance(error, HttpError)
                else 400
                if isinstance(error, BadRequest)
                else 503
            )
            await asgi.send_error(send, status, str(error))

    def _handler(self, scope: Scope) -> Handler:
        entry = self._routes.get(scope["path"])
        if entry is None:
            raise HttpError(404, f"no route {scope['path']}")
        methods, handler = entry
        if scope["method"] not in methods:
            raise HttpError(405, f"{scope['path']} takes {' or '.join(methods)}")
        encodings = [value for name, value in scope["headers"] if name == b"content-encoding"]
        if any(value.lower() != b"identity" for value in encodings):
            raise HttpError(415, "compressed request bodies are not supported")
        return handler

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                self.engine.start()
                await send({"type": "lifespan.startup.complete"})
            else:
                await self.engine.close()
                await send({"type": "lifespan.shutdown.complete"})
                return

    # ------------------------------------------------------------------------------------------ generation

    async def _generate(self, receive: Receive, send: Send) -> None:
        call = parse_generate(await read_json(receive), self.limits)
        start = time.monotonic()
        generation = self._start(call.requests)
        try:
            if call.stream:
                events = self._generate_events(generation, call.logprobs, call.many, start)
                await unless_gone(receive, self._send_events(send, events))
                return
            outcomes = await unless_gone(receive, generation.outcomes())
        finally:
            self.engine.cancel(generation)
        latency = time.monotonic() - start
        answers = [
            answer(request, outcome, self.limits, logprobs=call.logprobs, latency=latency)
            for request, outcome in zip(call.requests, outcomes, strict=True)
        ]
        await asgi.send_json(send, 200, answers if call.many else answers[0])

    async def _generate_events(
        self, generation: Generation, logprobs: bool, many: bool, start: float
    ) -> AsyncIterator[dict[str, Any]]:
        """SGLang's stream: everything so far each time; versions and log-probabilities only at the end."""
        index = {request: i for i, request in enumerate(generation.requests)}
        tokens: dict[Request, list[int]] = {request: [] for request in generation.requests}
        async for event in generation.events():
            request = event.request
            if event.outcome is not None:
                latency = time.monotonic() - start
                value = answer(request, event.outcome, self.limits, logprobs=logprobs, latency=latency)
            else:
                tokens[request] += event.tokens
                value = {
                    "text": self._visible(request, tokens[request]),
                    "output_ids": list(tokens[request]),
                    "meta_info": {
                        "id": request.rid,
                        "finish_reason": None,
                        "prompt_tokens": len(request.prompt),
                        "completion_tokens": len(tokens[request]),
                        "cached_tokens": 0,
                    },
                }
            yield {**value, "index": index[request]} if many else value

    async def _openai(self, receive: Receive, send: Send, *, chat: bool) -> None:
        call = parse_openai(await read_json(receive), self.limits, chat=chat, model=self.name)
        generation = self._start(call.requests)
        try:
            if call.stream:
                await unless_gone(receive, self._send_events(send, self._openai_events(generation, call)))
                return
            outcomes = await unless_gone(receive, generation.outcomes())
        finally:
            self.engine.cancel(generation)
        await asgi.send_json(send, 200, completion(call, outcomes, self.limits))

    async def _openai_events(self, generation: Generation, call: OpenAICall) -> AsyncIterator[dict[str, Any]]:
        index = {request: i for i, request in enumerate(call.requests)}
        tokens: dict[Request, list[int]] = {request: [] for request in call.requests}
        sent: dict[Request, str | None] = dict.fromkeys(call.requests)
        outcomes = {}
        async for event in generation.events():
            request = event.request
            before = sent[request]
            end = None
            if event.outcome is not None:
                outcomes[request] = event.outcome
                text = final_text(event.outcome, self.limits)
                end = ending(call, request, event.outcome, self.limits)
            else:
                tokens[request] += event.tokens
                text = self._visible(request, tokens[request])
            if end is None and text == before:
                continue
            new = text[len(before or "") :]
            sent[request] = text
            chunk = call.envelope(
                [delta(call, index[request], new, first=before is None, end=end)], chunk=True
            )
            if event.outcome is not None:
                chunk["metadata"] = metadata([request], [event.outcome])
            yield chunk
        if call.include_usage:
            total = usage(call, [outcomes[r] for r in call.requests])
            yield {**call.envelope([], chunk=True), "usage": total}

    def _start(self, requests: list[Request]) -> Generation:
        for request in requests:
            if self.engine.in_flight(request.rid):
                raise BadRequest(f"a request with rid {request.rid!r} is in flight")
        return self.engine.generate(requests)

    def _visible(self, request: Request, tokens: list[int]) -> str:
        return visible(self.limits.decode(tokens), request.params.stop)

    async def _send_events(self, send: Send, events: AsyncIterator[Any]) -> None:
        """A stream that breaks ends with an error event and without `[DONE]`."""
        try:
            await asgi.send_events(send, events)
        except EngineFailed as error:
            body = b"data: " + asgi.encode({"error": {"message": str(error), "code": 503}}) + b"\n\n"
            await send({"type": "http.response.body", "body": body, "more_body": False})

    # --------------------------------------------------------------------------------------------- control

    async def _pause(self, receive: Receive, send: Send) -> None:
        mode = _object(await read_json(receive, {})).get("mode", "abort")
        if mode not in ("abort", "retract", "in_place"):
            raise BadRequest(f"mode must be abort, retract or in_place, not {mode!r}")
        await self.engine.pause(mode)
        await asgi.send_json(send, 200, {"message": "Generation paused.", "status": "ok"})

    async def _continue(self, receive: Receive, send: Send) -> None:
        await read_json(receive, {})
        await self.engine.resume()
        await asgi.send_json(send, 200, {"message": "Generation continued.", "status": "ok"})

    async def _abort(self, receive: Receive, send: Send) -> None:
        body = _object(await read_json(receive, {}))
        if body.get("abort_all") is True:
            await self.engine.abort_all()
        elif isinstance(body.get("rid"), str) and body["rid"]:
            await self.engine.abort(body["rid"])
        else:
            raise BadRequest("give rid, the id of a request, or abort_all: true")
        await asgi.send_bytes(send, 200, b"", "text/plain")

    async def _update(self, receive: Receive, send: Send) -> None:
        body = _object(await read_json(receive))
        path, label = body.get("model_path"), body.get("weight_version")
        if not isinstance(path, str) or not path:
            raise BadRequest("model_path must be the path of a checkpoint directory")
        if not isinstance(label, str) or not label:
            raise BadRequest("weight_version must say which version these weights are")
        try:
            await self.engine.load_weights(
                Path(path), label, abort_all=body.get("abort_all_requests") is True
            )
        except EngineRefused as error:
            await asgi.send_json(
                send, 400, {"success": False, "message": str(error), "num_paused_requests": 0}
            )
            return
        message = f"Succeeded to update model weights to {label}."
        await asgi.send_json(send, 200, {"success": True, "message": message, "num_paused_requests": 0})

    async def _flush(self, receive: Receive, send: Send) -> None:
        running, waiting = await self.engine.counts()
        if running or waiting:
            text = f"Failed to flush the cache: {running} requests running, {waiting} waiting.\n"
            await asgi.send_text(send, 400, text)
        else:
            await asgi.send_text(send, 200, "Cache flushed.\n")

    # ---------------------------------------------------------------------------------------- information

    async def _health(self, receive: Receive, send: Send) -> None:
        await self.engine.health()
        await asgi.send_bytes(send, 200, b"", "text/plain")

    async def _health_generate(self, receive: Receive, send: Send) -> None:
        params = SamplingParams(max_new_tokens=1, temperature=0.0)
        request = make_request(f"HEALTH_CHECK_{uuid.uuid4().hex}", [0], params, self.limits)
        generation = self.engine.generate([request])
        try:
            await asyncio.wait_for(generation.outcomes(), HEALTH_GENERATE_TIMEOUT)
        except TimeoutError:
            raise HttpError(503, f"no token in {HEALTH_GENERATE_TIMEOUT:g} s") from None
        finally:
            self.engine.cancel(generation)
        await asgi.send_bytes(send, 200, b"", "text/plain")

    async def _models(self, receive: Receive, send: Send) -> None:
        card = {
            "id": self.name,
            "object": "model",
            "owned_by": "stitch",
            "root": self.engine.model_path,
            "max_model_len": self.engine.max_len,
        }
        await asgi.send_json(send, 200, {"object": "list", "data": [card]})

    async def _loads(self, receive: Receive, send: Send) -> None:
        running, waiting = await self.engine.counts()
        load = {
            "dp_rank": 0,
            "num_running_reqs": running,
            "num_waiting_reqs": waiting,
            "num_total_reqs": running + waiting,
        }
        await asgi.send_json(send, 200, {"timestamp": time.time(), "dp_rank_count": 1, "loads": [load]})

    async def _model_info(self, receive: Receive, send: Send) -> None:
        await asgi.send_json(send, 200, await self._info())

    async def _server_info(self, receive: Receive, send: Send) -> None:
        info = await self._info()
        options = self.engine.options
        info |= {
            "instance": (await self.engine.identity()).instance,
            "max_len": self.engine.max_len,
            "max_running_requests": options.max_running,
            "prefill_rows": options.prefill_rows,
            "pace": options.pace,
            "paused": await self.engine.paused(),
            "status": "ready",
        }
        await asgi.send_json(send, 200, info)

    async def _info(self) -> dict[str, Any]:
        return {
            "model_path": self.engine.model_path,
            "tokenizer_path": self.engine.model_path if self.limits.tokenizer else None,
            "served_model_name": self.name,
            "is_generation": True,
            "weight_version": (await self.engine.identity()).label,
            "engine": "stitch-embedded",
        }


def _object(body: Any) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    return body
