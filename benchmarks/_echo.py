"""What both sides of benchmarks/gateway.py talk to and are asked by: bare HTTP over asyncio, no framework.

`python _echo.py N SECONDS` serves N engines on free ports and prints these; tokens come every SECONDS.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import ClassVar

TOKENS = 200
HEADERS = b"x-stitch-run: bench\r\nx-stitch-admitted-version: 7\r\n"
REPORT = {
    "finish_reason": {"type": "length"}, "completion_tokens": TOKENS, "run": "bench", "weight_version": "7",
    "weight_version_start": 7, "weight_version_end": 7,
    "weight_versions": [{"version": 7, "start": 0, "end": TOKENS}],
}  # fmt: skip


def answer(value: object, headers: bytes = b"") -> bytes:
    body = json.dumps(value).encode()
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n%scontent-length: %d\r\n\r\n"
    return head % (headers, len(body)) + body


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


GENERATED = answer({"text": "x" * 200, "output_ids": list(range(TOKENS)), "meta_info": REPORT}, HEADERS)
STREAM = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"
    + HEADERS
    + b"\r\n"
)
EVENTS = [
    chunk(b'data: {"text": "tok", "output_ids": [%d], "meta_info": {"completion_tokens": %d}}\n\n' % (i, i))
    for i in range(TOKENS - 1)
]
FINAL = b"data: " + json.dumps({"text": "tok", "meta_info": REPORT}).encode() + b"\n\ndata: [DONE]\n\n"
EVENTS.append(chunk(FINAL) + b"0\r\n\r\n")

STATUS = {
    "/ready": {"ready": True, "run": "bench", "weight_version": "7", "active_requests": 0},
    "/health": {},
    "/v1/models": {"object": "list", "data": [{"id": "echo", "object": "model", "owned_by": "bench"}]},
}
INFO = {"model_path": "echo", "served_model_name": "echo", "is_generation": True, "tp_size": 1, "dp_size": 1}
PATHS = {path.encode(): answer(value) for path, value in STATUS.items()}
for path in ("/server_info", "/get_server_info", "/model_info", "/get_model_info"):
    PATHS[path.encode()] = answer(INFO)
UNKNOWN = b"HTTP/1.1 404 Not Found\r\ncontent-length: 2\r\n\r\n{}"


class Engine(asyncio.Protocol):
    """Answers at once, or streams a token in each beat of a clock that all streams share."""

    streams: ClassVar[set[Engine]] = set()

    def __init__(self) -> None:
        self.data = b""
        self.sent = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:
        self.streams.discard(self)

    def data_received(self, data: bytes) -> None:
        self.data += data
        while (end := self.data.find(b"\r\n\r\n")) >= 0:
            head = self.data[:end].lower()
            size = 0
            if (at := head.find(b"content-length:")) >= 0:
                size = int(head[at + 15 :].split(b"\r\n", 1)[0])
            elif b"transfer-encoding: chunked" in head:
                if (stop := self.data.find(b"0\r\n\r\n", end)) < 0:
                    return
                size = stop + 5 - end - 4
            if len(self.data) < end + 4 + size:
                return
            body, self.data = self.data[end + 4 : end + 4 + size], self.data[end + 4 + size :]
            words = head.split(b" ", 2)
            if len(words) < 3 or words[0] == b"pri":  # a router that tries HTTP/2 first
                self.transport.close()
                return
            self.request(words[1].partition(b"?")[0], body)

    def request(self, path: bytes, body: bytes) -> None:
        if path != b"/generate":
            self.transport.write(PATHS.get(path, UNKNOWN))
        elif b'"stream": true' in body or b'"stream":true' in body:
            self.sent = 0
            self.transport.write(STREAM)
            self.streams.add(self)
        else:
            self.transport.write(GENERATED)

    @classmethod
    async def beat(cls, seconds: float) -> None:
        while True:
            await asyncio.sleep(seconds)
            for number, stream in enumerate(list(cls.streams)):
                if number % 50 == 49:
                    await asyncio.sleep(0)  # a real engine answers its probes meanwhile
                stream.transport.write(EVENTS[stream.sent])
                stream.sent += 1
                if stream.sent == len(EVENTS):
                    cls.streams.discard(stream)


class Client(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self) -> None:
        self.answered: asyncio.Future[bytes] | None = None
        self.data = bytearray()
        self.events = 0
        self.whole = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:
        if self.answered is not None and not self.answered.done():
            self.answered.set_exception(exc or ConnectionError("cut"))

    def send(self, request: bytes) -> asyncio.Future[bytes]:
        """The head of the answer, once it is all there. A stream is counted: ``events``, ``whole``."""
        self.answered = asyncio.get_running_loop().create_future()
        self.data.clear()
        self.transport.write(request)
        return self.answered

    def data_received(self, data: bytes) -> None:
        self.data += data
        assert self.answered is not None
        end = self.data.find(b"\r\n\r\n")
        if end < 0 or self.answered.done():
            return
        head = bytes(self.data[:end]).lower()
        at = head.find(b"content-length:")
        if at >= 0:
            if len(self.data) >= end + 4 + int(head[at + 15 :].split(b"\r\n", 1)[0]):
                self.answered.set_result(head)
            return
        if self.data.endswith(b"\r\n0\r\n\r\n"):
            self.events, self.whole = self.data.count(b"data: "), b"data: [DONE]" in self.data
            self.data.clear()
            self.answered.set_result(head)


async def connect(port: int) -> Client:
    _, client = await asyncio.get_running_loop().create_connection(Client, "127.0.0.1", port)
    return client


async def serve(count: int, beat: float) -> None:
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(Engine, "127.0.0.1", 0, backlog=4096) for _ in range(count)]
    print(json.dumps([server.sockets[0].getsockname()[1] for server in servers]), flush=True)
    await Engine.beat(beat)


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), float(sys.argv[2])))
