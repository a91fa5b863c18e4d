"""A small streaming reverse proxy as an ASGI app: what is answered to it is answered through it, or cut."""

from __future__ import annotations

import asyncio

import aiohttp

from ...versions import unavailable
from ..asgi import Headers, Message, Receive, Scope, Send, send_refusal, without

# Of one connection, not of the message.
HOP_BY_HOP = (
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer",
    "transfer-encoding", "upgrade",
)  # fmt: skip


class ReverseProxy:
    """Passes requests to ``base``. The session is the caller's, with ``auto_decompress=False``."""

    def __init__(self, session: aiohttp.ClientSession, base: str, *, connect: float = 5.0) -> None:
        """``connect``: seconds to connect. A generation may take as long as it wants."""
        self._session = session
        self._base = base
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            more = message.get("more_body", False)
        work = asyncio.ensure_future(self._pass(scope, body, send))
        gone = asyncio.ensure_future(_until_disconnect(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # Cancelled in mid-request it closes its connection, and the engine aborts what it ran.
            gone.cancel()
            if not work.done():
                work.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
        if not work.cancelled():
            work.result()

    async def _pass(self, scope: Scope, body: bytes, send: Send) -> None:
        started = False
        query = scope.get("query_string", b"").decode("latin-1")
        url = f"{self._base}{scope['raw_path'].decode('latin-1')}{'?' if query else ''}{query}"
        headers = without(scope["headers"], (*HOP_BY_HOP, "host", "content-length"))
        if not any(name == b"accept-encoding" for name, _ in headers):
            # Where nothing is said a server may answer in any encoding.
            headers.append((b"accept-encoding", b"identity"))
        try:
            async with self._session.request(
                scope["method"],
                url,
                data=body or None,
                headers=[(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers],
                skip_auto_headers=("User-Agent",),
                timeout=self._timeout,
                allow_redirects=False,
            ) as answer:
                started = True
                await send(_start(answer))
                async for chunk in answer.content.iter_any():
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            # After the start there is nothing true left to say: the answer stays incomplete.
            if not started:
                await send_refusal(send, unavailable(f"the engine does not answer: {_text(error)}"))


def _start(answer: aiohttp.ClientResponse) -> Message:
    raw: Headers = [(bytes(name), bytes(value)) for name, value in answer.raw_headers]
    return {
        "type": "http.response.start",
        "status": answer.status,
        "headers": [(name.lower(), value) for name, value in without(raw, HOP_BY_HOP)],
    }


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")
