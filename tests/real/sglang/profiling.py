"""`stitch profile` on a replica of stock SGLang; test_destinations.py collects it, whose servers it uses."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from stitch_core.cli.main import main

from .world import RUN

if TYPE_CHECKING:
    from .test_destinations import Pair

BUSY = 2
OTHER_SEED = 23


async def test_stitch_profile_of_an_update(world: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    """Every check passes, and the row has the figures that an SGLang replica on this machine can give."""
    from .test_destinations import TARGET

    await world.serves(world.publish(OTHER_SEED))
    capsys.readouterr()
    arguments = [
        "profile", "--server", world.server.url, "--store", world.url, "--run", RUN, "--json",
        "--idle", "0.5", "--load", str(BUSY), "--load-tokens", "200", "--prompts", "3",
        "--tokens", "12", "--patience", "120", "--reference", world.fresh.url,
    ]  # fmt: skip
    profiling = asyncio.ensure_future(asyncio.to_thread(main, arguments))
    await world.status_until(lambda status: status["active_requests"] >= BUSY or profiling.done())
    await asyncio.sleep(2.5)  # the idle time is over
    await asyncio.to_thread(world.publish, TARGET)
    code = await profiling
    said = capsys.readouterr()
    assert said.out, said.err
    row: dict[str, Any] = json.loads(said.out)
    assert code == 0, row["checks"]
    assert row["checks"][-1]["what"] == "after: equal to a fresh server"
    assert row["path"] == "cpu"
    assert 0 < row["copied"] <= row["memory"]["image"] // 2
    assert 0 < row["copy"] <= row["pause"] < row["total"]
    assert row["memory"]["before"] > 1e9
    assert row["throughput"]["idle"] > 0
