"""The answers of a probe: when they are kept, for how long, and what is not taken for one."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from stitch_core.replica.activation import ReplicaFailed
from stitch_core.replica.probe import ALONE, LEAST_TOLERANCE, NOISE_FACTOR, TOGETHER
from stitch_core.replica.probe_kept import KEPT_STATES, KeptAnswers
from tests.replica.following import Following
from tests.replica.probing import damage, damaging, kept_file, learned, restarted, said, served
from tests.small_run import FILES, inline

pytestmark = pytest.mark.virtual_time


@pytest.fixture
async def f(tmp_path: Path) -> Following:
    return await served(tmp_path)


async def test_an_answer_is_kept_once_the_gate_is_open(f: Following) -> None:
    """The first time nothing waits for it: one request a version, whatever it takes."""
    opened: list[bool] = []

    async def slow() -> None:
        opened.append(f.gate.ready)
        await asyncio.sleep(3.0)

    f.engine.before["probe"] = slow
    manifest = await f.publish()
    await f.catch_up()
    f.check(manifest)
    assert said(f)["last"]["state"] != manifest.state
    await learned(f)
    assert opened == [True]
    assert set((await kept_file(f))["answers"]) == {one.state for one in f.versions}


async def test_an_answer_is_not_kept_if_the_version_changed_meanwhile(f: Following) -> None:
    async def slow() -> None:
        await asyncio.sleep(3.0)

    f.engine.before["probe"] = slow
    passed = await f.publish()
    await f.catch_up()
    await asyncio.sleep(2.0)
    await f.publish()
    await f.catch_up()
    await learned(f)
    assert passed.state not in (await kept_file(f))["answers"]


async def test_a_start_measures_the_noise_and_keeps_the_boot_checkpoints_answer(tmp_path: Path) -> None:
    f = Following(tmp_path, probes=True)
    rng = random.Random(1)
    f.engine.noise = lambda: rng.gauss(0, 0.2)
    await f.claim()
    assert said(f)["able"] is None
    await f.catch_up()
    f.check(f.versions[0])
    now = said(f)
    assert (now["able"], now["states"]) == (True, 1)
    assert now["tolerance"] == NOISE_FACTOR * now["noise"] > LEAST_TOLERANCE
    assert set((await kept_file(f))["answers"]) == {f.trainer.state}
    assert len(f.engine.names("probe")) == ALONE + TOGETHER + 1


async def test_a_replica_that_restarted_compares_what_its_file_has(f: Following) -> None:
    restarted(f)
    await f.catch_up()
    f.check(f.versions[-1])
    assert said(f)["outcomes"] == {"same": 2}, "the boot checkpoint's weights, and version 2's"
    restarted(f)
    damaging(f)
    with pytest.raises(ReplicaFailed):
        await f.reconciler.run()


async def test_an_engine_that_boots_from_other_weights_serves_nothing(f: Following) -> None:
    """Under its boot label, its checkpoint as it was all the time: only the probe tells."""
    restarted(f)
    damage(f)
    activations = len(f.engine.names("activate"))
    with pytest.raises(ReplicaFailed):
        await f.reconciler.run()
    assert len(f.engine.names("activate")) == activations


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{", b"[]", b"\xff", b"{}", b'{"format":"stitch.probe/2","signature":"s","answers":{}}',
        b'{"format":"stitch.probe/1","signature":"s"}',
        b'{"format":"stitch.probe/1","signature":"s","answers":{"sha256:0":[]}}',
        b'{"format":"stitch.probe/1","signature":"s","answers":{"sha256:0":[1,"2"]}}',
        b'{"format":"stitch.probe/1","signature":"s","answers":{"sha256:0":[NaN]}}',
        b'{"format":"stitch.probe/1","signature":1,"answers":{}}',
    ],
)  # fmt: skip
async def test_a_damaged_or_foreign_file_is_none(f: Following, data: bytes) -> None:
    (f.root / "host" / "probe.json").write_bytes(data)
    restarted(f, engine=False)
    f.said.clear()
    await f.catch_up()
    f.check(f.versions[-1])
    assert "probe.json" in f.said[0]
    await learned(f)
    assert f.versions[-1].state in (await kept_file(f))["answers"]


async def test_a_file_that_cannot_be_written_costs_no_version(f: Following) -> None:
    (f.root / "host" / ".probe.json.tmp").mkdir()
    manifest = await f.publish()
    await f.catch_up()
    f.check(manifest)
    await learned(f)
    await f.catch_up()
    assert "probe.json" in f.said[-1]
    f.check(await back(f))


async def back(f: Following) -> Any:
    manifest = await f.bring_back(f.versions[-1])
    await f.catch_up()
    assert said(f)["last"]["outcome"] == "same"
    return manifest


async def test_answers_of_another_signature_are_none(f: Following) -> None:
    """Another release or number format gives other numbers of the same weights."""
    restarted(f)
    f.engine.signature = "t"
    f.engine.noise = lambda: 0.0
    await f.catch_up()
    f.check(f.versions[-1])
    assert said(f)["outcomes"]["kept"] >= 1
    await learned(f)
    assert ((await kept_file(f))["signature"], len((await kept_file(f))["answers"])) == ("t", 2)


async def test_the_newest_states_are_kept_and_the_boot_checkpoints(tmp_path: Path) -> None:
    path = tmp_path / "probe.json"
    kept = KeptAnswers(FILES, path, inline, pytest.fail)
    await kept.use("s")
    kept.boot = "boot"
    kept.keep("boot", (-1.0,))
    for number in range(KEPT_STATES + 10):
        kept.keep(f"state {number}", (-float(number),))
    assert len(kept) == KEPT_STATES
    assert (kept.get("boot"), kept.get("state 10")) == ((-1.0,), None)
    await kept.save()
    again = KeptAnswers(FILES, path, inline, pytest.fail)
    await again.use("s")
    assert again.get(f"state {KEPT_STATES + 9}") == (-float(KEPT_STATES + 9),)
    assert len(again) == KEPT_STATES
