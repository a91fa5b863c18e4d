"""The negative control: a replica that lies. All of it is real, but its engine takes labels without weights.

``python -m recipes.local.faulty replica --engine faulty ...`` is ``stitch replica`` otherwise.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from stitch_core import plugins
from stitch_core.cli.main import main
from stitch_core.replica.engines import OpenedEngine
from stitch_embedded.replica import open_engine


class Relabelling:
    """An engine that says it serves every version, and goes on serving the boot weights."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def prepare(self, checkpoint: Path, changed: object) -> None:
        """The fault: whatever has changed, nothing is read, so activation copies nothing."""
        await self._engine.prepare(checkpoint, ())


async def open_faulty(checkpoint: Path, options: Mapping[str, str]) -> OpenedEngine:
    """The embedded engine with the fault put in."""
    opened = await open_engine(checkpoint, options)
    return replace(opened, engine=Relabelling(opened.engine))


if __name__ == "__main__":
    plugins.OURS["stitch.engines"]["faulty"] = "recipes.local.faulty:open_faulty"
    sys.exit(main())
