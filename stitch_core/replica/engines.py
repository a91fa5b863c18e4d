"""Opening the engine that a replica drives: in this process by name, or a running server by its URL."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path

from ..ports import Engine
from .asgi import App

GROUP = "stitch.engines"
BUILT_IN = {"embedded": "stitch_embedded.replica:open_engine"}


class EngineUnknown(ValueError):
    """No such engine, or its plugin is not installed, or it cannot be opened as asked."""


@dataclass(frozen=True)
class OpenedEngine:
    """An engine, the ASGI app that speaks its HTTP API, and how to end both."""

    engine: Engine
    app: App
    close: Callable[[], Awaitable[None]]


async def open_engine(name: str, checkpoint: Path, options: Mapping[str, str]) -> OpenedEngine:
    """``name`` is an entry point of the group ``stitch.engines``, or the URL of a server that runs already.

    The engine boots from ``checkpoint``. Raises EngineUnknown, and what the plugin raises.
    """
    if name.startswith(("http://", "https://")):
        from .sidecar import open_server

        return await open_server(name, options)
    found = {entry.name: entry.value for entry in entry_points(group=GROUP)} | BUILT_IN
    if name not in found:
        raise EngineUnknown(
            f"there is no engine {name!r}: known are {', '.join(sorted(found))}, or a server's URL"
        )
    module, _, attribute = found[name].partition(":")
    try:
        opener = getattr(import_module(module), attribute)
    except ImportError as error:
        raise EngineUnknown(f"engine {name!r} needs 'stitch-rl[{name}]': {error}") from error
    opened: OpenedEngine = await opener(checkpoint, options)
    return opened
