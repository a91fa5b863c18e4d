"""The fake engine keeps an engine's promises, and its bad manners are there when they are wanted."""

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from stitch_core.files import PosixFiles
from stitch_core.testing.checkpoints import random_tensors, step, write_checkpoint
from stitch_core.testing.engines import Boot, EngineTests, Served
from stitch_core.testing.fake_engine import FakeEngine
from stitch_core.testing.fake_server import FakeServer


def three_checkpoints(root: Path) -> tuple[Path, Path, Path]:
    rng = np.random.default_rng(1)
    tensors = random_tensors(rng)
    paths = (root / "0", root / "1", root / "2")
    for path in paths:
        write_checkpoint(path, PosixFiles(), tensors, shards=2)
        tensors = step(rng, tensors, 0.05)
    return paths


class TestFakeEngine(EngineTests):
    @pytest.fixture
    async def boot(self) -> AsyncIterator[Boot]:
        engines = []

        async def boot(checkpoint: Path) -> Served:
            engines.append(FakeEngine(checkpoint))
            return Served(engines[-1], FakeServer(engines[-1]), checkpoint)

        yield boot
        for engine in engines:
            await engine.close()

    @pytest.fixture
    def checkpoints(self, tmp_path: Path) -> tuple[Path, Path, Path]:
        return three_checkpoints(tmp_path)
