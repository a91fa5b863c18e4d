"""The compactor: what it makes, that joiners take it, what it does about damage, and what it deletes."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest

from stitch_core.chain import ChainReader
from stitch_core.checkpoint import Checkpoint
from stitch_core.compactor import Compactor, Pass
from stitch_core.delta.encoder import DeltaEncoder
from stitch_core.delta.sparse_layout import width_of
from stitch_core.host_checkpoint import HostCheckpoint
from stitch_core.planner import Planner
from stitch_core.ports import Store, SystemClock
from stitch_core.records import list_records
from stitch_core.replica.staging import Stager
from stitch_core.retry import Retry
from tests.anchored_run import Run
from tests.small_run import FILES, LAYOUT, as_payload, inline

WIDTHS = {name: width_of(dtype) for name, (dtype, _) in LAYOUT.items()}


@pytest.fixture(params=["sparse", "xor"])
async def run(tmp_path: Path, request: pytest.FixtureRequest) -> Run:
    made = Run(tmp_path)
    made.trainer.encoder = DeltaEncoder(made.trainer.tensors, request.param)
    await made.claim()
    return made


def compactor(run: Run, name: str = "c", store: Store | None = None, **options: Any) -> Compactor:
    return Compactor(
        store or run.memory, "r", run.root / f"work-{name}", name, files=FILES, clock=run.clock,
        rng=random.Random(0), run_blocking=inline, policy=Retry(attempts=1), **options,
    )  # fmt: skip


async def spans(run: Run) -> set[tuple[int | None, int]]:
    return {(place.since, place.number) for place in await list_records(run.memory, "r", ("spans",))}


async def joined(run: Run, number: int, pieces: int | None = None) -> None:
    """A new host reaches a version from the boot checkpoint, in so many pieces."""
    target, host = run.versions[number], HostCheckpoint(run.root / f"joiner{number}-{random.random()}", FILES)
    chain = ChainReader(run.memory)
    if pieces is not None:
        plan = await Planner(run.memory, chain, piece_cost=0).plan(target, {run.versions[0].state})
        assert len(plan.sources) == pieces, [str(source.version) for source in plan.sources]
    stager = Stager(
        run.memory, chain, host, run.trainer.boot, files=FILES, clock=SystemClock(), rng=random.Random(0),
        run_blocking=inline, activity=lambda _: None,
    )  # fmt: skip
    try:
        assert Checkpoint.open((await stager.stage(target)).directory, FILES).state() == target.state
    finally:
        host.close()


async def test_a_joiner_takes_an_aggregate_and_a_short_tail(run: Run) -> None:
    await run.publish(22)
    done = await compactor(run).compact()
    assert {(0, 4), (0, 16), (16, 20)} <= await spans(run)
    assert (done.left, done.problems, done.aggregate) == ((), {}, 16)
    assert all(
        made.record.representation.encoding == run.versions[1].representation.encoding for made in done.made
    )
    for number in (7, 16, 20, 22):
        await joined(run, number)
    # Nothing is left to do, and the next pass knows it by one listing.
    assert (await compactor(run).compact()).made == ()


async def test_it_follows_and_the_newest_aggregate_is_made_of_the_one_before(run: Run) -> None:
    job = compactor(run)
    made = []
    for _ in range(12):
        await run.publish(4)
        made += (await job.compact()).made
    by_range = {(one.record.since, one.record.number): one for one in made}
    assert by_range[0, 32].pieces == 2
    assert by_range[16, 32].pieces == 4
    assert by_range[0, 48].pieces == 2
    await joined(run, 48)
    left = sorted(path.name for path in (run.root / "work-c").iterdir())
    assert left == ["span-0-48"]


async def test_two_at_once_make_each_span_once(run: Run) -> None:
    await run.publish(17)
    first, second = await asyncio.gather(compactor(run, "a").compact(), compactor(run, "b").compact())
    assert first.busy or second.busy or not (first.made and second.made)
    ranges = [(p.since, p.number) for p in await list_records(run.memory, "r", ("spans",))]
    assert len(ranges) == len(set(ranges))


async def test_two_that_overlap_all_the_same_write_equal_spans(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease is a hint: without it they write the same bytes under the same names."""
    from stitch_core.anchors import Lease

    async def always(self: Lease) -> bool:
        return True

    monkeypatch.setattr(Lease, "take", always)
    await run.publish(17)
    passes = await asyncio.gather(
        compactor(run, "a", run.store).compact(), compactor(run, "b", run.store).compact()
    )
    assert [one.problems for one in passes] == [{}, {}]
    ranges = [(p.since, p.number) for p in await list_records(run.memory, "r", ("spans",))]
    assert len(ranges) == len(set(ranges)) == 5


