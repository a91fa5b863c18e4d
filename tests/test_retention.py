"""The collector deletes what nobody can need any more, and nothing else, whoever sleeps meanwhile."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

import pytest

from stitch_core.chain import ChainReader, NoHead
from stitch_core.files import PosixFiles
from stitch_core.head import Channel, channel_key
from stitch_core.manifest import FormatError, Manifest, canonical_json, run_prefix
from stitch_core.pins import Pin, pin_key
from stitch_core.planner import Planner
from stitch_core.ports import Entry, Stamp, StoreError, Unavailable
from stitch_core.publisher import PROBE, Fenced
from stitch_core.retention import BATCH, LOOK_AGAIN, Collector, Sweep
from stitch_core.retry import Retry
from stitch_core.stores.local import LocalStore
from tests.anchored_run import Run
from tests.small_run import inline, rebuild_all

DAY = 24 * 3600.0


@pytest.fixture
async def run(tmp_path: Path) -> Run:
    """Versions 0 to 12, fulls beside 3, 6 and 9, floors raised; a version every hour."""
    run = Run(tmp_path)
    run.pace = 3600.0
    await run.claim()
    for _ in range(4):
        await run.publish(3)
        if run.versions[-1].number < 12:
            await run.anchor(run.versions[-1].number)
    assert [floor(m) for m in run.versions[1:]] == [0, 0, 0, 3, 3, 3, 6, 6, 6, 9, 9, 9]
    return run


def floor(manifest: Manifest) -> int | None:
    return manifest.floor.number if manifest.floor else None


def collector(run: Run, grace: float = DAY) -> Collector:
    return Collector(
        run.store, "r", clock=run.clock, rng=random.Random(0), grace=grace, policy=Retry(attempts=1)
    )


async def collect(run: Run, grace: float = DAY) -> Sweep:
    return await collector(run, grace).collect()


def payload(run: Run) -> set[int]:
    """Numbers of versions that have payload in the store."""
    keys = [key.split("/") for key in run.memory.state.objects if "/weight_v" in key]
    return {int(key[3].removeprefix("weight_v")) for key in keys}


def records(run: Run) -> set[str]:
    return {key.split("/")[3][:13].partition(".")[0] for key in run.memory.state.objects
            if "/fulls/" in key or "/spans/" in key}  # fmt: skip


async def joins(run: Run) -> None:
    """A new host reaches the head from the store as it is."""
    await Planner(run.memory, ChainReader(run.memory)).plan(run.versions[-1], {run.versions[0].state})


# ------------------------------------------------------------------------------------------------ by age


async def test_below_the_floor_of_a_head_that_is_older_than_the_grace(run: Run) -> None:
    await run.span(0, 2)
    await run.span(2, 6)
    sweep = await collect(run, grace=1.5 * 3600)
    assert sweep.floor == 6, "9 is the newest floor, and two are kept"
    assert payload(run) == set(range(6, 13))
    assert records(run) == {"000006", "000009", "000002-000006"}
    assert len([key for key in run.memory.state.objects if "/manifests/" in key]) == 13
    assert sweep.deleted == len(sweep.doomed)
    assert sweep.freed == sweep.bytes > 0
    await joins(run)
    again = await collect(run, grace=1.5 * 3600)
    assert again.doomed == []


async def test_the_grace_counts_from_when_a_floor_was_surely_in_force(run: Run) -> None:
    """7 was written at 7 h and says that 6, whose floor is 3, was the head; it is 12 h now."""
    assert (await collect(run, grace=5.1 * 3600)).floor == 0
    assert payload(run) == set(range(1, 13))
    assert (await collect(run, grace=4.9 * 3600)).floor == 3
    assert payload(run) == set(range(3, 13))


async def test_a_trainer_whose_clock_was_behind_had_no_grace(run: Run) -> None:
    """It dated its versions a day before it wrote them; the store knows better of each object."""
    ages = {"runs/r/manifests/000010.e0001.json": 600.0, "runs/r/manifests/000007.e0001.json": 7200.0}
    run.clock.now += 2 * DAY
    asked = tells(run, {"runs/r/head": 600.0, **ages})
    assert (await collect(run, grace=3600.0)).floor == 3, "9, whose floor is 6, is the head's since 600 s"
    assert asked == ["runs/r/head", *ages]


def tells(run: Run, ages: dict[str, float], ahead: float = 0.0) -> list[str]:
    """From now on the store tells how old objects are; the keys that it was asked for.

    ``ahead``: seconds by which the clocks of hosts are ahead of the store's.
    """
    asked: list[str] = []

    async def stamp(key: str) -> Stamp:
        asked.append(key)
        now = run.clock.now - ahead
        return Stamp(now - ages.get(key, 9e9), now)

    run.store.stamp = stamp  # type: ignore[attr-defined]
    return asked


async def test_a_store_that_tells_no_time_is_believed_by_the_publishers_dates(run: Run) -> None:
    async def stamp(key: str) -> None:
        return None

    run.store.stamp = stamp  # type: ignore[attr-defined]
    assert (await collect(run, grace=1.5 * 3600)).floor == 6


async def test_c80_a_collector_whose_clock_is_two_days_ahead_had_no_grace(run: Run) -> None:
    """What time it is says the store, also for records of replicas, which its clock took for abandoned."""
    hint(run, [run.versions[1].digest()], 15.0)
    now, ages = run.clock.now, {"runs/r/head": 60.0, "replicas/x.json": 5.0}
    ages |= {f"runs/r/{m.key}": now - m.time for m in run.versions}
    run.clock.now += 2 * DAY
    tells(run, ages, ahead=2 * DAY)
    sweep = await collect(run, grace=5.1 * 3600)
    assert (sweep.floor, sweep.deleted, sweep.forgotten) == (0, 0, 0)
    sweep = await collect(run, grace=4.9 * 3600)
    assert (sweep.floor, sweep.forgotten, payload(run)) == (3, 0, {1, *range(3, 13)})


async def test_c80_a_collector_whose_clock_is_two_days_behind_collects_all_the_same(run: Run) -> None:
    ages = {f"runs/r/{m.key}": run.clock.now - m.time for m in run.versions}
    run.clock.now -= 2 * DAY
    tells(run, ages, ahead=-2 * DAY)
    assert (await collect(run, grace=4.9 * 3600)).floor == 3


async def test_c80_on_a_directory_ages_come_from_a_file_that_the_collector_just_wrote(tmp_path: Path) -> None:
    """The files of a directory tell when they were written; what time it is said the host's clock.

    The trainer's clock is two days behind, the collector's two days ahead.
    """
    run = Run(tmp_path)
    store = LocalStore(tmp_path / "store", run_blocking=inline, clock=run.clock)
    run.store = run.memory = store  # type: ignore[assignment]
    run.clock.now = time.time() - 2 * DAY
    await run.claim()
    for _ in range(3):
        await run.publish(2)
        run.versions.append(await run.publisher.publish(run.trainer.full()))
    await run.publish()
    there = await store.list("runs/r/e")
    run.clock.now += 4 * DAY
    assert (await collect(run)).deleted == 0
    assert await store.list("runs/r/e") == there
    for path in (tmp_path / "store" / "runs").rglob("*"):
        os.utime(path, (time.time() - 2 * DAY,) * 2)
    assert (await collect(run)).floor == 6


async def test_c80_a_store_that_dates_objects_and_tells_no_time_is_not_collected(run: Run) -> None:
    async def stamp(key: str) -> Stamp:
        return Stamp(0.0, None)

    run.store.stamp = stamp  # type: ignore[attr-defined]
    with pytest.raises(StoreError):
        await collect(run, grace=1.5 * 3600)
    assert payload(run) == set(range(1, 13))


async def test_two_floors_are_kept_however_short_the_grace(run: Run) -> None:
    run.clock.now += 365 * DAY
    assert (await collect(run, grace=0.0)).floor == 6


async def test_c81_what_a_claim_left_that_tried_whether_it_can_write_goes_after_the_next_claim(
    run: Run,
) -> None:
    left = f"runs/r/e0002/weight_v000000/{PROBE}1"
    run.memory.state.objects[left] = b""
    await collect(run)
    assert left in run.memory.state.objects
    for epoch in (2, 3):
        await run.claim()
        assert run.publisher.epoch == epoch
    await collect(run)
    assert left not in run.memory.state.objects


async def test_a_run_without_a_second_floor_loses_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path)
    await run.claim()
    await run.publish(5)
    run.clock.now += 365 * DAY
    assert (await collect(run)).doomed == []
    await run.anchor(4)
    await run.publish(2)
    run.clock.now += 365 * DAY
    assert (await collect(run)).doomed == [], "version 0 is the second floor"


async def test_fulls_of_the_trainer_are_floors_as_well(tmp_path: Path) -> None:
    run = Run(tmp_path)
    await run.claim()
    for _ in range(3):
        await run.publish(2)
        run.versions.append(await run.publisher.publish(run.trainer.full()))
    await run.publish(2)
    run.clock.now += 2 * DAY
    assert (await collect(run)).floor == 6
    assert payload(run) == set(range(6, 12))
    await joins(run)


async def test_a_run_that_nobody_claimed(tmp_path: Path) -> None:
    with pytest.raises(NoHead):
        await collect(Run(tmp_path))


# -------------------------------------------------------------------------------------------- protections


@pytest.mark.parametrize("where", ["channels", "pins"])
async def test_what_a_channel_or_a_pin_names_stays_reachable(run: Run, where: str) -> None:
    key, data = channel_key("eval"), Channel("r", 4).encode()
    if where == "pins":
        key, data = pin_key("keep"), Pin("r", 4, run.versions[4].digest()).encode()
    run.memory.state.objects[key] = data
    sweep = await collect(run, grace=3600.0)
    assert sweep.kept > 0
    assert payload(run) == {3, 4, *range(6, 13)}
    plan = await Planner(run.memory, ChainReader(run.memory)).plan(run.versions[4], {run.versions[0].state})
    for source in plan.sources:
        assert all(source.file_key(f.name) in run.memory.state.objects for f in source.representation.files)


async def test_another_runs_channel_and_one_without_a_number_keep_nothing(run: Run) -> None:
    run.memory.state.objects[channel_key("eval")] = Channel("other", 4).encode()
    run.memory.state.objects[channel_key("latest")] = Channel("r").encode()
    await collect(run, grace=3600.0)
    assert payload(run) == set(range(6, 13))


@pytest.mark.parametrize("key", ["channels/eval", "pins/keep"])
async def test_a_channel_or_a_pin_that_cannot_be_read_stops_it(run: Run, key: str) -> None:
    run.memory.state.objects[key] = b"{"
    with pytest.raises(FormatError, match=key):
        await collect(run, grace=3600.0)
    assert payload(run) == set(range(1, 13))


def hint(run: Run, digests: list[str], expires_in: float, dated: float = 0.0) -> None:
    now = run.clock.now
    record = {"id": "x", "fetching": digests, "time": now + dated, "expires": now + expires_in}
    run.memory.state.objects["replicas/x.json"] = canonical_json(record)


async def test_a_joiner_slower_than_the_grace_keeps_what_it_says_that_it_fetches(run: Run) -> None:
    full = await run.anchor(2)
    hint(run, [run.versions[1].digest(), full.digest()], 15.0)
    await collect(run, grace=3600.0)
    assert payload(run) == {1, *range(6, 13)}
    assert "000002" in records(run)
    run.clock.now += 16.0 + 3600.0
    await collect(run, grace=3600.0)
    assert payload(run) == set(range(6, 13))
    assert "000002" not in records(run)


async def test_a_replica_whose_clock_is_late_keeps_what_it_fetches(run: Run) -> None:
    """It looked expired at every look, so that what it was fetching was deleted under it."""
    hint(run, [run.versions[1].digest()], 15.0 - 3500.0)
    await collect(run, grace=3600.0)
    assert payload(run) == {1, *range(6, 13)}


@pytest.mark.parametrize(("age", "kept"), [(3610.0, True), (3620.0, False)])
async def test_a_replica_whose_clock_is_late_by_more_than_the_grace(run: Run, age: float, kept: bool) -> None:
    """Its record lasts 15 s, and the store got it ``age`` seconds ago, whatever it is dated."""
    tells(run, {"replicas/x.json": age})
    hint(run, [run.versions[1].digest()], 15.0 - 9000.0, dated=-9000.0)
    await collect(run, grace=3600.0)
    assert (1 in payload(run)) is kept


async def test_what_is_fetched_of_another_run_keeps_nothing_here(run: Run) -> None:
    record = {"target": "r2/weight_v000001", "fetching": [run.versions[1].digest()], "expires": 9e9}
    run.memory.state.objects["replicas/x.json"] = canonical_json(record)
    await collect(run, grace=3600.0)
    assert payload(run) == set(range(6, 13))


async def test_a_version_far_below_is_found_by_its_digest(tmp_path: Path) -> None:
    """One that a single manifest's history does not list."""
    run = Run(tmp_path)
    await run.claim()
    for _ in range(3):
        await run.publish(30)
        await run.anchor(run.versions[-1].number)
    await run.publish(2)
    run.clock.now += 2 * DAY
    hint(run, [run.versions[2].digest()], 15.0)
    sweep = await collect(run)
    assert (sweep.floor, sweep.kept) == (60, 2)
    assert {number for number in payload(run) if number < 60} == {2}


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b'{"expires":"x"}', b'{"expires":Infinity,"fetching":[1,{}]}', b"null",
     b'{"expires":1%s,"fetching":["x"]}' % (b"0" * 400)],
)  # fmt: skip
async def test_a_damaged_replica_record_stops_nothing(run: Run, data: bytes) -> None:
    run.memory.state.objects["replicas/x.json"] = data
    await collect(run, grace=3600.0)
    assert payload(run) == set(range(6, 13))


