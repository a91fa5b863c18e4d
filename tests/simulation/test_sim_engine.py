"""The simulated engine: true states beside claimed labels, both KV modes, and every way to fail."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from stitch_core.ports import EngineError, EngineRefused, KVMode
from stitch_core.safetensors import Tensor
from stitch_core.state import state_digest
from stitch_core.testing.checkpoints import random_tensors, step, table_of, write_checkpoint
from stitch_core.testing.faults import FaultPlan, Faults
from stitch_core.testing.loop import SimulatedLoop, simulated_loop
from stitch_core.testing.process import SimulatedProcess
from stitch_core.testing.sim_engine import SimulatedEngine, SimulatedEngineClient, Token
from stitch_core.testing.sim_files import SimulatedMachine

LAYOUT = {"a": ("BF16", (4, 2)), "b": ("F32", (3,)), "c": ("U8", (5,))}


class World:
    def __init__(self, loop: SimulatedLoop, plan: FaultPlan) -> None:
        self.loop = loop
        rng = np.random.default_rng(1)
        self.versions: list[dict[str, Tensor]] = [random_tensors(rng, LAYOUT)]
        for _ in range(3):
            self.versions.append(step(rng, self.versions[-1], density=0.5))
        self.states = [state_digest(table_of(tensors)) for tensors in self.versions]
        faults = Faults(plan, loop.random, loop.time)
        machine = SimulatedMachine("m", faults)
        files = machine.files(SimulatedProcess(loop, "setup"))
        self.paths = [Path(f"/v{i}") for i in range(4)]
        for path, tensors in zip(self.paths, self.versions, strict=True):
            write_checkpoint(path, files, tensors, shards=2)
        self.engine = SimulatedEngine(loop, faults, machine, self.paths[0], step_seconds=1.0)
        self.process = SimulatedProcess(loop, "replica")
        self.client = SimulatedEngineClient(self.engine, self.process)

    async def move(self, number: int, mode: KVMode) -> None:
        await self.client.prepare(self.paths[number], list(LAYOUT))
        await self.client.pause(mode)
        await self.client.activate(f"v{number}")
        await self.client.resume()


def simulate(body: Callable[[World], Awaitable[Any]], plan: FaultPlan | None = None, seed: int = 1) -> Any:
    with simulated_loop(Random(seed)) as loop:
        return loop.run_until_complete(body(World(loop, plan or FaultPlan())))  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_tokens_and_kv_tell_which_weights_made_them(mode: KVMode) -> None:
    async def body(world: World) -> None:
        generation = world.engine.submit("r", prompt=3, wanted=6)
        await asyncio.sleep(3.5)
        await world.move(1, mode)
        await generation.ended.wait()
        assert generation.outcome == "done"
        old, new = Token("default", world.states[0]), Token("v1", world.states[1])
        count = generation.tokens.count(old)
        assert 1 < count < 6
        assert generation.tokens == [old] * count + [new] * (6 - count)
        kept = 3 + count - 1 if mode == "in_place" else 0
        assert generation.kv == [world.states[0]] * kept + [world.states[1]] * (3 + 6 - 1 - kept)

    simulate(body)


def test_nothing_is_generated_in_a_pause_and_aborts_go_by_prefix() -> None:
    async def body(world: World) -> None:
        generations = [world.engine.submit(name, 1, 100) for name in ("r1", "r11", "r2")]
        await asyncio.sleep(5)
        await world.client.pause("in_place")
        tokens = len(generations[0].tokens)
        await asyncio.sleep(50)
        assert len(generations[0].tokens) == tokens > 0
        await world.client.abort("r1")
        await world.client.resume()
        await asyncio.sleep(5)
        assert [g.outcome for g in generations] == ["aborted", "aborted", None]
        assert len(generations[2].tokens) > tokens

    simulate(body)


def test_an_engine_that_restarts_has_its_boot_weights_and_forgot_what_was_prepared() -> None:
    async def body(world: World) -> None:
        await world.move(2, "in_place")
        before = await world.client.identity()
        assert (before.label, world.engine.state) == ("v2", world.states[2])
        await world.client.prepare(world.paths[3], ["a"])
        generation = world.engine.submit("r", 1, 100)
        pausing = world.process.spawn(world.client.prepare(world.paths[3], list(LAYOUT)))
        await asyncio.sleep(0.06)
        world.engine.process.kill()
        with pytest.raises(EngineError):
            await pausing
        assert generation.outcome == "lost"
        with pytest.raises(EngineError):
            await world.client.identity()
        await asyncio.sleep(60)
        after = await world.client.identity()
        assert after.instance != before.instance
        assert (after.label, world.engine.state, world.engine.prepared) == ("default", world.states[0], {})

    simulate(body)


def test_prepare_refuses_what_does_not_fit_and_keeps_what_was_prepared() -> None:
    async def body(world: World) -> None:
        await world.client.prepare(world.paths[1], ["a"])
        for path, names in ((world.paths[2], ["a", "missing"]), (Path("/nowhere"), ["a"])):
            with pytest.raises(EngineRefused):
                await world.client.prepare(path, names)
        await world.client.activate("v1")
        assert world.engine.weights.tensors["a"][2] == world.versions[1]["a"].data
        assert world.engine.weights.tensors["b"][2] == world.versions[0]["b"].data

    simulate(body)


async def outcome(world: World) -> tuple[str, bool, bool]:
    """How an activation was answered, whether the label moved, and whether the weights are whole."""
    told = "done"
    try:
        await world.move(1, "in_place")
    except EngineError as error:
        told = type(error).__name__
    await asyncio.sleep(100)
    moved = world.engine.label == "v1"
    if moved:
        assert world.engine.state == world.states[1]
    return told, moved, world.engine.state in world.states


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (
            "engine_refuses",
            {("done", True, True), ("EngineRefused", False, True), ("EngineRefused", True, True)},
        ),
        (
            "engine_uncertain",
            {("done", True, True), ("EngineUncertain", False, False), ("EngineUncertain", False, True)},
        ),
        (
            "engine_silent",
            {("done", True, True), ("EngineError", False, True), ("EngineError", True, True)}
            | {("EngineUncertain", False, True), ("EngineUncertain", True, True)},
        ),
    ],
)
def test_failures(fault: str, expected: set[tuple[str, bool, bool]]) -> None:
    plan = FaultPlan(**{fault: 0.3})  # type: ignore[arg-type]
    found = [simulate(outcome, plan, seed) for seed in range(120)]
    assert set(found) == expected
    assert found == [simulate(outcome, plan, seed) for seed in range(120)]
