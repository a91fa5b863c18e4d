"""Staging into images takes as long as it takes, and is given up when it stands still (C37). No server."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stitch_core.ports import EngineRefused
from stitch_sglang.engine import SGLangEngine

pytestmark = [pytest.mark.real, pytest.mark.virtual_time]


class Ranks:
    """The schedulers: each look at the stage finds it ``step`` further, until it is done at ``end``."""

    def __init__(self, step: int, end: int) -> None:
        self.step, self.end, self.at, self.looks = step, end, 0, 0
        self.asked: list[str] = []

    async def stitch_stage_communicator(self, request: Any) -> list[Any]:
        self.asked.append(request.action)
        self.looks += 1
        self.at += self.step
        report = {
            "outcome": "done" if self.at >= self.end else "running", "message": "", "state": "s", "bytes": 1,
            "seconds": 1.0, "image": 1, "images": 1, "changed": 1, "segments": 1, "steps": self.at,
        }  # fmt: skip
        return [SimpleNamespace(reports=[report, report])]


async def test_C37_a_stage_that_gets_on_has_no_bound_in_all() -> None:
    ranks = Ranks(step=1, end=60)
    engine = SGLangEngine(ranks, "cpu", update_timeout=1200, stage_timeout=2.0)
    assert (engine.bounds.prepare, engine.bounds.activate) == (None, 1200)
    assert (await engine._run("stage", Path("/x"), "s"))["outcome"] == "done"
    assert ranks.looks == 60
    assert asyncio.get_running_loop().time() > 10


async def test_C37_a_stage_that_stands_still_is_called_off() -> None:
    ranks = Ranks(step=0, end=1)
    engine = SGLangEngine(ranks, "cpu", stage_timeout=2.0)
    with pytest.raises(EngineRefused):
        await engine._run("stage", Path("/x"), "s")
    async with asyncio.timeout(60):
        await engine._cancelling
    assert ranks.asked[-1] == "cancel"


async def test_a_self_test_that_stands_still_leaves_the_disk() -> None:
    engine = SGLangEngine(Ranks(step=0, end=1), "auto", stage_timeout=2.0)
    engine.warm.set()
    await engine.choose(Path("/x"))
    assert engine._uses == "disk"
