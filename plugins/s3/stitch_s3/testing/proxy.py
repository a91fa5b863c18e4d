"""An HTTP proxy in front of an S3 server that does what networks and busy servers do. In this process.

It speaks enough HTTP for boto3: one request, one answer, with Content-Length. The host name that a request
is signed for stays as it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

Fault = Literal["refuse", "cut_request", "cut_answer", "truncate", "error_before", "error_after",
                "busy", "delay", "twice", "late", "forbid"]  # fmt: skip
"""``refuse``: the connection closes before the request is read. ``cut_request``: half of it goes on.
``cut_answer``: done, and the connection closes. ``truncate``: the answer ends in its middle. ``error_*``:
500, before or after it was done. ``busy``: 503. ``delay``: the answer is slow. ``twice``: the server gets it
two times, the second answer counts. ``late``: it is answered with 500 and done a little later. ``forbid``:
403, which random faults have not, as it is no accident."""

FAULTS: tuple[Fault, ...] = tuple(fault for fault in get_args(Fault) if fault != "forbid")


@dataclass
class Request:
    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes

    def drop(self, *names: str) -> None:
        self.headers = [(name, value) for name, value in self.headers if name.lower() not in names]

    def encode(self) -> bytes:
        lines = [f"{self.method} {self.target} HTTP/1.1", *(f"{n}: {v}" for n, v in self.headers)]
        return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + self.body


class FaultProxy:
    """``plan`` says, for each request, what goes wrong with it; ``change`` may alter it on its way."""

    def __init__(
        self,
        upstream: str,
        plan: Callable[[Request], Fault | None] = lambda request: None,
        *,
        change: Callable[[Request], None] = lambda request: None,
        late: float = 0.3,
    ) -> None:
        parts = urlsplit(upstream)
        self._upstream = (parts.hostname or "127.0.0.1", parts.port or 80)
        self.plan, self.change, self._late = plan, change, late
        self.requests: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.endpoint = ""
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> FaultProxy:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=2**26)
        self.endpoint = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: Any) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def landed(self) -> None:
        """Wait for the writes that are late."""
        late = [task for task in self._tasks if task.get_name() == "late"]
        await asyncio.gather(*late, return_exceptions=True)

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._keep(asyncio.ensure_future(self._serve(reader, writer)))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (request := await _read_request(reader, writer)) is not None:
                self.requests[request.method] += 1
                if not await self._answer(request, writer):
                    return
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _answer(self, request: Request, writer: asyncio.StreamWriter) -> bool:
        """Whether the connection lives on."""
        fault = self.plan(request)
        self.change(request)
        if fault is not None:
            self.faults[fault] += 1
        if fault == "refuse":
            return False
        if fault == "cut_request":
            await self._half(request)
            return False
        if fault in ("error_before", "busy", "late", "forbid"):
            if fault == "late":
                task = asyncio.ensure_future(self._do_late(request))
                task.set_name("late")
                self._keep(task)
            status, code = {"busy": (503, "SlowDown"), "forbid": (403, "AccessDenied")}.get(
                fault, (500, "InternalError")
            )
            head, _, body = _error(status, code).partition(b"\r\n\r\n")
            writer.write(head + b"\r\n\r\n" + (b"" if request.method == "HEAD" else body))
            await writer.drain()
            return True
        answer = await self._forward(request)
        if fault == "twice":
            answer = await self._forward(request)
        if fault == "delay":
            await asyncio.sleep(self._late)
        if fault == "cut_answer":
            return False
        if fault == "error_after":
            answer = _error(500, "InternalError")
        writer.write(answer[: len(answer) * 2 // 3] if fault == "truncate" else answer)
        await writer.drain()
        return fault != "truncate"

    async def _do_late(self, request: Request) -> None:
        await asyncio.sleep(self._late)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await self._forward(request)

    async def _half(self, request: Request) -> None:
        data = request.encode()
        _, writer = await asyncio.open_connection(*self._upstream)
        writer.write(data[: len(data) // 2])
        with contextlib.suppress(OSError):
            await writer.drain()
        writer.close()

    async def _forward(self, request: Request) -> bytes:
        reader, writer = await asyncio.open_connection(*self._upstream, limit=2**26)
        try:
            writer.write(request.encode())
            await writer.drain()
            return await _read_answer(reader, request.method)
        finally:
            writer.close()


async def _head(reader: asyncio.StreamReader) -> tuple[str, list[tuple[str, str]]]:
    text = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = text[:-4].split("\r\n")
    pairs = (line.partition(":") for line in lines)
    return first, [(name, value.strip()) for name, _, value in pairs]


async def _read_request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Request | None:
    try:
        first, headers = await _head(reader)
    except asyncio.IncompleteReadError:
        return None
    method, target, _ = first.split(" ")
    known = _lower(headers)
    if known.get("expect", "").lower() == "100-continue":
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    body = await reader.readexactly(int(known.get("content-length", "0")))
    request = Request(method, target, headers, body)
    request.drop("expect")
    return request


async def _read_answer(reader: asyncio.StreamReader, method: str) -> bytes:
    first, headers = await _head(reader)
    while first.split(" ")[1] == "100":
        first, headers = await _head(reader)
    known, body = _lower(headers), b""
    if method != "HEAD" and first.split(" ")[1] not in ("204", "304"):
        if known.get("transfer-encoding", "").lower() == "chunked":
            body = await _read_chunked(reader)
            headers = [(n, v) for n, v in headers if n.lower() != "transfer-encoding"]
            headers.append(("Content-Length", str(len(body))))
        else:
            body = await reader.readexactly(int(known.get("content-length", "0")))
    lines = [first, *(f"{name}: {value}" for name, value in headers)]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


async def _read_chunked(reader: asyncio.StreamReader) -> bytes:
    body = b""
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        body += await reader.readexactly(size)
        await reader.readexactly(2)
    await reader.readuntil(b"\r\n")
    return body


def _lower(headers: list[tuple[str, str]]) -> Mapping[str, str]:
    return {name.lower(): value for name, value in headers}


def _error(status: int, code: str) -> bytes:
    body = f"<Error><Code>{code}</Code><Message>as planned</Message></Error>".encode()
    head = f"HTTP/1.1 {status} {code}\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def random_faults(rng: random.Random, rate: float) -> Callable[[Request], Fault | None]:
    """Each request meets a fault with this probability, all kinds alike."""
    return lambda request: rng.choice(FAULTS) if rng.random() < rate else None


def ignore_conditions(access_key: str, secret_key: str) -> Callable[[Request], None]:
    """Turns a server into one that ignores conditions: drops them on the way and signs the rest."""
    from botocore.auth import S3SigV4Auth
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials

    auth = S3SigV4Auth(Credentials(access_key, secret_key), "s3", "us-east-1")

    def change(request: Request) -> None:
        known = _lower(request.headers)
        if "if-match" not in known and "if-none-match" not in known:
            return
        request.drop("if-match", "if-none-match", "authorization", "x-amz-date", "x-amz-content-sha256")
        signed = AWSRequest(
            request.method, f"http://{known['host']}{request.target}", dict(request.headers), request.body
        )
        auth.add_auth(signed)
        request.headers = [(name, str(value)) for name, value in signed.headers.items()]

    return change
