"""Fulls beside the chain that are damaged: found out where that is cheap, never in a sound one's way."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from stitch_core.anchors import Anchors
from stitch_core.fulls import COPIES, COPY_FILE, Damage, as_copy, describe_full, find_full, upload_full
from stitch_core.manifest import bytes_digest, canonical_json
from stitch_core.ports import Capabilities, StoreError
from stitch_core.records import Record, list_records
from stitch_core.stores.memory import MemoryStore
from tests.anchored_run import HOW, Run
from tests.small_run import FILES, inline


@pytest.fixture
async def run(tmp_path: Path) -> Run:
    run = Run(tmp_path)
    await run.claim()
    await run.publish(4)
    return run


async def upload(run: Run, number: int, damage: Damage | None = None) -> tuple[Record, bool]:
    path = run.directory(number)
    return await upload_full(run.store, run.versions[number], path, FILES, damage=damage, **HOW)


def flip(run: Run, key: str) -> None:
    data = bytearray(run.memory.state.objects[key])
    data[-1] ^= 1
    run.memory.state.objects[key] = bytes(data)


def weights(record: Record) -> str:
    return next(record.file_key(f.name) for f in record.representation.files if "safetensors" in f.name)


async def test_a_damaged_full_was_said_to_be_there(run: Run) -> None:
    """One byte of the same size: the anchor of that version was said to be there, and nothing could help."""
    first, _ = await upload(run, 4)
    flip(run, weights(first))
    assert await upload(run, 4) == (first, False), "its sizes are right, and nobody has read it"
    damage = Damage()
    assert await find_full(run.store, run.versions[4], "r", how=HOW, damage=damage, read_back=True) is None
    assert weights(first) in damage.problems[first.digest()]
    second, new = await upload(run, 4, damage)
    assert (new, second.state, second.name == first.name) == (True, first.state, False)
    found = await find_full(run.store, run.versions[4], "r", how=HOW, read_back=True)
    assert found == second, "whatever the listing shows first"
    assert await upload(run, 4, damage) == (second, False)


async def test_a_store_that_digests_is_not_believed_when_a_full_is_read_back(run: Run) -> None:
    """What it tells is what it took in, and not what it has now."""
    first, _ = await upload(run, 4)
    known = {key: bytes_digest(data) for key, data in run.memory.state.objects.items()}
    flip(run, weights(first))

    class Digesting(MemoryStore):
        capabilities = Capabilities(digests=True)

        async def digest(self, key: str) -> tuple[int, str | None]:
            return await self.size(key), known.get(key)

    store = Digesting(run.memory.state)
    assert await find_full(store, run.versions[4], "r", how=HOW, read_back=True) is None
    damage = Damage(problems={first.digest(): "damaged"})
    second, _ = await upload_full(
        store, run.versions[4], run.directory(4), FILES, damage=damage, **HOW
    )  # fmt: skip
    assert await find_full(store, run.versions[4], "r", how=HOW, read_back=True) == second


@pytest.mark.parametrize("what", ["a shorter file", "a document that is another", "a document that is none"])
async def test_damage_that_is_seen_without_reading_is_told_and_gone_around(run: Run, what: str) -> None:
    """It ended with 'exists', and a name that said nothing."""
    first, _ = await upload(run, 4)
    key = weights(first) if "file" in what else first.key
    data = run.memory.state.objects[key]
    run.memory.state.objects[key] = {"a shorter file": data[:-1], "a document that is none": b"x"}.get(
        what, data.replace(b'"number":4', b'"number":3')
    )
    told: list[str] = []
    damage = Damage(told.append)
    second, new = await upload(run, 4, damage)
    assert (new, second.state) == (True, first.state)
    assert len(told) == 1
    assert key in told[0]
    assert damage.keys == {first.digest(): first.key}


async def test_a_file_that_its_uploader_left_damaged_is_gone_around(run: Run) -> None:
    """Without a document nobody has said that it is whole, so it is only found out when it is in the way."""
    first, _ = await upload(run, 4)
    flip(run, weights(first))
    del run.memory.state.objects[first.key]
    damage = Damage()
    second, new = await upload(run, 4, damage)
    assert new
    assert second.name != first.name
    assert "exists with other bytes" in damage.problems[first.digest()]


async def test_a_record_of_a_later_release_is_not_damaged(run: Run) -> None:
    first, _ = await upload(run, 4)
    later = canonical_json(json.loads(first.encode()) | {"format": "stitch.full/2"})
    key = f"runs/r/fulls/000004.{bytes_digest(later)[7:]}.json"
    run.memory.state.objects[key] = later
    damage = Damage()
    assert await find_full(run.store, run.versions[4], "r", how=HOW, damage=damage, read_back=True) == first
    assert damage.problems == {}


async def test_so_many_damaged_fulls_are_enough(run: Run) -> None:
    first = describe_full(run.versions[4], run.directory(4), FILES)
    damage = Damage(problems={as_copy(first, i)[0].digest(): "damaged" for i in range(COPIES)})
    with pytest.raises(Exception, match=r"8 fulls of r/weight_v000004 are there, and all are damaged"):
        await upload(run, 4, damage)


async def test_a_copys_mark_does_not_spread(run: Run) -> None:
    """A replica that started from a copy has its mark among its files; its own fulls have none."""
    (run.directory(4) / COPY_FILE).write_text("3\n")
    record, _ = await upload(run, 4)
    assert COPY_FILE not in [file.name for file in record.representation.files]


async def test_a_fault_at_any_call_leaves_no_copy_or_a_whole_one(run: Run) -> None:
    first, _ = await upload(run, 4)
    flip(run, weights(first))
    before = dict(run.memory.state.objects)
    for fault in ("before", "after", "late"):
        hit = 0
        while True:
            run.memory.state.objects.clear()
            run.memory.state.objects.update(before)
            run.store.calls.clear()
            run.store.fail = lambda index, name, key, hit=hit, fault=fault: fault if index >= hit else None
            damage = Damage(problems={first.digest(): "damaged"})
            try:
                await upload(run, 4, damage)
                break
            except StoreError:
                pass
            await run.store.land()
            run.store.fail = lambda *_: None
            second, _ = await upload(run, 4, damage)
            assert await find_full(run.memory, run.versions[4], "r", how=HOW, read_back=True) == second
            hit += 1
        run.store.fail = lambda *_: None
        assert hit > 5


async def test_a_replica_counts_no_full_that_it_found_damaged(run: Run) -> None:
    """It waited for as many versions again, while nobody could join."""
    job = Anchors(run.store, "job", every=3, clock=run.clock, rng=random.Random(0), run_blocking=inline)
    record = await run.anchor(3)
    await run.publish(1)
    newest = run.versions[5]
    assert newest.floor is not None
    assert newest.floor.number == 3, "the publisher raised the floor to it"
    assert not await job.due(newest)
    assert await job.due(newest, Damage(problems={record.digest(): "damaged"}))
    await upload(run, 4)
    assert not await job.due(newest, Damage(problems={record.digest(): "damaged"}))
    assert len(await list_records(run.memory, "r")) == 2