async def test_c34_a_corrupt_span_is_not_merged_again(run: Run) -> None:
    await run.publish(15)
    await compactor(run).compact()
    objects = run.memory.state.objects
    keys = [key for key in objects if "/spans/000004-000008" in key and not key.endswith(".json")]
    for key in keys:
        objects[key] = bytes([objects[key][0] ^ 1]) + objects[key][1:]
    await run.publish(2)
    run.store.calls.clear()
    job = compactor(run, "d", run.store)
    done = await job.compact()
    assert (0, 16) in await spans(run)
    # The name is taken by what is corrupt: it is left alone from now on.
    assert list(done.problems) in ([(4, 8)], [])
    reads = sum(key in keys for name, key in run.store.calls if name == "read")
    await run.publish(1)
    await job.compact()
    assert sum(key in keys for name, key in run.store.calls if name == "read") == reads
    await joined(run, 18)


async def test_what_is_no_xor_ends_what_can_be_merged(run: Run) -> None:
    """A full in the chain: aggregates begin at it, and a joiner takes the full first."""
    await run.publish(5)
    number = run.publisher.reserve()
    run.versions.append(await run.publisher.publish(run.trainer.full(), number))
    await run.publish(30)
    done = await compactor(run).compact()
    assert done.root == 6
    assert done.left == ()
    assert {(6, 32), (16, 32), (32, 36)} <= await spans(run)
    await joined(run, 36, pieces=3)


async def test_deltas_that_were_collected_are_not_asked_for_again(run: Run) -> None:
    await run.publish(20)
    await run.anchor(18)
    await run.publish(20)
    floor = run.versions[40].floor
    assert floor is not None
    assert floor.number == 18
    for key in [key for key in run.memory.state.objects if "/weight_v0000" in key]:
        if int(key.split("/weight_v")[1][:6]) <= 18:
            del run.memory.state.objects[key]
    job = compactor(run, "c", run.store)
    done = await job.compact()
    assert (done.root, done.left) == (18, ())
    assert (18, 32) in await spans(run)
    run.store.calls.clear()
    await job.compact()
    assert not [key for _, key in run.store.calls if "/weight_v" in key]
    await joined(run, 40, pieces=4)


async def test_replaced_aggregates_go_after_the_grace_and_not_while_they_are_fetched(run: Run) -> None:
    job = compactor(run, grace=100.0)
    for _ in range(5):
        await run.publish(16)
        assert not (await job.compact()).deleted
    aggregates = {place.number: place for place in await list_records(run.memory, "r") if place.since == 0}
    assert {32, 48, 64, 80} <= aggregates.keys()
    run.clock.now += 101.0
    record = {"id": "x", "expires": run.clock.now + 10, "fetching": [aggregates[48].digest]}
    await run.memory.replace("replicas/x.json", json.dumps(record).encode())
    deleted = (await job.compact()).deleted
    assert [name.split("/")[-1][:13] for name in deleted] == ["000000-000032"]
    assert not [key for key in run.memory.state.objects if "/spans/000000-000032" in key]
    run.clock.now += 20.0  # it expired, by a clock that may be late: the grace is for that as well
    assert not (await job.compact()).deleted
    run.clock.now += 100.0
    assert [name.split("/")[-1][:13] for name in (await job.compact()).deleted] == ["000000-000048"]
    assert not (await job.compact()).deleted
    await joined(run, 80, pieces=1)


