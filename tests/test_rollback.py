"""Rollback: an older version's weights again, above the head. Promises 1 to 3, whatever dies on the way."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from stitch_core.chain import ChainReader
from stitch_core.delta import overwrite
from stitch_core.delta.directory import write_delta
from stitch_core.delta.encoder import DeltaEncoder
from stitch_core.fulls import upload_full
from stitch_core.head import Head
from stitch_core.manifest import Manifest
from stitch_core.payload import Payload
from stitch_core.ports import Store, StoreError, SystemClock, Unavailable, WriteRefused
from stitch_core.publisher import PROBE, ClaimRefused, Fenced, Publisher, PublishError
from stitch_core.rollback import Rollback, RollbackRefused, RolledBack
from stitch_core.state import changed_tensors, state_digest
from stitch_core.stores.memory import MemoryObjects, MemoryStore
from stitch_core.testing.checkpoints import table_of, write_checkpoint
from tests.anchored_run import Run
from tests.small_run import FILES, NO_RETRY, FaultyStore, Trainer, as_payload, inline, published, rebuild_all

COUNTER = itertools.count()


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return Trainer(tmp_path)


def rollback_of(
    trainer: Trainer,
    store: Store,
    checkpoint: Path | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Rollback:
    return Rollback(
        store, trainer.publisher(store), trainer.root / f"work{next(COUNTER)}", FILES, SystemClock(),
        random.Random(0), inline, checkpoint, say, NO_RETRY,
    )  # fmt: skip


async def roll_back(trainer: Trainer, store: Store, to: int, checkpoint: Path | None = None) -> RolledBack:
    return await rollback_of(trainer, store, checkpoint).to(to)


async def head_of(store: Store) -> Head:
    return (await ChainReader(store).head("r"))[0]


def export(trainer: Trainer, manifest: Manifest, name: str) -> Path:
    """A version's weights as a checkpoint directory."""
    write_checkpoint(trainer.root / name, FILES, trainer.weights[manifest.state], 2)
    return trainer.root / name


def overwriting(trainer: Trainer, base: Manifest, number: int) -> Payload:
    """One more step as a delta that goes forward only."""
    trainer.resume(base.state)
    old, new = table_of(trainer.tensors), table_of(after := trainer.learn())
    changed = {n: (old[n].digest, new[n].digest) for n in changed_tensors(old, new)}
    before, directory = trainer.weights[base.state], trainer.root / "overwriting"
    frames = {n: (overwrite.encode(before[n].data, after[n].data), changed[n][1]) for n in changed}
    names = write_delta(directory, FILES, frames, number=number, base_number=number - 1, encoding="overwrite")
    return Payload("delta", state_digest(new), directory, tuple(names), base.state, "overwrite", changed)


@pytest.fixture
async def run(tmp_path: Path) -> Run:
    run = Run(tmp_path)
    await run.claim()
    return run


async def check_chain(trainer: Trainer, store: Store) -> list[Manifest]:
    return await rebuild_all(store, trainer, trainer.root / f"host{next(COUNTER)}")


# ------------------------------------------------------------------------------------------- the three ways


@pytest.mark.parametrize("to", [0, 1, 3, 5])
async def test_deltas_are_merged_into_one(trainer: Trainer, to: int) -> None:
    store = MemoryStore()
    chain = await published(trainer, store, 6)
    done = await roll_back(trainer, store, to)
    manifest = done.manifest
    assert (manifest.number, manifest.state, manifest.epoch) == (7, chain[to].state, 2)
    assert (manifest.representation.kind, manifest.representation.base) == ("delta", chain[6].state)
    assert (done.given_up, done.proof, done.fenced.epoch) == ((to + 1, 6), "manifests", 1)
    assert manifest.metadata["rollback"] == {"to": to, "given_up": [to + 1, 6]}
    head = await head_of(store)
    assert (head.number, head.abandoned) == (7, ((to + 1, 6),))
    # Its own bytes: what is above its floor is all that it needs.
    assert [m.number for m in await check_chain(trainer, store)] == list(range(8))


@pytest.mark.parametrize("which", [None, 0, 2, 5])
async def test_sparse_deltas_are_merged_into_a_sparse_one(trainer: Trainer, which: int | None) -> None:
    store = MemoryStore()
    trainer.encoder = DeltaEncoder(trainer.tensors, "sparse")
    chain = await published(trainer, store, 5)
    assert chain[1].representation.encoding == "sparse"
    checkpoint = None if which is None else export(trainer, chain[which], "export")
    done = await roll_back(trainer, store, 2, checkpoint)
    representation = done.manifest.representation
    assert (representation.kind, representation.encoding) == ("delta", "sparse")
    assert (done.manifest.state, representation.base) == (chain[2].state, chain[5].state)
    assert done.proof == ("bytes" if which in (2, 5) else "manifests")
    await check_chain(trainer, store)