# ----------------------------------------------------------------------------- records of replicas


def left(run: Run) -> set[str]:
    return {key for key in run.memory.state.objects if key.startswith("replicas/")}


def leave(run: Run, name: str, expires_in: float, /, **said: Any) -> str:
    now, key = run.clock.now, f"replicas/{name}.json"
    record = {"id": name, "run": "r", "fetching": [], "target": None, "time": now + expires_in - 15.0}
    run.memory.state.objects[key] = canonical_json({**record, "expires": now + expires_in, **said})
    return key


async def test_records_of_killed_replicas_piled_up_for_ever(run: Run) -> None:
    """Only the replica itself took its record away, and the next one had another id."""
    old = [leave(run, f"dead{i}", -3600.0 - i) for i in range(1, 100)]
    late, alive = leave(run, "late", -3599.0), leave(run, "alive", 15.0)
    plan = await collector(run, grace=3600.0).survey()
    assert set(plan.records) == set(old)
    assert left(run) == {*old, late, alive}
    sweep = await collect(run, grace=3600.0)
    assert (left(run), sweep.forgotten, sweep.failed) == ({late, alive}, 99, {})
    assert not any("replicas/" in entry.key for entry in sweep.doomed)


async def test_a_record_of_a_replica_that_was_to_boot_goes_whichever_run_is_collected(run: Run) -> None:
    leave(run, "booting", -9e5, run=None)
    leave(run, "of-another", -9e5, run="r2", target="r2/weight_v000003")
    assert (await collect(run)).forgotten == 2


