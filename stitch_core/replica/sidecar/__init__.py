"""The sidecar: an engine's own server, behind the middleware by way of a reverse proxy. Needs aiohttp.

An engine that restarts behind it serves whatever weights it was started with, under whatever label. The
reconciler finds the other instance; before that each answer that came over a connection of which it is not
known which instance it leads to is held back until the instance was asked for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..engines import EngineOptionError, OpenedEngine
from .http_engine import HttpEngine, Link
from .proxy import ReverseProxy

__all__ = ["HttpEngine", "Link", "ReverseProxy", "open_server"]


async def open_server(url: str, options: Mapping[str, str], checkpoint: Path | None = None) -> OpenedEngine:
    """The SGLang server at ``url``, which may still be starting. It reads checkpoints from this host's disk.

    It runs the model of ``checkpoint``; without one it is not probed.

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
    vocabulary = None if checkpoint is None else _vocabulary(checkpoint / "config.json")
    engine = HttpEngine(link, base, vocabulary=vocabulary, **times)
    proxy = ReverseProxy(link.session, base)
    return OpenedEngine(engine, proxy, link.close, cache_key=True, vouch=engine.vouch)


def _vocabulary(path: Path) -> int | None:
    """How many tokens the model of a config.json has; None if it does not say."""
    try:
        config: Any = json.loads(path.read_bytes())
        found = config["vocab_size"] if "vocab_size" in config else config["text_config"]["vocab_size"]
        return found if isinstance(found, int) and found > 0 else None
    except (OSError, ValueError, TypeError, KeyError):
        return None
