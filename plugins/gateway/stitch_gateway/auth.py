"""The gateway's guard: tokens of those who ask it, and its own token for replicas and other gateways."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import aiohttp
from aiohttp import web

from stitch_core.replica.asgi import clean_path
from stitch_core.replica.auth import Tokens, challenge, too_large

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class GatewayGuard:
    """Without ``tokens`` everybody may do everything. ``replica_token`` is asked anew for each request."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        tokens: Tokens | None = None,
        replica_token: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._session, self._tokens, self._replica_token = session, tokens, replica_token
        self._shown: str | None = None
        self.refresh()

    @property
    def keeps_tokens(self) -> bool:
        """Whether what clients show is meant for the gateway, and not for engines."""
        return self._tokens is not None or self._shown is not None

    def refresh(self) -> None:
        """Show replicas the token that is valid now."""
        token = self._replica_token()
        if token != self._shown and token is not None:
            self._session.headers["authorization"] = f"Bearer {token}"
        self._shown = token

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Before anything is read of a body."""
        self.refresh()
        refusal = too_large(request.raw_headers)
        if refusal is None and self._tokens is not None:
            given = request.headers.getall("authorization", [])
            refusal = self._tokens.judge(clean_path(request.path), given[0] if len(given) == 1 else None)
        if refusal is None:
            return await handler(request)
        headers = {**refusal.headers(), **challenge(refusal)}
        return web.json_response(refusal.body(), status=refusal.status, headers=headers)
