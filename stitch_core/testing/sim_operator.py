"""A simulated operator: real rollbacks and channel moves, from a process that dies and is started again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from ..channels import ChannelRefused, move_channel
from ..head import Channel
from ..ports import StoreError
from ..publisher import PublishError
from ..retry import Retry
from ..rollback import Rollback, RollbackRefused, RolledBack
from .process import SimulatedProcess
from .sim_files import SimulatedMachine
from .sim_trainer import publisher_of
from .sim_world import BOOT, World

WORK = Path("/var/operator")
Task = Callable[[SimulatedProcess], Awaitable[RolledBack | None]]


class SimulatedOperator:
    """Does one thing after another, each until it is done or refused; ``done`` when there is nothing more."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.machine: SimulatedMachine = world.machine(name)
        self.process: SimulatedProcess | None = None
        self.done = asyncio.Event()
        self.rolled_back: list[RolledBack] = []
        self.refused: list[RollbackRefused] = []
        self._starts = 0

    async def roll_back(self, run: str, to: int, *, with_boot: bool = False) -> RolledBack | None:
        """Roll the run back, with the boot checkpoint at hand or without; None if that is refused."""
        self.world.trace.add(f"{self.name}: is to roll {run} back to {to}")
        self.world.judge.brought_back.add((run, to))

        async def once(process: SimulatedProcess) -> RolledBack | None:
            world = self.world
            rollback = Rollback(
                world.store(process), publisher_of(world, process, self.machine, run), WORK,
                self.machine.files(process), world.clock(), world.random, world.loop.run_blocking,
                BOOT if with_boot else None, lambda text: world.trace.add(f"{process.name}: {text}"),
                workers=1,
            )  # fmt: skip
            try:
                return await rollback.to(to)
            except RollbackRefused as refused:
                self.refused.append(refused)
                world.trace.add(f"{process.name}: {refused}")
                return None

        done = await self._until_done(once)
        if done is not None:
            self.rolled_back.append(done)
        return done

    async def point(self, run: str, exact: int | None = None) -> None:
        """Move the channel ``latest``."""
        self.world.trace.add(f"{self.name}: is to point latest at {Channel(run, exact)}")

        async def once(process: SimulatedProcess) -> None:
            world = self.world
            try:
                await move_channel(
                    world.store(process), "latest", Channel(run, exact), rng=world.random,
                    nonce=world.nonce(), policy=Retry(attempts=5, first=0.5, cap=10.0, deadline=90.0),
                )  # fmt: skip
            except ChannelRefused as refused:
                world.trace.add(f"{process.name}: {refused}")

        await self._until_done(once)

    async def _until_done(self, once: Task) -> RolledBack | None:
        """In a process, and again in another one when it dies or fails."""
        while True:
            self._starts += 1
            process = self.process = SimulatedProcess(self.world.loop, f"{self.name}#{self._starts}")
            self.machine.files(process)
            life = process.spawn(self._caught(process, once))
            ended = asyncio.ensure_future(process.ended.wait())
            await asyncio.wait([life, ended], return_when=asyncio.FIRST_COMPLETED)
            ended.cancel()
            if life.done() and not process.dead:
                process.kill()
                finished, result = life.result()
                if finished:
                    return result
            await asyncio.sleep(self.world.timing.restart * self.world.random.random())

    async def _caught(self, process: SimulatedProcess, once: Task) -> tuple[bool, RolledBack | None]:
        try:
            return True, await once(process)
        except (PublishError, StoreError, OSError) as error:
            self.world.trace.add(f"{process.name}: {type(error).__name__}: {error}")
            return False, None
