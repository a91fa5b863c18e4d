"""The embedded engine keeps what `ports.Engine` promises: the public kit's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from stitch_core.testing.engines import Boot, EngineTests, Served
from stitch_embedded.config import ModelConfig
from stitch_embedded.replica import open_engine
from tests.embedded.models import config_json, random_tensors, save


@pytest.mark.usefixtures("no_self_check")
class TestEmbeddedEngine(EngineTests):
    @pytest.fixture
    async def boot(self) -> AsyncIterator[Boot]:
        opened = []

        async def boot(checkpoint: Path) -> Served:
            one = await open_engine(checkpoint, {"pace": "0.004", "max_running": "8"})
            opened.append(one)
            return Served(one.engine, one.app, checkpoint)

        yield boot
        for one in opened:
            await one.close()

    @pytest.fixture
    def checkpoints(self, tmp_path: Path) -> tuple[Path, Path, Path]:
        config = ModelConfig.from_dict(config_json())
        a, b, c = (save(tmp_path / f"c{i}", config_json(), random_tensors(config, i)) for i in range(3))
        return a, b, c
