"""The floor: raised by the publisher alone, to a full beside the chain that leads to the new version."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest

from stitch_core.chain import ChainReader
from stitch_core.floors import Bases, FloorRaiser
from stitch_core.manifest import Manifest
from stitch_core.planner import Planner
from stitch_core.ports import Unavailable
from stitch_core.publisher import PublishError
from tests.anchored_run import Run
from tests.small_run import rebuild_all


@pytest.fixture
async def run(tmp_path: Path) -> Run:
    run = Run(tmp_path)
    await run.claim()
    return run


def floor(manifest: Manifest) -> int | None:
    return manifest.floor.number if manifest.floor else None


async def test_the_next_manifest_names_the_newest_whole_full(run: Run, tmp_path: Path) -> None:
    await run.publish(5)
    await run.anchor(2)
    assert floor(await run.publish()) == 2
    await run.anchor(4)
    lost = await run.anchor(5)
    del run.memory.state.objects[lost.file_key(lost.representation.files[0].name)]
    sixth = await run.publish()
    assert sixth.floor == run.versions[4].row()
    await run.anchor(1)
    assert floor(await run.publish()) == 4, "never down"
    # Whoever starts from nothing but what is above the floor and the fulls arrives.
    for manifest in run.versions[1:5]:
        for file in manifest.representation.files:
            del run.memory.state.objects[manifest.file_key(file.name)]
    assert floor(sixth) == 4
    chain = ChainReader(run.memory)

    plan = await Planner(run.memory, chain).plan(run.versions[-1], {run.versions[0].state})
    assert plan.full is not None
    assert plan.full.version.number == 4


async def test_without_the_option_nothing_is_listed_and_nothing_raised(run: Run) -> None:
    await run.publish(2)
    await run.anchor(1)
    run.store.calls.clear()
    quiet = run.trainer.publisher(run.store)
    await quiet.claim(run.trainer.version0)
    assert floor(await run.trainer.publish(quiet)) == 0
    assert "list" not in [name for name, _ in run.store.calls]


async def test_a_publish_costs_one_more_listing(run: Run) -> None:
    await run.publish(3)
    run.store.calls.clear()
    await run.publish()
    assert [name for name, _ in run.store.calls].count("list") == 1
    assert [key for name, key in run.store.calls if name == "load"] == []


async def test_a_delta_that_builds_below_a_full_does_not_make_it_its_floor(run: Run) -> None:
    """Resumed at 1, published as 4: from the full of 2 or 3 nothing leads there."""
    await run.publish(3)
    await run.anchor(2)
    run.trainer.resume(run.versions[1].state)
    await run.claim(resume=run.versions[1].state, saved=1, override=True)
    resumed = await run.publish()
    assert resumed.representation.base == run.versions[1].state
    assert floor(resumed) == 0
    assert floor(await run.publish()) == 0, "nor does what follows it"
    await run.anchor(4)
    assert floor(await run.publish()) == 4


async def test_below_a_raised_floor_a_delta_is_refused(run: Run) -> None:
    await run.publish(4)
    await run.anchor(3)
    assert floor(await run.publish()) == 3
    run.trainer.resume(run.versions[2].state)
    with pytest.raises(PublishError, match="floor 3"):
        await run.publish()


async def test_a_store_that_does_not_list_raises_no_floor_and_stops_no_publish(run: Run) -> None:
    await run.publish(3)
    await run.anchor(2)
    run.store.fail = lambda index, name, key: Unavailable("no") if name == "list" else None
    assert floor(await run.publish()) == 0
    run.store.fail = lambda *_: None
    assert floor(await run.publish()) == 2


async def test_a_full_that_says_another_state_counts_for_nothing(run: Run) -> None:
    await run.publish(3)
    honest = await run.anchor(2)
    wrong = dataclasses.replace(honest, number=3)
    run.memory.state.objects[wrong.key] = wrong.encode()
    for file in wrong.representation.files:
        run.memory.state.objects[wrong.file_key(file.name)] = b"x" * file.size
    chain = ChainReader(run.memory)
    raiser = FloorRaiser(run.memory, chain, Bases(chain))
    row = await raiser.find(run.versions[3], run.versions[3].state)
    assert row == run.versions[2].row()


async def test_every_version_is_rebuilt_from_the_store(run: Run, tmp_path: Path) -> None:
    await run.publish(3)
    await run.anchor(2)
    await run.publish(3)
    assert len(await rebuild_all(run.memory, run.trainer, tmp_path / "host")) == 7


async def test_a_version_above_the_floor_that_hangs_on_one_below_it_is_not_built_on(run: Run) -> None:
    """Resumed at 1 as 4, then at 3 as 5, whose floor is the full of 3: 4 needs 1, which may be collected."""
    await run.publish(3)
    for resumed, number in ((1, 4), (3, 5)):
        if resumed == 3:
            await run.anchor(3)
        run.trainer.resume(run.versions[resumed].state)
        await run.claim(resume=run.versions[resumed].state, saved=resumed, override=True)
        assert (await run.publish()).number == number
    assert floor(run.versions[5]) == 3
    builds_on = [await run.publisher.builds_on(m.state) for m in run.versions]
    assert builds_on == [False, False, False, True, False, True]
    run.trainer.resume(run.versions[4].state)
    with pytest.raises(PublishError, match="above its floor 3 lead to, up to its head 5: publish a full"):
        await run.publish()
    run.trainer.resume(run.versions[3].state)
    assert floor(await run.publish()) == 3


async def test_whatever_is_resumed_and_anchored_a_floor_leads_to_what_it_is_the_floor_of(
    tmp_path: Path,
) -> None:
    refused = 0
    for seed in range(12):
        rng, run, anchored = random.Random(seed), Run(tmp_path / str(seed)), {0}
        await run.claim()
        for _ in range(14):
            i, act = rng.randrange(len(run.versions)), rng.random()
            at = run.versions[i]
            if act < 0.3 and at.number not in anchored:
                await run.anchor(i)
                anchored.add(at.number)
            elif act < 0.7 and at.number:
                run.trainer.resume(at.state)
                await run.claim(resume=at.state, saved=at.number, override=True)
            can = above_floor(run)
            assert {m.state for m in run.versions if await run.publisher.builds_on(m.state)} == can
            if run.trainer.encoder.state in can:
                new = await run.publish()
                assert new.state in above_floor(run)
                assert new.floor is not None
                assert new.floor.number in anchored
            else:
                refused += 1
                with pytest.raises(PublishError, match="publish a full"):
                    await run.publish()
                run.trainer.resume(run.versions[-1].state)
    assert refused > 5


def above_floor(run: Run) -> set[str]:
    """The states that deltas above the newest version's floor lead to, by all that was ever published."""
    newest = run.versions[-1]
    lowest = newest.floor or newest.row()
    found = {lowest.state}
    for _ in run.versions:
        above = [m for m in run.versions if m.number > lowest.number]
        found |= {m.state for m in above if m.representation.base in found}
    return found
