"""Opening the engine that a replica drives: in this process by name, or a running server by its URL."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from .. import plugins
from ..ports import Engine
from ..urls import is_http
from .asgi import App

GROUP = "stitch.engines"


class EngineOptionError(ValueError):
    """An engine option that the engine does not have, or cannot read."""


@dataclass(frozen=True)
class OpenedEngine:
    """An engine, the ASGI app that speaks its HTTP API, and how to end both.

    ``cache_key``: its prefix cache outlives an activation, so the middleware has to part versions in it.
    ``vouch``: see StitchMiddleware; None where the engine cannot restart without this process.
    """

    engine: Engine
    app: App
    close: Callable[[], Awaitable[None]]
    cache_key: bool = False
    vouch: Callable[[], Awaitable[None]] | None = None


async def open_engine(name: str, checkpoint: Path, options: Mapping[str, str]) -> OpenedEngine:
    """``name`` is a plugin of the group ``stitch.engines``, or the URL of a server that runs already.

    The engine boots from ``checkpoint``. Raises PluginMissing, EngineOptionError, and what the engine
    raises for a checkpoint that it cannot run.
    """
    if name.startswith(("http://", "https://")):
        if not is_http(name):
            raise EngineOptionError(f"{name!r} is not the URL of a server, such as http://127.0.0.1:30000")
        from .sidecar import open_server

        return await open_server(name, options, checkpoint)
    opened: OpenedEngine = await plugins.load(GROUP, name)(checkpoint, options)
    return opened