@pytest.mark.parametrize("which", [None, 0, 2, 4])
async def test_deltas_of_two_encodings_become_one(trainer: Trainer, which: int | None) -> None:
    """Sparse where a checkpoint tells the widths of elements, else XOR; both ways, across a change back."""
    store = MemoryStore()
    chain = await published(trainer, store, 3)
    for encoding in ("sparse", "xor"):
        publisher = trainer.publisher(store)
        await publisher.claim(trainer.version0)
        trainer.encoder = DeltaEncoder(trainer.tensors, encoding)
        chain.append(await trainer.publish(publisher))
    checkpoint = None if which is None else export(trainer, chain[which], "export")
    back = (await roll_back(trainer, store, 2, checkpoint)).manifest
    forward = (await roll_back(trainer, store, 4, checkpoint)).manifest
    for manifest, goal, base in ((back, chain[2], chain[5]), (forward, chain[4], back)):
        how = manifest.representation
        assert (how.kind, how.encoding) == ("delta", "xor" if which is None else "sparse")
        assert (manifest.state, how.base) == (goal.state, base.state)
    await check_chain(trainer, store)


async def test_spans_are_used_and_deltas_where_a_span_is_gone(run: Run) -> None:
    await run.publish(8)
    span = await run.span(0, 4)
    reads: list[str] = []
    run.store.fail = lambda index, name, key: reads.append(key) if name == "read" else None
    done = await rollback_of(run.trainer, run.store).to(0)
    assert (done.manifest.state, done.manifest.representation.kind) == (run.versions[0].state, "delta")
    assert any(key.startswith(f"runs/r/{span.name}/") for key in reads)
    assert not any("weight_v000002/" in key for key in reads)
    # From 9, which has the weights of 0, to 8 a span is needed whose files are gone: its deltas do as well.
    for file in span.representation.files:
        del run.memory.state.objects[span.file_key(file.name)]
    run.memory.state.objects[done.manifest.file_key(done.manifest.representation.files[0].name)] = b"?"
    done = await rollback_of(run.trainer, run.store).to(8)
    assert (done.manifest.state, done.manifest.representation.kind) == (run.versions[8].state, "delta")
    await check_chain(run.trainer, run.memory)


async def test_a_full_is_rebuilt_around_what_a_collector_took(run: Run) -> None:
    """The delta to version 1 went while the full was made ready: the full of 1 leads there."""
    await run.publish(5)
    await run.publisher.publish(run.trainer.full())
    await run.anchor(1)
    objects = run.memory.state.objects

    def collects(index: int, name: str, key: str) -> None:
        if name == "read" and "weight_v00000" in key:  # the first byte of payload that is asked for
            for file in run.versions[1].representation.files:
                objects.pop(run.versions[1].file_key(file.name), None)

    run.store.fail = collects
    done = await rollback_of(run.trainer, run.store, run.trainer.boot).to(2)
    assert (done.manifest.representation.kind, done.manifest.state) == ("full", run.versions[2].state)


async def test_the_trainer_is_fenced_and_goes_on_only_from_before(trainer: Trainer) -> None:
    store = MemoryStore()
    publisher = trainer.publisher(store)
    await publisher.claim(trainer.version0)
    for _ in range(4):
        await trainer.publish(publisher)
    before = trainer.tensors
    done = await roll_back(trainer, store, 2)
    with pytest.raises(Fenced):
        await trainer.publish(publisher)
    trainer.tensors = before
    with pytest.raises(ClaimRefused, match="a rollback to 2 gave up the versions 3 to 4"):
        await trainer.publisher(store).claim(trainer.version0, saved=4)
    again = trainer.publisher(store)
    await again.claim(trainer.version0, saved=2, resume=done.manifest.state)
    trainer.resume(done.manifest.state)
    assert (await trainer.publish(again)).number == 6
    assert (await head_of(store)).abandoned == ((3, 4),)
    await check_chain(trainer, store)


@pytest.mark.parametrize("which", ["boot", "before", "goal", "between", "head"])
async def test_a_checkpoint_at_hand_proves_it(trainer: Trainer, which: str) -> None:
    store = MemoryStore()
    chain = await published(trainer, store, 6)
    number = {"boot": 0, "before": 2, "goal": 3, "between": 4, "head": 6}[which]
    done = await roll_back(trainer, store, 3, export(trainer, chain[number], "export"))
    assert done.proof == ("bytes" if number in (3, 6) else "table")
    assert done.manifest.representation.kind == "delta"
    await check_chain(trainer, store)


