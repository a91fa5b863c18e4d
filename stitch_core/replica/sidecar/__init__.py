"""The sidecar: an engine's own server, behind the middleware by way of a reverse proxy. Needs aiohttp.

An engine that restarts behind it serves boot weights under its boot label: the reconciler finds the other
instance, and until then the middleware finds the other label in whatever is answered.
"""

from __future__ import annotations

from collections.abc import Mapping

import aiohttp

from ..engines import EngineOptionError, OpenedEngine
from .http_engine import HttpEngine
from .proxy import ReverseProxy

__all__ = ["HttpEngine", "ReverseProxy", "open_server"]


async def open_server(url: str, options: Mapping[str, str]) -> OpenedEngine:
    """The SGLang server at ``url``, which may still be starting. It reads checkpoints from this host's disk.

    ``options``: ``control_timeout`` and ``update_timeout`` in seconds. Raises EngineOptionError.
    """
    unknown = sorted(set(options) - {"control_timeout", "update_timeout"})
    if unknown:
        raise EngineOptionError(
            f"a server has no option {unknown[0]!r}: known are control_timeout, update_timeout"
        )
    try:
        times = {name: float(value) for name, value in options.items()}
    except ValueError as error:
        raise EngineOptionError(f"engine option: {error}") from None
    # Ends of bodies are judged by the middleware, so nothing is decompressed on the way.
    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0), auto_decompress=False
    )
    base = url.rstrip("/")
    engine = HttpEngine(session, base, **times)
    return OpenedEngine(engine, ReverseProxy(session, base), session.close, cache_key=True)
