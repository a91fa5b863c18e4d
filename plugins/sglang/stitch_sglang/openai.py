"""OpenAI routes: SGLang says the first choice's versions, and none in streams; here all choices say theirs.

SGLang's generations pass ``around_generate_request``, which leaves each choice's versions in the ASGI scope;
``ChoiceVersions``, just outside SGLang's app, puts them into the answer as ``metadata``.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

from stitch_core.replica import sse
from stitch_core.replica.asgi import App, Message, Receive, Scope, Send, encode_json, header_map

from .history import describe_kv

SCOPE_KEY = "stitch.versions"
FIELDS = ("weight_versions", "weight_version", "kv_versions", "kv")

Fields = dict[str, Any]


class ChoiceVersions:
    """Wraps SGLang's app; routes other than OpenAI's pass untouched."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] not in ("/v1/completions", "/v1/chat/completions"):
            await self._app(scope, receive, send)
            return
        versions: dict[int, Fields] = {}
        answer = _Answer(send, versions)
        await self._app({**scope, SCOPE_KEY: versions}, receive, answer.send)


async def around_generate_request(
    original: Any, manager: Any, obj: Any, request: Any = None, *, keeps_kv: bool
) -> AsyncIterator[Any]:
    """TokenizerManager.generate_request, with the versions of what has ended made complete."""
    scope = getattr(request, "scope", None) or {}
    versions = scope.get(SCOPE_KEY)
    async with contextlib.aclosing(original(manager, obj, request)) as contents:
        async for content in contents:
            listed = content if isinstance(content, list) else [content]
            for position, item in enumerate(listed):
                meta = item.get("meta_info")
                if not isinstance(meta, dict) or meta.get("finish_reason") is None:
                    continue
                describe_kv(meta, keeps_kv=keeps_kv)
                if versions is not None:
                    index = position if isinstance(content, list) else item.get("index", 0)
                    versions[index] = {name: meta[name] for name in FIELDS if name in meta}
            yield content


class _Answer:
    def __init__(self, send: Send, versions: dict[int, Fields]) -> None:
        self._send = send
        self._versions = versions
        self._streams: bool | None = None
        self._parts: list[bytes] = []
        self._splitter = sse.Splitter()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            if 200 <= message["status"] < 300:
                kind = header_map(message.get("headers", ())).get("content-type", "")
                self._streams = kind.startswith("text/event-stream")
        elif message["type"] == "http.response.body" and self._streams is not None:
            last = not message.get("more_body", False)
            body = (
                self._stream(message.get("body", b""), last) if self._streams else self._whole(message, last)
            )
            message = {**message, "body": body}
        await self._send(message)

    def _whole(self, message: Message, last: bool) -> bytes:
        self._parts.append(message.get("body", b""))
        if not last:
            return b""
        body = b"".join(self._parts)
        try:
            value = json.loads(body)
        except ValueError:
            return body
        if not isinstance(value, dict) or not isinstance(value.get("choices"), list):
            return body
        _add(value, [self._versions.get(index, {}) for index in range(len(value["choices"]))])
        return encode_json(value)

    def _stream(self, data: bytes, last: bool) -> bytes:
        events = self._splitter.feed(data)
        if last and (rest := self._splitter.finish()):
            events.append(rest)
        return b"".join(self._event(event) for event in events)

    def _event(self, event: bytes) -> bytes:
        data = sse.data_of(event)
        if data is None or '"finish_reason":"' not in data.replace(" ", ""):
            return event
        try:
            value = json.loads(data)
        except ValueError:
            return event
        choices = value.get("choices") if isinstance(value, dict) else None
        ended = [one.get("index", 0) for one in choices or () if one.get("finish_reason") is not None]
        if not ended:
            return event
        _add(value, [self._versions.get(index, {}) for index in ended])
        return sse.with_data(event, value)


def _add(value: dict[str, Any], choices: list[Fields]) -> None:
    """One choice: its fields as they are. Several: what is a list or differs, listed by choice."""
    metadata = dict(value.get("metadata") or {})
    if len(choices) == 1:
        metadata.update(choices[0])
    elif choices:
        metadata["weight_versions"] = [one.get("weight_versions", []) for one in choices]
        if any("kv_versions" in one for one in choices):
            metadata["kv_versions"] = [one.get("kv_versions", []) for one in choices]
        metadata["kv"] = "mixed" if any(one.get("kv") == "mixed" for one in choices) else "uniform"
    value["metadata"] = metadata
