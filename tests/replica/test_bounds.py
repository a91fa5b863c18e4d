"""How long an engine may take: outer bounds follow from inner ones, long work has to get on (C37)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from stitch_core.ports import EngineBounds, EngineError
from stitch_core.replica.activation import ReplicaFailed
from stitch_core.replica.progress import unless_still
from stitch_core.replica.sidecar import HttpEngine
from tests.replica.following import Following, Hook

pytestmark = pytest.mark.virtual_time


def taking(seconds: float) -> Hook:
    async def take() -> None:
        await asyncio.sleep(seconds)

    return take


@pytest.fixture
async def f(tmp_path: Path) -> Following:
    """A replica that serves version 1, while version 2 is there; its engine says how long it takes."""
    following = Following(tmp_path)
    following.engine.bounds = EngineBounds(60.0, 1325.0, None)  # type: ignore[attr-defined]
    following.start()
    await following.publish("a")
    await following.catch_up()
    await following.publish("b")
    return following


async def test_C37_a_load_of_700_s_with_an_engine_that_allows_1200(f: Following) -> None:
    f.engine.before["activate"] = taking(700.0)
    assert await f.reconciler.reconcile()
    f.check(f.versions[2])


async def test_C37_a_prepare_of_hours_that_gets_on(f: Following) -> None:
    f.engine.before["prepare"] = taking(4 * 3600.0)
    assert await f.reconciler.reconcile()
    f.check(f.versions[2])


async def test_calls_still_end(f: Following) -> None:
    f.engine.before["pause"] = taking(59.0)
    f.engine.before["activate"] = taking(1326.0)
    with pytest.raises(ReplicaFailed):
        await f.reconciler.reconcile()
    f.start()
    f.engine.before["identity"] = taking(61.0)
    with pytest.raises(EngineError):
        await f.reconciler.reconcile()


# ------------------------------------------------------------------------------------------ an HTTP server


class SlowServer(HttpEngine):
    """Each request is answered in the last instant; without a connection."""

    async def _call(
        self, method: str, path: str, body: Any = None, timeout: aiohttp.ClientTimeout | None = None
    ) -> tuple[int, Any]:
        total = (timeout or self._control).total
        assert total is not None
        await asyncio.sleep(total)
        label = getattr(self, "label", "default")
        if path == "/update_weight_version":
            return 404, {}
        if path == "/update_weights_from_disk":
            self.label = body["weight_version"]
        return 200, {"instance": "i", "weight_version": label, "success": True}


@pytest.mark.parametrize(("control", "update"), [(30.0, 540.0), (30.0, 1200.0), (700.0, 1.0), (0.1, 0.1)])
async def test_C37_bounds_of_a_server_are_longer_than_what_it_is_asked(control: float, update: float) -> None:
    engine = SlowServer(None, "http://x", control_timeout=control, update_timeout=update)  # type: ignore[arg-type]
    loop = asyncio.get_running_loop()
    bounds = engine.bounds
    assert bounds.prepare is not None
    engine._prepared = (Path("/x"), False, await engine._seen())
    calls = [
        (engine.identity, bounds.call),
        (lambda: engine.pause("retract"), bounds.call),
        (lambda: engine.activate("r/weight_v000001"), bounds.activate),
        (engine.resume, bounds.call),
        (lambda: engine.abort("q"), bounds.call),
    ]
    for call, most in calls:
        began = loop.time()
        await call()
        assert 0 < loop.time() - began < most
    # Preparing reads headers in a thread, for as long as an update at most, and looks at the server.
    began = loop.time()
    await engine._seen()
    assert update + loop.time() - began < bounds.prepare


# ------------------------------------------------------------------------------------------- progress


async def test_what_gets_on_may_take_as_long_as_it_takes() -> None:
    done = 0

    async def work() -> str:
        nonlocal done
        while done < 100:
            await asyncio.sleep(590)
            done += 1
        return "done"

    assert await unless_still(work(), lambda: done, 600) == "done"


async def test_what_stands_still_is_ended() -> None:
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    done = 0

    async def work() -> None:
        nonlocal done
        try:
            while done < 2:
                await asyncio.sleep(500)
                done += 1
            await asyncio.sleep(10**6)
        finally:
            ended.set()

    with pytest.raises(TimeoutError):
        await unless_still(work(), lambda: done, 600)
    assert ended.is_set()
    assert 1600 <= loop.time() <= 1700


async def test_what_fails_fails_so_and_who_gives_up_ends_it() -> None:
    async def fails() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await unless_still(fails(), lambda: 0, 600)
    ended = asyncio.Event()

    async def hangs() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    waiting = asyncio.ensure_future(unless_still(hangs(), lambda: 0, 600))
    await asyncio.sleep(1)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert ended.is_set()