async def test_what_another_runs_replica_said_that_it_fetches_is_left_to_that_runs_collector(
    run: Run,
) -> None:
    """Its grace may be longer, and what is fetched is kept by this record."""
    key = leave(run, "other", -9e5, run="r2", target="r2/weight_v000003", fetching=["sha256:1"])
    assert (await collect(run)).forgotten == 0
    leave(run, "mine", -9e5, target="r/weight_v000003", fetching=["sha256:1"])
    assert (await collect(run)).forgotten == 1
    assert left(run) == {key}


@pytest.mark.parametrize(("age", "gone"), [(3614.0, False), (3616.0, True)])
async def test_a_record_by_a_clock_that_is_late_is_as_old_as_the_store_says(
    run: Run, age: float, gone: bool
) -> None:
    tells(run, {"replicas/x.json": age})
    leave(run, "x", -9e5)
    assert (await collect(run, grace=3600.0)).forgotten == gone


async def test_a_record_that_is_renewed_between_the_look_and_the_delete_stays(run: Run) -> None:
    renewed, withdrawn, dead = (leave(run, name, -9e5) for name in ("renewed", "withdrawn", "dead"))
    one = collector(run)
    survey = one.survey

    async def late() -> Sweep:
        sweep = await survey()
        leave(run, "renewed", 15.0)
        del run.memory.state.objects[withdrawn]
        return sweep

    one.survey = late  # type: ignore[method-assign]
    sweep = await one.collect()
    assert set(sweep.records) == {renewed, withdrawn, dead}
    assert (sweep.forgotten, sweep.failed, left(run)) == (1, {}, {renewed})


