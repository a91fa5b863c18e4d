"""Promise 1 where an engine's word is all there is: weights under a state that comes back are compared."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest

from stitch_core.ports import EngineError
from stitch_core.replica.activation import ReplicaFailed
from stitch_core.replica.admission import Ticket
from stitch_core.replica.probe import LEAST_TOLERANCE, TRIES
from stitch_core.replica.reconciler import Follow
from stitch_core.versions import Refusal, VersionConstraint
from tests.replica.following import Following
from tests.replica.probing import damaging, kept_file, learned, said, served

pytestmark = pytest.mark.virtual_time


@pytest.fixture
async def f(tmp_path: Path) -> Following:
    return await served(tmp_path)


async def test_a_state_that_comes_back_is_compared_off_the_pause_and_served(f: Following) -> None:
    asked = len(f.engine.names("probe"))
    manifest = await f.bring_back(f.versions[1])
    paused: list[bool] = []

    async def hook() -> None:
        paused.append(f.engine.paused)
        assert not f.gate.ready

    f.engine.before["probe"] = hook
    await f.catch_up()
    f.check(manifest)
    assert paused == [False]
    assert len(f.engine.names("probe")) == asked + 1
    last = said(f)["last"]
    assert (last["outcome"], last["state"], last["difference"]) == ("same", manifest.state, 0.0)
    assert last["tolerance"] == LEAST_TOLERANCE


async def test_other_weights_under_a_state_that_comes_back_end_the_replica_before_it_answers(
    f: Following,
) -> None:
    """The copy was confirmed by instance and label: only the weights are not those of version 1."""
    await f.bring_back(f.versions[1])
    damaging(f)
    with pytest.raises(ReplicaFailed):
        await f.reconciler.run()
    assert f.gate.failed is not None
    assert (f.gate.serving, f.gate.ready) == (None, False)
    assert f.engine.label == str(f.versions[-1].version)
    refused = await f.gate.admit(VersionConstraint(), "q")
    assert isinstance(refused, Refusal)
    assert refused.status == 503
    assert (said(f)["last"]["outcome"], said(f)["outcomes"]["differs"]) == ("differs", 1)
    assert f.engine.names("probe")[-TRIES:] == [f.engine.label] * TRIES


async def test_a_channel_that_moves_back_is_compared(tmp_path: Path) -> None:
    f = Following(tmp_path, Follow(channel="latest"), probes=True)
    f.point("r")
    for _ in range(2):
        await f.publish()
        await f.catch_up()
        await learned(f)
    f.point("r", 1)
    damaging(f)
    with pytest.raises(ReplicaFailed):
        await f.reconciler.run()


async def test_requests_that_wait_are_refused_and_those_that_run_are_given_up(f: Following) -> None:
    running = await f.admit("runs")
    await f.bring_back(f.versions[1])
    damaging(f)
    waiting: list[asyncio.Future[Any]] = []

    async def hook() -> None:
        if not waiting:
            waiting.append(asyncio.ensure_future(f.gate.admit(VersionConstraint(), "waits")))
        await asyncio.sleep(0.001)

    f.engine.before["probe"] = hook
    with pytest.raises(ReplicaFailed):
        await f.reconciler.run()
    assert isinstance(await waiting[0], Refusal)
    assert running.revoked is not None


async def test_a_request_that_waits_out_the_comparison_is_served(f: Following) -> None:
    manifest = await f.bring_back(f.versions[1])
    waiting: list[asyncio.Future[Any]] = []

    async def hook() -> None:
        waiting.append(asyncio.ensure_future(f.gate.admit(VersionConstraint(), "waits")))
        await asyncio.sleep(0.001)

    f.engine.before["probe"] = hook
    await f.catch_up()
    ticket = await waiting[0]
    assert isinstance(ticket, Ticket)
    assert ticket.admitted == manifest.version


async def test_without_an_answer_nothing_is_served_until_there_is_one(f: Following) -> None:
    """No answer is no verdict: the gate stays closed, status says why, and it is asked again."""
    manifest = await f.bring_back(f.versions[1])

    async def dead() -> None:
        raise EngineError("no answer")

    f.engine.before["probe"] = dead
    with pytest.raises(EngineError):
        await f.reconciler.reconcile()
    assert (f.gate.ready, f.gate.failed) == (False, None)
    assert f.gate.why_closed
    assert said(f)["last"]["outcome"] == "no_answer"
    with pytest.raises(EngineError):
        await f.reconciler.reconcile()
    activations = len(f.engine.names("activate"))
    del f.engine.before["probe"]
    await f.catch_up()
    f.check(manifest)
    assert len(f.engine.names("activate")) == activations, "it is not copied again"


async def test_an_answer_that_never_comes_has_a_deadline(f: Following) -> None:
    await f.bring_back(f.versions[1])

    async def hang() -> None:
        await asyncio.sleep(1e6)

    f.engine.before["probe"] = hang
    with pytest.raises(EngineError):
        await f.reconciler.reconcile()
    assert not f.gate.ready


async def test_the_next_version_waits_until_the_one_before_is_compared(f: Following) -> None:
    """Else what runs would give out tokens of weights that were never compared."""
    await f.bring_back(f.versions[1])
    answers = [False]

    async def hook() -> None:
        if not answers[0]:
            raise EngineError("no answer")

    f.engine.before["probe"] = hook
    with pytest.raises(EngineError):
        await f.reconciler.reconcile()
    newest = await f.publish()
    with pytest.raises(EngineError):
        await f.reconciler.reconcile()
    assert f.engine.label == str(f.versions[-2].version)
    answers[0] = True
    await f.catch_up()
    f.check(newest)


async def test_one_answer_that_is_off_is_asked_again(f: Following) -> None:
    manifest = await f.bring_back(f.versions[1])
    off = iter([0.5] * 31)
    f.engine.noise = lambda: next(off, 0.0)
    await f.catch_up()
    f.check(manifest)
    assert said(f)["last"]["difference"] == 0.0


async def test_an_engine_that_restarts_during_the_comparison_is_another_one_not_a_wrong_one(
    f: Following,
) -> None:
    manifest = await f.bring_back(f.versions[1])
    restarts = iter([f.engine.restart])

    async def hook() -> None:
        next(restarts, lambda: None)()

    f.engine.before["probe"] = hook
    with pytest.raises(EngineError):
        await f.reconciler.reconcile()
    assert f.gate.failed is None
    await f.catch_up()
    f.check(manifest)


# --------------------------------------------------------------------------------------- what cannot tell


async def test_an_engine_that_cannot_tell_is_served_unprobed(tmp_path: Path) -> None:
    f = Following(tmp_path, probes=True)

    async def cannot() -> None:
        f.engine.calls.append(("probe", None))

    f.engine.probe = cannot  # type: ignore[method-assign]
    await f.publish()
    await f.catch_up()
    f.check(f.versions[-1])
    f.check(await bring_back_boot(f))
    assert (said(f)["able"], said(f)["last"]) == (False, None)
    assert len(f.engine.names("probe")) == 1


async def bring_back_boot(f: Following) -> Any:
    manifest = await f.bring_back(f.versions[0])
    await f.catch_up()
    return manifest


async def test_numbers_that_are_none_are_never_kept(tmp_path: Path) -> None:
    f = Following(tmp_path, probes=True)
    await f.publish()
    await f.catch_up()
    f.engine.noise = lambda: math.nan
    manifest = await f.publish()
    await f.catch_up()
    f.check(manifest)
    await f.until(lambda: said(f)["last"]["outcome"] == "not_finite")
    assert manifest.state not in (await kept_file(f))["answers"]
    assert json.dumps(f.reconciler.status(), allow_nan=False)


async def test_weights_that_give_no_numbers_any_more_differ(f: Following) -> None:
    await f.bring_back(f.versions[1])
    f.engine.noise = lambda: math.nan
    with pytest.raises(ReplicaFailed):
        await f.reconciler.run()