@pytest.mark.parametrize("where", ["goal", "boot", "record", "files"])
async def test_a_full_is_on_the_way_back(trainer: Trainer, where: str) -> None:
    """No delta leads across it: the goal's own files, a record of it, or a checkpoint that leads there."""
    store = MemoryStore()
    chain = await published(trainer, store, 5, full_at=4)
    to = 2 if where != "files" else 4
    checkpoint = None
    if where in ("goal", "boot"):
        checkpoint = export(trainer, chain[to if where == "goal" else 0], "export")
    if where == "record":
        directory = export(trainer, chain[2], "anchor")
        await upload_full(store, chain[2], directory, FILES, rng=random.Random(0), run_blocking=inline)
    if where == "files":  # a delta that goes forward only is on the way
        publisher = trainer.publisher(store)
        await publisher.claim(trainer.version0)
        await publisher.publish(overwriting(trainer, chain[5], 6))
    done = await roll_back(trainer, store, to, checkpoint)
    assert (done.manifest.representation.kind, done.manifest.state) == ("full", chain[to].state)
    assert done.manifest.floor is None
    assert done.proof == "bytes"
    await check_chain(trainer, store)


async def test_a_delta_whose_bytes_are_gone_or_damaged_leaves_a_full(trainer: Trainer) -> None:
    for damage in ("gone", "flipped"):
        one = Trainer(trainer.root / damage)
        store = MemoryStore()
        chain = await published(one, store, 4)
        key = chain[4].file_key(chain[4].representation.files[0].name)
        if damage == "gone":
            del store.state.objects[key]
        else:
            store.state.objects[key] = store.state.objects[key][:-1] + b"?"
        with pytest.raises(RollbackRefused, match="Give --from-checkpoint a checkpoint of that version"):
            await roll_back(one, store, 2)
        assert (await head_of(store)).epoch == 1, "nobody was fenced"
        said: list[str] = []
        done = await rollback_of(one, store, one.boot, said.append).to(2)
        assert done.manifest.representation.kind == "full"
        assert any(text.startswith("no delta (") for text in said)
        # The broken version 4 is passed over: everybody reaches the goal's weights.
        reader = ChainReader(store)
        assert (await reader.manifest("r", await head_of(store))).state == chain[2].state


# ------------------------------------------------------------------------------ several, one after another


async def test_rollbacks_of_rollbacks(trainer: Trainer) -> None:
    store = MemoryStore()
    chain = await published(trainer, store, 6)
    chain.append((await roll_back(trainer, store, 2)).manifest)
    chain.append((await roll_back(trainer, store, 5)).manifest)
    assert (await head_of(store)).abandoned == ((3, 4), (6, 7))
    chain.append((await roll_back(trainer, store, 7)).manifest)
    assert (await head_of(store)).abandoned == ((3, 4), (6, 6), (8, 8))
    assert [m.state for m in chain[7:]] == [chain[2].state, chain[5].state, chain[2].state]
    assert [m.representation.kind for m in chain[7:]] == ["delta"] * 3
    assert await check_chain(trainer, store) == chain


async def test_to_the_weights_that_the_head_has(trainer: Trainer) -> None:
    """A step that changed nothing: nothing is to move, and still the trainer is fenced."""
    store = MemoryStore()
    chain = await published(trainer, store, 2)
    publisher = trainer.publisher(store)
    await publisher.claim(trainer.version0)
    directory = trainer.root / "same"
    encoded = trainer.encoder.encode(trainer.tensors, directory, FILES, number=3, base_number=2)
    await publisher.publish(as_payload(encoded, directory))
    done = await roll_back(trainer, store, 2)
    assert done.manifest.representation.changed == {}
    assert done.manifest.state == chain[2].state
    assert done.given_up == (3, 3)
    await check_chain(trainer, store)


async def test_after_a_resume_at_an_older_version_the_way_back_crosses_it(trainer: Trainer) -> None:
    store = MemoryStore()
    chain = await published(trainer, store, 4)
    publisher = trainer.publisher(store)
    await publisher.claim(trainer.version0, saved=1, resume=chain[1].state)
    trainer.resume(chain[1].state)
    for _ in range(2):
        await trainer.publish(publisher)
    done = await roll_back(trainer, store, 4)  # 6 to 1 backwards, then 1 to 4
    assert (done.manifest.representation.kind, done.manifest.state) == ("delta", chain[4].state)
    await check_chain(trainer, store)


# ------------------------------------------------------------------------------------------------- refusals