async def test_a_record_that_cannot_be_read_or_deleted_stays(run: Run) -> None:
    run.memory.state.objects["replicas/odd.json"] = b'{"format":"of a newer Stitch"}'
    key = leave(run, "dead", -9e5)
    run.store.fail = lambda index, name, at: Unavailable("no") if name == "delete" and at == key else None
    sweep = await collect(run)
    assert (sweep.forgotten, list(sweep.failed)) == (0, [key])
    run.store.fail = lambda *_: None
    assert (await collect(run)).forgotten == 1
    assert left(run) == {"replicas/odd.json"}


# -------------------------------------------------------------------------------------------- who sleeps


async def test_c29_a_publisher_sleeps_longer_than_the_grace_before_its_swap(run: Run) -> None:
    """Its payload and manifest are there, unreferenced: they are of the head's epoch, and stay."""
    swap = run.memory.swap
    sweeps: list[Sweep] = []

    async def late(key: str, expected: str | None, data: bytes) -> str:
        run.clock.now += 10 * DAY
        sweeps.append(await collect(run))
        return await swap(key, expected, data)

    run.memory.swap = late  # type: ignore[method-assign]
    newest = await run.publish()
    run.memory.swap = swap  # type: ignore[method-assign]
    assert sweeps[0].deleted > 0
    assert all(newest.file_key(f.name) in run.memory.state.objects for f in newest.representation.files)
    await joins(run)


