"""The gateway judges request lines and bodies as a replica does; every refusal is in the one envelope."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from aiohttp import web

from stitch_core.replica.asgi import BODY_SECONDS, clean_path, decoded, late_body
from stitch_core.replica.routes import BLOCKED
from stitch_core.requests import Refused
from stitch_core.versions import Refusal, malformed

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Router:
    """Finds the handler of a clean path: ``//generate`` and ``/x/../generate`` are ``/generate``."""

    def __init__(self, routes: Iterable[web.RouteDef]) -> None:
        self._handlers: dict[str, dict[str, Handler]] = {}
        for route in routes:
            self._handlers.setdefault(route.path, {})[route.method] = route.handler

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        path = path_of(request)
        methods = self._handlers.get(path)
        if methods is None:
            if path in BLOCKED:
                raise Refused(
                    Refusal(403, "RouteBlocked", f"{path} would bypass the replicas' gates", "never")
                )
            raise Refused(Refusal(404, "RouteUnknown", f"{path} is not served", "never"))
        handler = methods.get("GET" if request.method == "HEAD" else request.method)
        if handler is not None:
            return await handler(request)
        allowed = ", ".join([*sorted(methods), *(["HEAD"] if "GET" in methods else []), "OPTIONS"])
        if request.method == "OPTIONS":
            return web.Response(status=204, headers={"allow": allowed})
        refusal = Refusal(405, "MethodNotAllowed", f"{path} does not take {request.method}", "never")
        return web.json_response(refusal.body(), status=405, headers={"allow": allowed})


def path_of(request: web.Request) -> str:
    """The one spelling of the path that was asked for."""
    return clean_path(request.path)


async def read_body(request: web.Request) -> bytes:
    """The request's body, decompressed. Raises Refused, also if it does not come in time."""
    try:
        # Most bodies are there with their head, and a timer costs more than to read them.
        async with asyncio.timeout(None if request.content.is_eof() else BODY_SECONDS):
            body = await request.read()
    except TimeoutError:
        raise Refused(late_body(BODY_SECONDS)) from None
    encoding = request.headers.get("content-encoding")
    return body if encoding is None else decoded(body, encoding, request.client_max_size)


@web.middleware
async def envelope(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every answer of the gateway's own that is no success, in the one envelope."""
    try:
        return await handler(request)
    except Refused as error:
        refusal = error.refusal
    except web.HTTPRequestEntityTooLarge:
        refusal = Refusal(413, "PayloadTooLarge", "the request body is too large", "never")
    except web.RequestPayloadError:  # aiohttp's, while it reads: broken chunks
        refusal = malformed("the request body does not decode as its headers say")
    answer = web.json_response(refusal.body(), status=refusal.status, headers=refusal.headers())
    if not request.content.is_eof():
        answer.force_close()  # where the next request begins on this connection cannot be told
    return answer
