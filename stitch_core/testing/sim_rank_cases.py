"""Scenarios of a trainer with several ranks: what dead ranks leave, and copies of the base that differ."""

from __future__ import annotations

import asyncio

from ..replica.reconciler import Follow
from .sim_cases import fleet, head_number, serves, until
from .sim_ranks import MOST_RANKS, SimulatedRanks, spoil
from .sim_replica import SimulatedReplica
from .sim_world import BOOT, LAYOUT, World

NAMES = sorted(LAYOUT)


async def _ranks_die(world: World, *, stock: bool) -> None:
    """All ranks have written version 1, and die; fewer write it again, and other tensors have changed."""
    trainer = SimulatedRanks(world, "t", "a", versions=4, stock=stock)
    trainer.encoding = world.random.choice(("xor", "sparse"))
    trainer.sizes, trainer.changes = [MOST_RANKS, 2], NAMES[2:]  # which are those of ranks 2 and 3
    replica = SimulatedReplica(world, "r", Follow("a"))
    died: list[int] = []

    def written(number: int, count: int) -> None:
        if number == 1 and count == MOST_RANKS and not died:
            died.append(number)
            trainer.changes = NAMES[: world.random.randint(1, 2)]
            assert trainer.process is not None
            trainer.process.kill()

    trainer.written = written
    async with fleet(world, [trainer], [replica]):
        await serves(world, replica, 4)
    assert died
    assert {manifest.epoch for manifest in world.judge.versions.values()} > {1}


async def c74_ranks_die_while_they_write_and_fewer_write_again(world: World) -> None:
    """What the dead ones wrote is in no version."""
    await _ranks_die(world, stock=False)


async def c74stock_a_framework_leaves_files_on_both_hosts(world: World) -> None:
    """Nor is it where a framework writes, which empties its directory on one host."""
    await _ranks_die(world, stock=True)


async def c75_the_base_changes_between_the_claim_and_the_first_encode(world: World) -> None:
    """No version is made from it: it would be one that nobody can apply."""
    trainer = SimulatedRanks(world, "t", "a", versions=3)
    trainer.encoding = world.random.choice(("xor", "sparse"))
    trainer.spoil_rate = 1.0
    replica = SimulatedReplica(world, "r", Follow("a"))

    def cured() -> bool:
        # Which is when the claim finds the right bytes again, and nothing else spoils them.
        if any("a bit of" in line for line in world.trace.lines()):
            trainer.spoil_rate = 0.0
        return head_number(world) == 3

    async with fleet(world, [trainer], [replica]):
        await until(world, cured, "version 3")
        await serves(world, replica, 3)


async def c75copies_two_hosts_whose_boot_copies_differ(world: World) -> None:
    """Nothing is published until the copies are one again."""
    trainer = SimulatedRanks(world, "t", "a", versions=3)
    trainer.sizes = [world.random.randint(3, MOST_RANKS) for _ in range(50)]  # there are some on each host
    replica = SimulatedReplica(world, "r", Follow("a"))
    host = world.random.randrange(2)
    undo = spoil(world, trainer.machines[host], BOOT, world.random.choice(NAMES))
    async with fleet(world, [trainer], [replica]):
        await asyncio.sleep(200.0)
        assert head_number(world) <= 0
        undo()
        await serves(world, replica, 3)


RANK_CASES = [
    c74_ranks_die_while_they_write_and_fewer_write_again,
    c74stock_a_framework_leaves_files_on_both_hosts,
    c75_the_base_changes_between_the_claim_and_the_first_encode,
    c75copies_two_hosts_whose_boot_copies_differ,
]
