"""The sidecar: an engine's own server, behind the middleware by way of a reverse proxy. Needs aiohttp.

An engine that restarts behind it serves whatever weights it was started with, under whatever label. The
reconciler finds the other instance; before that each answer that came over a connection of which it is not
known which instance it leads to is held back until the instance was asked for.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..engines import EngineOptionError, OpenedEngine
from .http_engine import HttpEngine, Link
from .proxy import ReverseProxy

__all__ = ["HttpEngine", "Link", "ReverseProxy", "open_server"]


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
    link, base = Link(), url.rstrip("/")
    engine = HttpEngine(link, base, **times)
    proxy = ReverseProxy(link.session, base)
    return OpenedEngine(engine, proxy, link.close, cache_key=True, vouch=engine.vouch)
