"""Replicas that run as a server of Modal: its containers, reached through its one address, and their number.

Modal routes a request to the container that ``modal-flash-upstream`` names, unless ``Modal-Session-ID`` is
there too. A server that is not ``unauthenticated`` wants the two halves of a proxy auth token as well
(https://modal.com/docs/guide/webhook-proxy-auth): 401 without, 403 where it is of another environment. The
SDK (extra ``[modal]``) takes its own credentials, which are others, from where it always does.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from stitch_core.ports import Pool, ReplicaAddress, Unavailable
from stitch_core.replica.auth import BadTokens, Reloaded

UPSTREAM = "modal-flash-upstream"
KEY, SECRET = "modal-key", "modal-secret"
KEY_VARIABLE, SECRET_VARIABLE = "MODAL_PROXY_KEY", "MODAL_PROXY_SECRET"
FILE_VARIABLE = "STITCH_MODAL_PROXY_FILE"
CALL_SECONDS = 20.0
_URL = re.compile(r"modal_flash:([A-Za-z0-9._-]+)/([A-Za-z0-9._-]+)(?:\?environment=([A-Za-z0-9._-]+))?\Z")


class ModalFlashPool:
    """The containers of one server of a deployed app. While Modal does not answer, those of the last time."""

    def __init__(self, server: Any, keys: Callable[[], Mapping[str, str]] = dict) -> None:
        """``server``: a ``modal.Server``; ``keys``: headers that let requests in, asked for each time."""
        self._server, self._keys = server, keys
        self._url: str | None = None
        self._last: list[Any] = []

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
        else:
            self._last = list(found)
        if not self._url:
            return []
        url, keys = self._url.rstrip("/"), self._keys()
        return [
            ReplicaAddress(c.container_id, url, headers={UPSTREAM: f"{c.host}:{c.port}", **keys})
            for c in self._last
        ]

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
    """``modal_flash:APP/SERVER``, or with ``?environment=NAME``. Raises ValueError, OSError."""
    match = _URL.match(url)
    if match is None:
        raise ValueError(f"{url!r} is not modal_flash:APP/SERVER[?environment=NAME]")
    keys = proxy_keys()
    import modal

    server = modal.Server.from_name(match[1], match[2], environment_name=match[3], client=client)
    return ModalFlashPool(server, keys)


def proxy_keys(environ: Mapping[str, str] = os.environ) -> Callable[[], Mapping[str, str]]:
    """Headers of a proxy auth token, asked for anew each time; none where the environment names no token.

    Of a file ``KEY SECRET``, which is read again when it changes, else of two variables. Raises BadTokens,
    which repeats neither, and OSError.
    """
    file = environ.get(FILE_VARIABLE)
    if file:
        reloaded = Reloaded(Path(file), _parse_keys)
        return lambda: cast(Mapping[str, str], reloaded.value())
    given = [environ.get(name, "") for name in (KEY_VARIABLE, SECRET_VARIABLE)]
    if not any(given):
        return dict
    keys = _parse_keys(" ".join(given), f"{KEY_VARIABLE} and {SECRET_VARIABLE}")
    return lambda: keys


def _parse_keys(text: str, where: str) -> Mapping[str, str]:
    words = text.split()
    if len(words) != 2 or not all(word.isascii() and word.isprintable() for word in words):
        raise BadTokens(f"{where}: expected the key (wk-...) and the secret (ws-...) of a proxy auth token")
    return {KEY: words[0], SECRET: words[1]}


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")
