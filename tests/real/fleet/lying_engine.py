"""An embedded engine as a server that takes labels without weights while the file LIES is there."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from stitch_embedded.__main__ import main
from stitch_embedded.engine import EmbeddedEngine

prepare = EmbeddedEngine.prepare


async def prepare_nothing(self: EmbeddedEngine, checkpoint: Path, changed: object) -> None:
    await prepare(self, checkpoint, () if Path(os.environ["LIES"]).exists() else changed)  # type: ignore[arg-type]


EmbeddedEngine.prepare = prepare_nothing  # type: ignore[assignment, method-assign]
sys.exit(main())
