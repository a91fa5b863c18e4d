"""A stock SGLang server of two tensor-parallel ranks: both take each version, or none does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from .world import World

pytestmark = pytest.mark.real

PROMPT = [40, 41, 42, 43, 44, 45, 46, 47]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    world = World(tmp_path_factory.mktemp("world"))
    try:
        server = world.start(
            ("--tp-size", "2", "--disable-overlap-schedule"), {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
        )
        asyncio.run(server.until_ready())
        yield world
    finally:
        world.close()


async def test_versions_follow_and_an_old_one_comes_back(world: World) -> None:
    said = []
    for seed in (1, 2, 1):
        number = world.publish(seed)
        await world.serves(number)
        answer = await world.server.generate(PROMPT)
        assert answer["meta_info"]["weight_version"] == str(number)
        assert answer["meta_info"]["cached_tokens"] == 0
        said.append(answer["output_ids"])
    assert said[0] == said[2]
    assert said[0] != said[1]


async def test_a_generation_spans_an_activation_on_both(world: World) -> None:
    before = len(world.seeds) - 1
    (answer,) = await world.across([PROMPT], 3)
    spans = answer["meta_info"]["weight_versions"]
    assert [span["version"] for span in spans] == [before, before + 1]