async def test_c29_a_publisher_of_an_old_epoch_wakes_after_its_payload_was_collected(run: Run) -> None:
    """It cannot become the head: its swap names the head as it was before the claim."""
    swap, sleeper = run.memory.swap, run.publisher
    number = sleeper.reserve()
    lost = run.trainer.delta(number)

    async def late(key: str, expected: str | None, data: bytes) -> str:
        run.memory.swap = swap  # type: ignore[method-assign]
        run.trainer.resume(run.versions[-1].state)
        await run.claim()
        await run.publish()
        sweep = await collect(run)
        assert {e.key for e in sweep.doomed} == {k for k in before - kept if "/e0001/weight_v000013/" in k}
        return await swap(key, expected, data)

    kept = set(run.memory.state.objects)
    upload = run.memory.create
    before: set[str] = set()

    async def create(key: str, source: Any) -> None:
        await upload(key, source)
        before.update(run.memory.state.objects)

    run.memory.create = create  # type: ignore[method-assign]
    run.memory.swap = late  # type: ignore[method-assign]
    with pytest.raises(Fenced):
        await sleeper.publish(lost, number)
    assert run.versions[-1].epoch == 2
    assert not [key for key in run.memory.state.objects if "/e0001/weight_v000013/" in key]
    await joins(run)


async def test_leftovers_of_the_heads_epoch_above_the_floor_stay(run: Run) -> None:
    """A failed publish may still be repeated, and a rank may still upload: the epoch is alive."""
    run.memory.state.objects[run_prefix("r") + "e0001/weight_v000099/x"] = b"1"
    run.memory.state.objects[run_prefix("r") + "e0002/weight_v000099/x"] = b"1"
    run.clock.now += 100 * DAY
    await collect(run)
    assert 99 in payload(run)


async def test_a_second_collector_is_harmless(run: Run) -> None:
    first, second = collector(run, 3600.0), collector(run, 3600.0)
    survey = await second.survey()
    await first.collect()
    second.survey = lambda: _ready(survey)  # type: ignore[method-assign]
    sweep = await second.collect()
    assert sweep.failed == {}
    assert payload(run) == set(range(6, 13))
    await joins(run)


async def _ready(sweep: Sweep) -> Sweep:
    return sweep


async def test_a_collector_that_slept_looks_again_at_what_is_protected(run: Run) -> None:
    sleeper = collector(run, 3600.0)
    survey = await sleeper.survey()
    run.memory.state.objects[channel_key("eval")] = Channel("r", 4).encode()

    async def slept() -> Sweep:
        return survey

    sleeper.survey = slept  # type: ignore[method-assign]
    monotonic, times = run.clock.monotonic, iter([0.0])
    run.clock.monotonic = lambda: next(times, monotonic() + LOOK_AGAIN)  # type: ignore[method-assign]
    await sleeper.collect()
    assert payload(run) == {3, 4, *range(6, 13)}


# ----------------------------------------------------------------------------------------------- its root


async def test_what_it_does_not_know_stays(run: Run) -> None:
    strange = [
        "runs/r/e0001/weight_v1/x", "runs/r/e1/weight_v000001/x", "runs/r/e0001/weight_v000001/a/b",
        "runs/r/e0001/notes.txt", "runs/r/fulls/readme", "runs/r/spans/readme", "runs/r/else/x",
        "runs/r2/e0001/weight_v000001/x", "runs/r/extra", "other/e0001/weight_v000001/x",
    ]  # fmt: skip
    for key in strange:
        run.memory.state.objects[key] = b"1"
    await collect(run, grace=3600.0)
    assert set(strange) <= set(run.memory.state.objects)


