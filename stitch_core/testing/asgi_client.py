"""A client that calls an ASGI app in the same event loop, without sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any

from ..replica.asgi import App, Message, header_map

_ABSENT: Any = object()


class Call:
    """One request in flight, and what came back so far."""

    def __init__(self, app: App, scope: dict[str, Any], body: bytes) -> None:
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.body = bytearray()
        self.chunks: list[bytes] = []
        self.complete = False
        self._incoming: asyncio.Queue[Message] = asyncio.Queue()
        self._incoming.put_nowait({"type": "http.request", "body": body, "more_body": False})
        self._gone = False
        self._reads = asyncio.Event()
        self._reads.set()
        self._changed = asyncio.Event()
        self._task = asyncio.ensure_future(app(scope, self._receive, self._send))
        self._task.add_done_callback(lambda task: self._changed.set())

    def disconnect(self) -> None:
        """The client leaves."""
        self._gone = True
        self._reads.set()
        self._incoming.put_nowait({"type": "http.disconnect"})

    def stop_reading(self) -> None:
        """Take no more of the answer until ``read_on``: who sends any waits, as behind a full socket."""
        self._reads.clear()

    def read_on(self) -> None:
        self._reads.set()

    async def finished(self, timeout: float = 60.0) -> Call:
        """Wait until the app has returned; raises what it raised."""
        async with asyncio.timeout(timeout):
            await self._task
        return self

    async def until(self, condition: Callable[[Call], bool], timeout: float = 60.0) -> Call:
        """Wait until ``condition`` holds of what came back."""
        async with asyncio.timeout(timeout):
            while not condition(self):
                assert not self._task.done(), f"the app has returned: {bytes(self.body)!r}"
                self._changed.clear()
                await self._changed.wait()
        return self

    @property
    def returned(self) -> bool:
        return self._task.done()

    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)

    def events(self) -> list[Any]:
        """The data of each server-sent event; JSON where it is JSON."""
        found = []
        for block in self.body.decode().replace("\r\n", "\n").split("\n\n"):
            data = "\n".join(line[5:].strip() for line in block.split("\n") if line.startswith("data:"))
            if data:
                found.append(data if data == "[DONE]" else json.loads(data))
        return found

    async def _receive(self) -> Message:
        return await self._incoming.get()

    async def _send(self, message: Message) -> None:
        await self._reads.wait()
        if self._gone:
            return
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], header_map(message.get("headers", ()))
        elif message["type"] == "http.response.body":
            self.chunks.append(message.get("body", b""))
            self.body += self.chunks[-1]
            self.complete = not message.get("more_body", False)
            if self.complete:
                self._incoming.put_nowait({"type": "http.disconnect"})
        self._changed.set()


class AsgiClient:
    """Calls ``app`` as a server would."""

    def __init__(self, app: App) -> None:
        self.app = app

    def start(
        self,
        method: str,
        path: str,
        json_body: Any = _ABSENT,
        *,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
    ) -> Call:
        """Begin a request; ``path`` as the server hands it on, percent-decoded."""
        if json_body is not _ABSENT:
            body = json.dumps(json_body).encode()
        fields = {"content-length": str(len(body)), **(headers or {})}
        target, _, query = path.partition("?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": target,
            "raw_path": target.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [(name.lower().encode(), value.encode()) for name, value in fields.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }
        return Call(self.app, scope, body)

    async def request(self, method: str, path: str, json_body: Any = _ABSENT, **options: Any) -> Call:
        """A whole request."""
        return await self.start(method, path, json_body, **options).finished()

    async def get(self, path: str, **options: Any) -> Call:
        return await self.request("GET", path, **options)

    async def post(self, path: str, json_body: Any = _ABSENT, **options: Any) -> Call:
        return await self.request("POST", path, json_body, **options)