async def test_what_cannot_be_rolled_back_fences_nobody(trainer: Trainer) -> None:
    store = MemoryStore()
    await published(trainer, store, 3, full_at=2)
    before = dict(store.state.objects)
    other = Trainer(trainer.root / "other", seed=5)
    for to, checkpoint, why in (
        (3, None, "version 3 is the head of run r: nothing to do"),
        (4, None, "run r has no version 4: its head is 3"),
        (
            1,
            None,
            r"no delta \(version 2, on the way back, is a full\); no full \(.*\)\. Give --from-checkpoint",
        ),
        (1, other.boot, "is no version of run r: its state is"),
    ):
        with pytest.raises(RollbackRefused, match=why):
            await roll_back(trainer, store, to, checkpoint)
        assert store.state.objects == before
    # Numbers that the chain passes over are none of its versions.
    publisher = trainer.publisher(store)
    await publisher.claim(trainer.version0)
    publisher.reserve()
    await trainer.publish(publisher)
    with pytest.raises(RollbackRefused, match="has no version 4: its head is 5"):
        await roll_back(trainer, store, 4)


async def test_a_rollback_that_was_done_is_not_done_again(trainer: Trainer) -> None:
    store = MemoryStore()
    await published(trainer, store, 4)
    done = await roll_back(trainer, store, 2)
    before = dict(store.state.objects)
    again = await roll_back(trainer, store, 2)
    assert (again.manifest, again.proof, again.given_up) == (done.manifest, "before", (3, 4))
    assert store.state.objects == before


# ----------------------------------------------------------------------------------------- faults on the way


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
async def test_killed_at_any_call_it_can_be_made_again(trainer: Trainer, every: int) -> None:
    """Whatever was done by then: the head is whole, and the second try ends as the first would have."""
    base = MemoryStore()
    chain = await published(trainer, base, 4)
    calls = FaultyStore(MemoryStore(MemoryObjects(dict(base.state.objects))))
    await roll_back(trainer, calls, 2)
    for cut in range(0, len(calls.calls), every):
        for how in ("before", "after", "late") if every == 1 else ("late",):
            store = MemoryStore(MemoryObjects(dict(base.state.objects)))

            def dies(index: int, name: str, key: str, cut: int = cut, how: str = how) -> str | None:
                return how if index == cut else "before" if index > cut else None

            faulty = FaultyStore(store, dies)
            with pytest.raises((PublishError, StoreError)):
                await roll_back(trainer, faulty, 2)
            head = await head_of(store)
            assert head.number in (4, 5)
            await faulty.land()
            done = await roll_back(trainer, store, 2)
            assert done.manifest.state == chain[2].state
            assert (await head_of(store)).abandoned == ((3, 4),)
            assert done.manifest.number == 5
    await check_chain(trainer, store)


def overtaken(trainer: Trainer, store: Store, live: Publisher, steps: str) -> Rollback:
    """Before each claim ``live`` publishes: the next of ``steps``, a "d"elta or a "f"ull."""
    rollback = rollback_of(trainer, store)
    take_back, todo = rollback.publisher.take_back, list(steps)

    async def late(to: int, *, at: Manifest | None = None) -> Manifest:
        if todo:
            await (live.publish(trainer.full()) if todo.pop(0) == "f" else trainer.publish(live))
        return await take_back(to, at=at)

    rollback.publisher.take_back = late  # type: ignore[method-assign]
    return rollback


@pytest.mark.parametrize("steps", ["d", "dd", "ddd"])
async def test_the_trainer_publishes_meanwhile(trainer: Trainer, steps: str) -> None:
    """What was made ready was for the head before: it is made again, the last time after the claim."""
    store = MemoryStore()
    publisher = trainer.publisher(store)
    await publisher.claim(trainer.version0)
    chain = [await trainer.publish(publisher) for _ in range(3)]
    done = await overtaken(trainer, store, publisher, steps).to(1)
    newest = 3 + len(steps)
    assert (done.manifest.number, done.manifest.state) == (newest + 1, chain[0].state)
    assert done.given_up == (2, newest)
    with pytest.raises(Fenced):
        await trainer.publish(publisher)
    await check_chain(trainer, store)