async def test_a_listing_that_leaves_the_run_is_not_followed(run: Run) -> None:
    listing = run.memory.list
    wrong = [Entry("runs/other/e0001/weight_v000001/x", 1), Entry("runs/r/../x/e0001/weight_v000001/y", 1)]

    async def lying(prefix: str) -> list[Entry]:
        return await listing(prefix) + (wrong if prefix.startswith("runs/") else [])

    run.memory.list = lying  # type: ignore[method-assign]
    sweep = await collector(run, 3600.0).survey()
    assert not [entry for entry in sweep.doomed if entry in wrong]


async def test_a_failed_delete_is_told_and_the_rest_goes_on(run: Run) -> None:
    hurt: list[str] = []

    def fail(index: int, name: str, key: str) -> Exception | None:
        if name == "delete" and (not hurt or key in hurt):
            hurt.append(key)
            return Unavailable("no answer")
        return None

    run.store.fail = fail
    sweep = await collect(run, grace=3600.0)
    assert list(sweep.failed) == hurt[:1]
    assert sweep.deleted == len(sweep.doomed) - 1
    run.store.fail = lambda *_: None
    assert (await collect(run, grace=3600.0)).deleted == 1


async def test_documents_of_records_go_before_their_files(run: Run) -> None:
    deleted: list[str] = []

    def note(index: int, name: str, key: str) -> None:
        if name == "delete":
            deleted.append(key)

    run.store.fail = note
    await run.anchor(1)
    await collect(run, grace=3600.0)
    documents = [i for i, key in enumerate(deleted) if key.endswith(".json") and key.count("/") == 3]
    assert documents == [0, 1]


async def test_every_version_from_the_floor_on_is_rebuilt(run: Run, tmp_path: Path) -> None:
    await collect(run, grace=3600.0)
    run.versions = run.versions[:1] + run.versions[9:]
    objects = run.memory.state.objects
    assert objects
    host = tmp_path / "host"
    with pytest.raises(Exception, match="weight_v000001"):
        await rebuild_all(run.memory, run.trainer, host)


@pytest.mark.slow
async def test_100_000_keys(run: Run) -> None:
    """In batches, and no manifest is kept for each of them."""
    for i in range(100_000):
        run.memory.state.objects[f"runs/r/e0001/weight_v000001/model-{i:06d}.safetensors"] = b"1"
    done: list[int] = []
    one = collector(run, 3600.0)
    one._progress = lambda count, freed: done.append(count)
    sweep = await one.collect()
    assert sweep.deleted == len(sweep.doomed) > 100_000
    assert len(done) >= 100_000 // BATCH
    assert payload(run) == set(range(6, 13))


async def test_symbolic_links_in_a_local_store_are_not_followed(run: Run, tmp_path: Path) -> None:
    """An epoch that somebody moved to another disk, a file that is a link: what they point to stays."""
    root, away = tmp_path / "store", tmp_path / "away"
    store = LocalStore(root, PosixFiles(), inline)
    for key, data in run.memory.state.objects.items():
        if not key.endswith("head"):
            await store.create(key, data)
    await store.swap("runs/r/head", None, run.memory.state.objects["runs/r/head"])
    for path in root.rglob("*"):
        os.utime(path, (0, 0))  # as if it was written then, and not copied just now
    (root / "runs/r/fulls").rename(away)
    (root / "runs/r/fulls").symlink_to(away)
    target = tmp_path / "precious"
    target.write_bytes(b"precious")
    link = root / "runs/r/e0001/weight_v000001/link.safetensors"
    link.symlink_to(target)
    before = {path: path.read_bytes() for path in away.rglob("*") if path.is_file()}
    one = Collector(store, "r", clock=run.clock, rng=random.Random(0), grace=3600.0, policy=Retry(attempts=1))
    sweep = await one.collect()
    assert target.read_bytes() == b"precious"
    assert {path: path.read_bytes() for path in away.rglob("*") if path.is_file()} == before
    assert sweep.deleted > 0
    assert not (root / "runs/r/e0001/weight_v000001").exists() or link.is_symlink()
