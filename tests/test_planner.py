"""The planner reads little, takes records where they are cheaper, and believes no sketch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stitch_core.chain import ChainReader
from stitch_core.checkpoint import Checkpoint
from stitch_core.fulls import upload_full
from stitch_core.host_checkpoint import RepresentationInvalid
from stitch_core.lineage import NoPlan, Undo
from stitch_core.manifest import Manifest
from stitch_core.planner import FEW, Planner
from stitch_core.ports import NotFound
from stitch_core.records import Record, upload_record
from stitch_core.stores.transfer import DigestMismatch
from stitch_core.testing.checkpoints import write_checkpoint
from tests.anchored_run import HOW, upload_span
from tests.replica.following import Following
from tests.small_run import FILES


@pytest.fixture
async def f(tmp_path: Path) -> Following:
    """A run at version 1, which the replica serves."""
    following = Following(tmp_path)
    await following.publish()
    await following.catch_up()
    return following


async def anchor(f: Following, manifest: Manifest) -> Record:
    directory = f.root / f"anchor{manifest.number}"
    write_checkpoint(directory, FILES, f.trainer.weights[manifest.state], 2)
    return (await upload_full(f.memory, manifest, directory, FILES, **HOW))[0]


async def span(f: Following, since: int, number: int) -> Record:
    return await upload_span(f.memory, f.root, f.trainer, f.versions[since], f.versions[number])


async def plan_of(f: Following, target: int, held: int, excluded: set[str] = frozenset()) -> Any:  # type: ignore[assignment]
    f.store.calls.clear()
    planner = Planner(f.store, ChainReader(f.store), piece_cost=100)
    return await planner.plan(f.versions[target], {f.versions[held].state}, excluded)


def requests(f: Following) -> list[str]:
    return [name for name, _ in f.store.calls]


async def test_the_next_version_needs_no_request(f: Following) -> None:
    """Neither a listing nor a manifest: the target's own is at hand."""
    await f.publish()
    plan = await plan_of(f, 2, 1)
    assert plan.sources == (f.versions[2],)
    assert requests(f) == []


async def test_a_joiner_of_a_long_run_reads_one_manifest_of_64_and_what_it_uses(f: Following) -> None:
    while len(f.versions) < 100:
        await f.publish()
    aggregate = await span(f, 0, 96)
    plan = await plan_of(f, 99, 0)
    assert plan.sources == (aggregate, *f.versions[97:])
    # One for the history below 64 versions, two of the deltas (the target is at hand), the record.
    assert sorted(requests(f)) == ["list", "list"] + ["load"] * 4


async def test_a_laggard_takes_a_span_when_its_pieces_are_many(f: Following) -> None:
    for _ in range(FEW + 2):
        await f.publish()
    there = await span(f, 1, 5)
    assert (await plan_of(f, 6, 1)).sources == (there, f.versions[6])
    # A plan of few pieces is not worth a listing.
    assert (await plan_of(f, 4, 1)).sources == tuple(f.versions[2:5])
    assert "list" not in requests(f)


async def test_a_replica_above_an_exact_channel_goes_back(f: Following) -> None:
    """Spans and deltas are undone; nothing of the size of the model is fetched."""
    for _ in range(FEW + 3):
        await f.publish()
    there = await span(f, 1, 6)
    plan = await plan_of(f, 1, 7)
    assert [type(source) for source in plan.deltas] == [Undo, Undo]
    assert [source.digest() for source in plan.deltas] == [f.versions[7].digest(), there.digest()]
    await f.catch_up()
    staged = await f.reconciler._stager.stage(f.versions[1])
    assert Checkpoint.open(staged.directory, FILES).state() == f.versions[1].state


