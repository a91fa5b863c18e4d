"""The HTTP server of a replica: a port, an application, and its end."""

import asyncio

import pytest

from stitch_core.replica.asgi import Receive, Scope, Send
from stitch_core.replica.server import PortInUse, ServerEnded, listen, serve

pytestmark = pytest.mark.usefixtures("quick_ends")


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "lifespan":
        for answer in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{answer}.complete"})
        return
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


async def get(port: int) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


async def test_serves_until_told_to_end() -> None:
    listener, end = listen("127.0.0.1", 0), asyncio.Event()
    port = listener.getsockname()[1]
    serving = asyncio.ensure_future(serve(app, listener, end))
    assert (await get(port)).endswith(b"ok")
    end.set()
    await serving
    with pytest.raises(ConnectionError):
        await get(port)


async def test_an_app_that_does_not_start() -> None:
    async def broken(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "lifespan.startup.failed", "message": "no weights"})

    listener = listen("127.0.0.1", 0)
    with pytest.raises(ServerEnded, match="ended by itself"):
        await serve(broken, listener, asyncio.Event())
    listener.close()


def test_a_port_in_use() -> None:
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    with pytest.raises(PortInUse, match=f"port {port} on 127.0.0.1 is in use by another process"):
        listen("127.0.0.1", port)
    listener.close()
    listen("127.0.0.1", port).close()


def test_a_host_that_is_not_there() -> None:
    with pytest.raises(OSError, match=r"."):
        listen("no-such-host.invalid", 0)
