"""Replicas that run as a server of Modal: its containers, reached through its one address, and their number.

Modal routes a request to the container that ``modal-flash-upstream`` names, unless ``Modal-Session-ID`` is
there too. The SDK (extra ``[modal]``) takes its credentials from where it always does.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection, Sequence
from typing import Any

from stitch_core.ports import Pool, ReplicaAddress, Unavailable

UPSTREAM = "modal-flash-upstream"
CALL_SECONDS = 20.0
_URL = re.compile(r"modal_flash:([A-Za-z0-9._-]+)/([A-Za-z0-9._-]+)(?:\?environment=([A-Za-z0-9._-]+))?\Z")


class ModalFlashPool:
    """The containers of one server of a deployed app. While Modal does not answer, those of the last time."""

    def __init__(self, server: Any) -> None:
        """``server``: a ``modal.Server``."""
        self._server = server
        self._url: str | None = None
        self._last: list[ReplicaAddress] = []

    async def replicas(self, doubted: Collection[str] = ()) -> Sequence[ReplicaAddress]:
        """Raises Unavailable where nothing was ever learnt."""
        try:
            async with asyncio.timeout(CALL_SECONDS):
                if self._url is None:
                    self._url = await self._server.get_url.aio()
                found = await self._server._experimental_list_containers.aio()
        except Exception as error:
            if self._url is None:
                raise Unavailable(f"Modal does not say where its server is: {_text(error)}") from error
            return self._last
        if not self._url:
            return []
        url = self._url.rstrip("/")
        self._last = [
            ReplicaAddress(c.container_id, url, headers={UPSTREAM: f"{c.host}:{c.port}"}) for c in found
        ]
        return self._last

    async def scale(self, count: int) -> str:
        """Keep so many containers, no more and no less; what was set. Raises Unavailable."""
        try:
            async with asyncio.timeout(CALL_SECONDS):
                update = self._server.autoscaler.update.aio
                await update(min_containers=count, max_containers=count or None)
        except Exception as error:
            raise Unavailable(f"Modal did not set the number of containers: {_text(error)}") from error
        return f"min_containers={count}" + (f", max_containers={count}" if count else ", no maximum")

    async def close(self) -> None:
        return


def open_modal_flash(url: str, client: Any = None) -> Pool:
    """``modal_flash:APP/SERVER``, or with ``?environment=NAME``. Raises ValueError."""
    match = _URL.match(url)
    if match is None:
        raise ValueError(f"{url!r} is not modal_flash:APP/SERVER[?environment=NAME]")
    import modal

    return ModalFlashPool(
        modal.Server.from_name(match[1], match[2], environment_name=match[3], client=client)
    )


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")
