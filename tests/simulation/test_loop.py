"""The simulated event loop: same seed, same run; processes that die without a last word."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from random import Random
from typing import Any

import pytest

from stitch_core.testing.loop import Deadlock, Runaway, SimulatedLoop, simulated_loop
from stitch_core.testing.process import PROCESS, Crash, SimulatedClock, SimulatedProcess


def simulate(main: Callable[[SimulatedLoop], Coroutine[Any, Any, Any]], seed: int = 1, **options: Any) -> Any:
    with simulated_loop(Random(seed), **options) as loop:
        return loop.run_until_complete(main(loop))


async def racing(loop: SimulatedLoop) -> list[str]:
    """Who got the lock when, with everything from asyncio that the protocol code uses."""
    seen: list[str] = []
    lock, event = asyncio.Lock(), asyncio.Event()

    async def worker(name: str) -> None:
        for turn in range(5):
            async with lock:
                seen.append(f"{name}{turn}")
                await asyncio.sleep(0)
            await loop.run_blocking(seen.append, f"{name}!")
        await event.wait()

    async with asyncio.TaskGroup() as group:
        for name in "abcd":
            group.create_task(worker(name))
        await asyncio.sleep(100)
        event.set()
    return seen


def test_a_seed_is_one_interleaving() -> None:
    runs = [simulate(racing, seed) for seed in (1, 1, 2, 3)]
    assert runs[0] == runs[1]
    assert len({tuple(run) for run in runs}) == 3
    assert {tuple(sorted(run)) for run in runs} == {tuple(sorted(runs[0]))}


def test_waiting_costs_no_time_and_both_clocks_show_it() -> None:
    async def main(loop: SimulatedLoop) -> None:
        clock, ahead = SimulatedClock(loop), SimulatedClock(loop, skew=7.0)
        began, wall = clock.monotonic(), clock.time()
        await asyncio.sleep(86_400.0)
        assert clock.monotonic() - began == clock.time() - wall == pytest.approx(86_400.0)
        assert ahead.time() - clock.time() == pytest.approx(7.0)

    simulate(main)


def test_timeouts_and_wait_for() -> None:
    async def main(loop: SimulatedLoop) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3):
                await asyncio.Event().wait()
        assert loop.time() == 3.0
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.sleep(10), 2)
        assert await asyncio.wait_for(asyncio.sleep(1, "done"), 2) == "done"
        assert loop.time() == 6.0

    simulate(main)


def test_a_killed_process_runs_nothing_more_not_even_a_finally() -> None:
    after: list[str] = []

    async def victim() -> None:
        try:
            await asyncio.gather(inner(), asyncio.sleep(1000))
        finally:
            after.append("victim")

    async def inner() -> None:
        try:
            await asyncio.sleep(10)
            after.append("slept")
        finally:
            after.append("inner")
            await asyncio.sleep(1)
            after.append("inner waited")

    async def main(loop: SimulatedLoop) -> None:
        process = SimulatedProcess(loop, "p")
        process.spawn(victim())
        await asyncio.sleep(5)
        process.kill()
        await process.ended.wait()
        await asyncio.sleep(2000)
        assert after == []

    simulate(main)


def test_an_executor_call_of_a_killed_process_never_starts_and_of_a_cancelled_task_does() -> None:
    ran: list[str] = []

    async def main(loop: SimulatedLoop) -> None:
        process = SimulatedProcess(loop, "p")
        process.spawn(loop.run_blocking(ran.append, "killed"))
        task = loop.create_task(loop.run_blocking(ran.append, "cancelled"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        process.kill()
        task.cancel()
        await asyncio.sleep(1)
        assert ran == ["cancelled"]

    simulate(main, executor_delay=0.5)


def test_a_crash_ends_its_process_and_no_other() -> None:
    events: list[str] = []

    async def dying(process: SimulatedProcess) -> None:
        try:
            await asyncio.sleep(1)
            process.crash()
        except Exception:
            events.append("caught")
        finally:
            await asyncio.sleep(0)
            events.append("went on")

    async def main(loop: SimulatedLoop) -> None:
        first, second = SimulatedProcess(loop, "first"), SimulatedProcess(loop, "second")
        first.spawn(dying(first))
        survivor = second.spawn(asyncio.sleep(10, "alive"))
        await first.ended.wait()
        assert await survivor == "alive"
        assert events == []
        with pytest.raises(Crash):
            first.check()

    simulate(main)


def test_tasks_belong_to_the_process_that_made_them() -> None:
    async def name() -> str | None:
        process = PROCESS.get()
        return process.name if process else None

    async def parent() -> list[str | None]:
        return await asyncio.gather(name(), asyncio.create_task(name()))

    async def main(loop: SimulatedLoop) -> None:
        assert await SimulatedProcess(loop, "p").spawn(parent()) == ["p", "p"]
        assert await name() is None

    simulate(main)


def test_a_stalled_process_misses_nothing_but_time() -> None:
    ticks: list[tuple[str, float]] = []

    async def ticking(loop: SimulatedLoop, name: str) -> None:
        for _ in range(4):
            await asyncio.sleep(1)
            ticks.append((name, loop.time()))

    async def main(loop: SimulatedLoop) -> None:
        slow, other = SimulatedProcess(loop, "slow"), SimulatedProcess(loop, "other")
        tasks = [slow.spawn(ticking(loop, "slow")), other.spawn(ticking(loop, "other"))]
        await asyncio.sleep(1.5)
        slow.stall(10)
        await asyncio.gather(*tasks)
        assert [t for n, t in ticks if n == "slow"] == [1.0, 11.5, 12.5, 13.5]
        assert [t for n, t in ticks if n == "other"] == [1.0, 2.0, 3.0, 4.0]

    simulate(main)


def test_a_deadlock_says_who_waits_where() -> None:
    async def waits_for_nothing() -> None:
        await asyncio.Event().wait()

    async def main(loop: SimulatedLoop) -> None:
        await SimulatedProcess(loop, "p").spawn(waits_for_nothing())

    with pytest.raises(Deadlock, match=r"p: .*waits_for_nothing test_loop.py:\d+ > Event.wait"):
        simulate(main)


def test_runaways_are_stopped() -> None:
    async def spins(loop: SimulatedLoop) -> None:
        for _ in range(10_000):
            await asyncio.sleep(0)

    async def sleeps(loop: SimulatedLoop) -> None:
        for _ in range(10_000):
            await asyncio.sleep(1)

    with pytest.raises(Runaway, match="1000 callbacks"):
        simulate(spins, max_steps=1000)
    with pytest.raises(Runaway, match=r"not done after 50.0 virtual seconds\n  -: .*sleeps"):
        simulate(sleeps, max_time=50.0)


def test_failures_and_forgotten_exceptions_are_seen() -> None:
    async def forgotten() -> None:
        raise RuntimeError("nobody looks")

    async def main(loop: SimulatedLoop) -> None:
        dead = SimulatedProcess(loop, "dead")
        for task in (loop.create_task(forgotten()), dead.spawn(forgotten())):
            await asyncio.wait([task])
            del task
        dead.kill()
        loop._tasks.clear()
        assert len(loop.problems) == 1
        assert "nobody looks" in loop.problems[0]
        loop.call_later(1, loop.fail, AssertionError("found in a callback"))
        await asyncio.sleep(10)

    with pytest.raises(AssertionError, match="found in a callback"):
        simulate(main)


def test_async_generators_are_closed_while_their_process_lives() -> None:
    closed: list[str] = []

    async def numbers(name: str) -> AsyncIterator[int]:
        try:
            yield 1
            yield 2
        finally:
            closed.append(name)

    async def takes_one(name: str, then: float) -> None:
        generator = numbers(name)
        async for _ in generator:
            break
        await asyncio.sleep(then)
        del generator
        await asyncio.sleep(1)

    async def main(loop: SimulatedLoop) -> None:
        dead = SimulatedProcess(loop, "dead")
        dead.spawn(takes_one("dead", 10))
        await asyncio.sleep(1)
        dead.kill()
        await takes_one("alive", 1)

    simulate(main)
    assert closed == ["alive"]