async def test_with_widths_spans_of_xor_deltas_are_sparse_and_cross_a_change_of_the_encoding(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path)
    await run.claim()
    await run.publish(10)
    run.trainer.encoder = DeltaEncoder(run.trainer.tensors, "sparse")
    await run.publish(10)
    done = await compactor(run, widths=WIDTHS).compact()
    assert done.problems == {}
    assert {made.record.representation.encoding for made in done.made} == {"sparse"}
    assert (0, 16) in await spans(run)
    await joined(run, 18, pieces=3)


async def test_without_widths_a_change_of_the_encoding_is_where_aggregates_begin(tmp_path: Path) -> None:
    run = Run(tmp_path)
    await run.claim()
    await run.publish(10)
    run.trainer.encoder = DeltaEncoder(run.trainer.tensors, "sparse")
    await run.publish(30)
    done = await compactor(run).compact()
    assert done.root == 10
    await joined(run, 40)


async def test_a_step_back_needs_no_span(run: Run) -> None:
    """Versions of equal states: nothing leads between them, and what lies around is merged."""
    start = run.trainer.tensors
    await run.publish(3)
    back = run.trainer.encoder.encode(start, run.root / "back", FILES, number=4, base_number=3)
    run.trainer.tensors = start
    number = run.publisher.reserve()
    run.versions.append(await run.publisher.publish(as_payload(back, run.root / "back"), number))
    run.trainer.encoder.commit()
    assert run.versions[4].state == run.versions[0].state
    await run.publish(14)
    done: Pass = await compactor(run).compact()
    assert done.left == ()
    assert (0, 4) not in await spans(run)
    await joined(run, 18)


async def test_steps_that_changed_nothing_leave_no_span_missing(run: Run) -> None:
    """A warm-up: of four versions one leads over all of them. That was exit code 1, and a span missing."""
    await run.publish()
    for number in (2, 3, 4):
        same = run.trainer.encoder.encode(
            run.trainer.tensors, run.root / f"same{number}", FILES, number=number, base_number=number - 1
        )
        payload = as_payload(same, run.root / f"same{number}")
        run.versions.append(await run.publisher.publish(payload, run.publisher.reserve()))
        run.trainer.encoder.commit()
    job = compactor(run)
    done = await job.compact()
    assert (done.left, done.problems, done.root) == ((), {}, 0)
    assert await spans(run) == set()
    await run.publish(14)
    done = await job.compact()
    assert (done.left, done.problems, done.root, done.aggregate) == ((), {}, 0, 16)
    await joined(run, 18)


@pytest.mark.parametrize("fault", ["before", "after", "late"])
async def test_a_store_that_fails_at_any_call(tmp_path: Path, fault: str) -> None:
    """It is started again and again; in the end everything is there once, and whole."""
    run = Run(tmp_path)
    run.trainer.encoder = DeltaEncoder(run.trainer.tensors, "sparse")
    await run.claim()
    await run.publish(17)
    at = 0
    while True:
        for key in [key for key in run.memory.state.objects if "/spans/" in key]:
            del run.memory.state.objects[key]
        run.store.calls.clear()
        run.store.fail = lambda index, name, key, at=at: fault if index == at else None  # type: ignore[misc]
        failed = False
        try:
            await compactor(run, f"c{at}", run.store).compact()
        except Exception:
            failed = True
        run.store.fail = lambda *_: None
        run.clock.now += 61.0  # the lease of the one that failed
        await compactor(run, f"d{at}", run.memory).compact()
        await run.store.land()
        ranges = [(p.since, p.number) for p in await list_records(run.memory, "r", ("spans",))]
        assert sorted(ranges) == sorted(set(ranges)) == [(0, 4), (0, 16), (4, 8), (8, 12), (12, 16)] or (
            sorted(ranges) == [(0, 4), (0, 16), (4, 8), (8, 12), (12, 16)]
        )
        if not failed and at > len(run.store.calls):
            break
        at += 19
    await joined(run, 17)