async def test_c38_what_the_trainer_publishes_meanwhile_leaves_no_way_back(trainer: Trainer) -> None:
    """It was fenced first, and what is above the goal given up, for a rollback that then could not be."""
    store = MemoryStore()
    publisher = trainer.publisher(store)
    await publisher.claim(trainer.version0)
    chain = [await trainer.publish(publisher) for _ in range(3)]
    with pytest.raises(RollbackRefused, match="version 4, on the way back, is a full"):
        await overtaken(trainer, store, publisher, "f").to(1)
    assert ((await head_of(store)).epoch, (await head_of(store)).abandoned) == (1, ())
    await trainer.publish(publisher)
    done = await roll_back(trainer, store, 1, trainer.boot)
    assert (done.manifest.number, done.manifest.state, done.given_up) == (6, chain[0].state, (2, 5))
    await check_chain(trainer, store)


async def test_a_trainer_that_never_stops_is_fenced_first(trainer: Trainer) -> None:
    """Then what it published last may be in the way; with a checkpoint the rollback goes through."""
    store = MemoryStore()
    publisher = trainer.publisher(store)
    await publisher.claim(trainer.version0)
    chain = [await trainer.publish(publisher) for _ in range(3)]
    with pytest.raises(RollbackRefused, match="version 6, on the way back, is a full") as error:
        await overtaken(trainer, store, publisher, "ddf").to(1)
    assert "The trainer is fenced by now, versions 2 to 6 are given up" in str(error.value)
    assert (await head_of(store)).abandoned == ((2, 6),)
    done = await roll_back(trainer, store, 1, trainer.boot)
    assert (done.manifest.number, done.manifest.state, done.given_up) == (7, chain[0].state, (2, 6))
    await check_chain(trainer, store)


async def test_c35_a_supervisor_restarts_the_trainer_while_the_rollback_uploads(trainer: Trainer) -> None:
    store = MemoryStore()
    chain = await published(trainer, store, 4)
    refused: list[str] = []

    class Meanwhile(FaultyStore):
        async def swap(self, key: str, expected: str | None, data: bytes) -> str:
            tag = await super().swap(key, expected, data)
            for saved in (3, 4):
                with pytest.raises(ClaimRefused) as error:
                    await trainer.publisher(store).claim(trainer.version0, saved=saved)
                refused.append(str(error.value))
            return tag

    done = await roll_back(trainer, Meanwhile(store), 2)
    assert done.manifest.state == chain[2].state
    assert len(refused) == 4
    # One that was saved before the range takes the run over; the rollback says so and can be made again.
    other = Trainer(trainer.root / "second")
    store = MemoryStore()
    await published(other, store, 4)

    class Restarted(FaultyStore):
        async def create(self, key: str, source: object) -> None:
            if PROBE not in key:
                await other.publisher(store).claim(other.version0, saved=1)
            await super().create(key, source)  # type: ignore[arg-type]

    with pytest.raises(Fenced, match="another writer has claimed run r"):
        await roll_back(other, Restarted(store), 2)
    assert (await roll_back(other, store, 2)).manifest.number == 5


async def test_a_full_store_left_a_rollback_half_done_and_did_not_say_so(trainer: Trainer) -> None:
    """The trainer is fenced and its versions are given up; what helps is the same rollback again."""
    store = MemoryStore()
    chain = await published(trainer, store, 4)

    def full(index: int, name: str, key: str) -> Exception | None:
        no_room = name == "create" and (filled or PROBE not in key)
        return WriteRefused(f"{key} cannot be written (ENOSPC)") if no_room else None

    filled = True
    with pytest.raises(ClaimRefused, match="ENOSPC"):
        await roll_back(trainer, FaultyStore(store, full), 2)
    assert ((await head_of(store)).epoch, (await head_of(store)).abandoned) == (1, ())
    filled = False  # but before its files are there
    words = "not published: .*ENOSPC.*fenced by now, versions 3 to 4 are given up, .*: make it again"
    with pytest.raises(PublishError, match=words):
        await roll_back(trainer, FaultyStore(store, full), 2)
    assert ((await head_of(store)).number, (await head_of(store)).abandoned) == (4, ((3, 4),))
    assert (await roll_back(trainer, store, 2)).manifest.state == chain[2].state


async def test_an_unreachable_store(trainer: Trainer) -> None:
    with pytest.raises(Unavailable):
        await roll_back(trainer, FaultyStore(MemoryStore(), lambda *_: "before"), 1)


async def test_two_operators_roll_back_at_once(trainer: Trainer) -> None:
    store = MemoryStore()
    chain = await published(trainer, store, 5)
    results = await asyncio.gather(
        roll_back(trainer, store, 2), roll_back(trainer, store, 3), return_exceptions=True
    )
    done = [result for result in results if isinstance(result, RolledBack)]
    for failure in results:
        assert isinstance(failure, RolledBack | PublishError), failure
    assert done
    newest = (await check_chain(trainer, store))[-1]
    assert newest.state in (chain[2].state, chain[3].state)
