"""An engine that is a server of its own, with the replica as a sidecar in front of it."""

from __future__ import annotations

import random
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.embedded.models import random_tensors, save

from .processes import Fleet, caught_up, get, ready, until
from .traffic import Traffic, failures, proven

pytestmark = pytest.mark.real

RUN = "sidecar"
# 409: it serves nothing now, but knows the run that is asked for.
LOST = ("503 EngineUnavailable", "event EngineUnavailable", "409 WeightVersionNotReady")


@pytest.fixture
def fleet(tmp_path: Path) -> Any:
    fleet = Fleet(tmp_path)
    yield fleet
    fleet.close()


async def test_an_engine_that_restarts_behind_it_never_passes_for_what_it_was(fleet: Fleet) -> None:
    """C22: it comes back with boot weights; what is answered is proven, and it catches up again."""
    engine = fleet.engine()
    engine_url = await engine.url()
    sidecar = fleet.replica("s", "--run", RUN, "--engine", engine_url)
    trainer = fleet.trainer(RUN)
    trainer.step()
    url = await sidecar.url()
    await caught_up(url, trainer)
    trainer.step(changes=False)
    await caught_up(url, trainer)
    trainer.start()

    def demand(rng: random.Random) -> dict[str, Any]:
        # The sidecar refuses at once what it does not serve yet: ask for nothing newer than it has.
        return {"run": RUN, "min_version": 1}

    async with Traffic(url, demand, seed=1) as traffic:
        await traffic.more(20)
        engine.send(signal.SIGKILL)
        await engine.ended()
        fleet.engine(int(engine_url.rpartition(":")[2]))
        await traffic.more(20)
        trainer.stop()
        await caught_up(url, trainer)
        await traffic.more(5)
    lost = failures(traffic.outcomes)
    assert lost, "the engine died under them"
    for outcome in lost:
        assert outcome.detail["retryable"], outcome
        assert outcome.error in LOST, outcome
    assert sidecar.process.poll() is None
    await proven(fleet, RUN, traffic.outcomes)


@pytest.mark.parametrize("label", ["default", f"{RUN}/weight_v000000"])
async def test_c76_an_engine_that_comes_back_with_other_weights_at_version_0(
    fleet: Fleet, label: str
) -> None:
    """Another ``--model``, and perhaps the label that it had: what it says of itself proves nothing."""
    other = fleet.root / "other"
    save(other, fleet.raw, random_tensors(fleet.config, seed=2))
    engine = fleet.engine(model=other)
    engine_url = await engine.url()
    trainer = fleet.trainer(RUN)
    sidecar = fleet.replica("s", "--run", RUN, "--engine", engine_url)
    url = await sidecar.url()
    await caught_up(url, trainer)
    async with Traffic(url, lambda _: {"run": RUN}, seed=1) as traffic:
        await traffic.more(10)
        engine.send(signal.SIGKILL)
        await engine.ended()
        again = fleet.engine(int(engine_url.rpartition(":")[2]), "--weight-version", label, model=other)
        await again.url()
        await traffic.more(20)
        trainer.step()  # the proof wants another version to be found out
        await caught_up(url, trainer)
        await traffic.more(5)
    for outcome in failures(traffic.outcomes):
        assert outcome.error in LOST, outcome
    assert sidecar.process.poll() is None
    await proven(fleet, RUN, traffic.outcomes)


async def test_an_engine_that_relabels_without_copying_is_found_when_a_state_comes_back(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It confirms the rollback to version 1 and goes on with version 2's weights: the sidecar ends, and all
    answers until then are proven. Behind the next sidecar it copies, and serves.
    """
    lies = fleet.root / "lies"
    monkeypatch.setenv("LIES", str(lies))
    engine = fleet.engine(program=(str(Path(__file__).with_name("lying_engine.py")),))
    options = ("--run", RUN, "--engine", await engine.url())
    sidecar = fleet.replica("s", *options)
    trainer = fleet.trainer(RUN)
    url = await sidecar.url()
    for seed in (11, 12):
        trainer.step(seed=seed)
        await caught_up(url, trainer)
        await ready(url, lambda said: said["probe"]["last"]["state"] == trainer.state)
    kept = fleet.root / "host-s" / "probe.json"
    await until(lambda: kept.exists() and trainer.state in kept.read_text(), "it is written")
    async with Traffic(url, lambda _: {"run": RUN}, seed=1) as traffic:
        await traffic.more(10)
        lies.touch()
        rollback = fleet.cli("rollback", "rollback", "--store", fleet.store_url, "--run", RUN, "--to", "1")
        assert await rollback.ended() == 0, rollback.stderr()
        assert await sidecar.ended() == 1, sidecar.stderr()
    assert any(outcome.ok for outcome in traffic.outcomes)
    assert all(a["meta_info"]["weight_version_end"] <= 2 for o in traffic.outcomes for a in o.answers)
    await proven(fleet, RUN, traffic.outcomes)
    lies.unlink()
    again = fleet.replica("s", *options)
    said = await ready(await again.url(), lambda said: said["applied"] == 3)
    assert (said["probe"]["last"]["outcome"], said["probe"]["outcomes"]) == ("same", {"same": 1})
    assert (await get(await again.url(), "/health"))[0] == 200