async def test_c10_the_deltas_below_are_gone_and_a_record_is_there(f: Following) -> None:
    """The 404 excludes what is gone; the plan after it takes the record, and what was fetched is kept."""
    for _ in range(FEW):
        await f.publish()
    record = await anchor(f, f.versions[3])
    for file in f.versions[3].representation.files:
        del f.memory.state.objects[f.versions[3].file_key(file.name)]
    with pytest.raises(NotFound):
        await f.reconciler.reconcile()
    f.store.calls.clear()
    await f.catch_up()
    newest = f.versions[4]
    f.check(newest)
    read = {key for name, key in f.store.calls if name == "read"}
    files = {record.file_key(file.name) for file in record.representation.files}
    assert files <= read <= files | {newest.file_key(file.name) for file in newest.representation.files}


async def test_a_missing_source_is_asked_for_again_when_nothing_else_is_left(f: Following) -> None:
    for _ in range(2):
        await f.publish()
    data = {}
    for file in f.versions[2].representation.files:
        key = f.versions[2].file_key(file.name)
        data[key] = f.memory.state.objects.pop(key)
    for _ in range(3):
        with pytest.raises(NotFound):
            await f.reconciler.reconcile()
    f.memory.state.objects.update(data)
    await f.catch_up()
    f.check(f.versions[3])


@pytest.mark.parametrize("lie", ["bytes", "weights", "document", "gone", "states"])
async def test_c34_a_cheap_span_is_corrupt(f: Following, lie: str) -> None:
    """Excluded, replanned, never chosen again by this process, never a loop."""
    for _ in range(FEW + 2):
        await f.publish()
    honest = await span(f, 1, 5)
    objects = f.memory.state.objects
    if lie == "bytes":
        key = honest.file_key(honest.representation.files[0].name)
        objects[key] = objects[key][:-1] + b"\x00\x00"[: 1 + (objects[key][-1] == 0)][:1] + b""
        objects[key] = bytes([objects[key][0] ^ 1]) + objects[key][1:]
    elif lie == "weights":  # it says that it leads to 5 and leads to 4
        for key in [key for key in objects if "/spans/" in key]:
            del objects[key]
        wrong = await span(f, 1, 4)
        how = replace(wrong.representation)
        honest = Record("r", 5, f.versions[5].state, how, 1)
        await upload_record(f.memory, honest, f.root / "span1-4", FILES, HOW)
    elif lie == "document":
        objects[honest.key] = objects[honest.key].replace(b'"since":1', b'"since":0')
    elif lie == "gone":
        del objects[honest.key]
    else:  # of another chain's states
        data = Record("r", 5, "sha256:" + "7" * 64, honest.representation, 1)
        for key in [key for key in objects if "/spans/" in key]:
            del objects[key]
        await upload_record(f.memory, data, f.root / "span1-5", FILES, HOW)
    failures = 0
    while True:
        try:
            if not await f.reconciler.reconcile():
                break
        except (DigestMismatch, RepresentationInvalid, NotFound):
            failures += 1
            assert failures < 3
    f.check(f.versions[-1])
    assert failures == (1 if lie in ("bytes", "weights") else 0)
    f.store.calls.clear()
    await f.publish()
    await f.catch_up()
    assert not [key for _, key in f.store.calls if key.startswith("runs/r/spans/0")]


async def test_a_delta_on_an_older_version_and_a_full_below(f: Following) -> None:
    """Sketches say that a version is a delta from the one before it: what is read corrects them."""
    await f.publish()
    f.trainer.resume(f.versions[1].state)
    await f.publish()
    await f.publish()
    plan = await plan_of(f, 4, 0)
    assert plan.sources == (f.versions[1], f.versions[3], f.versions[4])
    plan = await plan_of(f, 4, 2)
    assert [s.digest() for s in plan.sources] == [f.versions[i].digest() for i in (2, 3, 4)]
    full = await f.publish_full()
    await f.publish()
    with pytest.raises(NoPlan):
        await plan_of(f, 6, 0, {full.digest()})
    assert (await plan_of(f, 6, 0)).sources == (full, f.versions[6])
