"""`stitch profile` on a replica of stock SGLang, the one of test_destinations.py."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from recipes.local.sglang_server import environment
from stitch_core.cli.main import main

from .world import RUN, World

BUSY = 2
OTHER_SEED, TARGET = 23, 17
PROMPTS = ("{|}~", "".join(chr(33 + i % 90) for i in range(300)), "z")


async def an_update(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every check passes, equality with a fresh server that it starts itself from the version included, and
    the row has the figures that an SGLang replica on this machine can give.
    """
    for name, value in environment(world.scratch, {}).items():
        monkeypatch.setenv(name, value)
    await world.serves(world.publish(OTHER_SEED))
    capsys.readouterr()
    arguments = [
        "profile", "--server", world.server.url, "--store", world.url, "--run", RUN, "--json",
        "--idle", "0.5", "--load", str(BUSY), "--load-tokens", "200", "--tokens", "12",
        "--patience", "120", "--seed", "1",
        "--start-reference", "sglang", "--work", str(world.scratch),
    ]  # fmt: skip
    for prompt in PROMPTS:
        arguments += ["--prompt", prompt]
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
