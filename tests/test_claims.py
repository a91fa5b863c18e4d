"""Promise 1 at the claim: who may go on from where, at an older version or in what a rollback gave up."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from stitch_core.chain import ChainReader
from stitch_core.head import ABANDONED_RANGES, Head, head_key
from stitch_core.manifest import FormatError, canonical_json
from stitch_core.publisher import Boot, ClaimRefused, Fenced, HeadMoved, Publisher, PublishError
from stitch_core.stores.bounded import BoundedStore
from stitch_core.stores.memory import MemoryStore
from tests.small_run import FaultyStore, Trainer, published, rebuild_all


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return Trainer(tmp_path)


async def head_of(store: MemoryStore) -> Head:
    return (await ChainReader(store).head("r"))[0]


async def refused(publisher: Publisher, trainer: Trainer, **how: object) -> str:
    """Why a claim is refused; nobody is fenced by it."""
    before = dict(publisher._store.state.objects)  # type: ignore[attr-defined]
    with pytest.raises(ClaimRefused) as error:
        await publisher.claim(trainer.version0, **how)  # type: ignore[arg-type]
    assert publisher._store.state.objects == before  # type: ignore[attr-defined]
    return str(error.value)


# ------------------------------------------------------------------------------- C38: before it is claimed


async def test_c38_a_look_finds_what_a_claim_would_and_writes_nothing(trainer: Trainer) -> None:
    store = MemoryStore()
    publisher = trainer.publisher(store)
    assert (await publisher.look(trainer.version0)).state == trainer.state
    assert not store.state.objects
    chain = await published(trainer, store, 3)
    before = dict(store.state.objects)
    assert (await publisher.look(trainer.version0)).digest() == chain[3].digest()
    other = Boot("other", "sha256:" + "0" * 64)
    for how in ({"saved": 9}, {"resume": chain[1].state}, {"boot": other}):
        with pytest.raises(ClaimRefused):
            await publisher.look(**{"boot": trainer.version0, **how})  # type: ignore[arg-type]
    assert store.state.objects == before
    with pytest.raises(PublishError, match="has not been claimed"):
        publisher.reserve()


async def test_c38_a_claim_for_a_head_that_has_moved_fences_no_writer(trainer: Trainer) -> None:
    store = MemoryStore()
    live, second = trainer.publisher(store), trainer.publisher(store)
    begun = await second.look(trainer.version0)
    await live.claim(trainer.version0)
    assert await second.claim(trainer.version0, at=begun), "the same version 0, begun by another"
    await live.claim(trainer.version0)
    await trainer.publish(live)
    for claim in (
        lambda: second.claim(trainer.version0, at=begun),
        lambda: second.take_back(0, at=begun),
    ):
        with pytest.raises(HeadMoved, match="at version 1 now and was at 0"):
            await claim()
    assert (await trainer.publish(live)).number == 2
    head = await second.look(trainer.version0)
    assert (await second.claim(trainer.version0, at=head)).number == 2


async def test_c38_a_payload_is_checked_before_the_claim(trainer: Trainer) -> None:
    store = MemoryStore()
    chain = await published(trainer, store, 2)
    publisher, head = trainer.publisher(store), chain[2]
    before = dict(store.state.objects)
    full = trainer.full()
    await publisher.check(full, head)
    for older in (chain[0], chain[1]):  # above the floor, which is version 0
        await publisher.check(replace(trainer.delta(3), base=older.state), head)
    nowhere = "sha256:" + "0" * 64
    bad = [
        replace(trainer.delta(3), base=nowhere), replace(full, files=(*full.files, "nothing.json")),
        replace(full, files=(*full.files, "config.json~")), replace(full, metadata={"a": {1}}),
    ]  # fmt: skip
    (full.directory / "config.json~").write_text("")
    for payload in bad:
        with pytest.raises(PublishError):
            await publisher.check(payload, head)
    assert store.state.objects == before


@pytest.mark.parametrize("room", [None, 10**6, 10])
async def test_c38_a_store_without_room(trainer: Trainer, room: int | None) -> None:
    class Small(FaultyStore):
        async def room(self) -> int | None:
            return room

    store = MemoryStore()
    (begun,) = await published(trainer, store, 0)
    publisher = trainer.publisher(BoundedStore(Small(store), 60.0))
    with pytest.raises(PublishError, match="has room for 10") if room == 10 else nullcontext():
        await publisher.check(trainer.full(), begun)


# ------------------------------------------------------------------------------------------------- resume


async def test_a_trainer_resumes_at_an_older_version(trainer: Trainer) -> None:
    """Its delta builds on that version's state, its number is above the head's, the chain stays one."""
    store = MemoryStore()
    chain = await published(trainer, store, 5)
    publisher = trainer.publisher(store)
    assert (await publisher.claim(trainer.version0, resume=chain[2].state, saved=2)).number == 5
    assert await publisher.builds_on(chain[2].state)
    trainer.resume(chain[2].state)
    six = await trainer.publish(publisher)
    assert (six.number, six.representation.base) == (6, chain[2].state)
    assert six.parent == chain[5].row()
    seven = await trainer.publish(publisher)
    assert seven.representation.base == six.state
    assert [m.number for m in await rebuild_all(store, trainer, trainer.root / "host")] == list(range(8))


async def test_the_base_and_what_was_saved_may_differ(trainer: Trainer) -> None:
    """A framework whose snapshot is the boot checkpoint builds on version 0 whatever it resumes at."""
    store = MemoryStore()
    await published(trainer, store, 3)
    publisher = trainer.publisher(store)
    await publisher.claim(trainer.version0, resume=trainer.state, saved=3)
    trainer.resume(trainer.state)
    assert (await trainer.publish(publisher)).representation.base == trainer.state
    await rebuild_all(store, trainer, trainer.root / "host")


async def test_a_base_older_than_what_the_history_lists(trainer: Trainer) -> None:
    store = MemoryStore()
    chain = await published(trainer, store, 70)
    publisher = trainer.publisher(store)
    await publisher.claim(trainer.version0, resume=chain[3].state, saved=3)
    trainer.resume(chain[3].state)
    await trainer.publish(publisher)
    chain_of_all = await rebuild_all(store, trainer, trainer.root / "host")
    assert chain_of_all[-1].representation.base == chain[3].state
    # Nor does it have to be said at the claim where the next delta comes from.
    other = trainer.publisher(store)
    await other.claim(trainer.version0)
    trainer.resume(chain[4].state)
    await trainer.publish(other)
    chain_of_all = await rebuild_all(store, trainer, trainer.root / "host")
    assert chain_of_all[-1].representation.base == chain[4].state


async def test_below_the_floor_only_a_full_is_published(trainer: Trainer) -> None:
    store = MemoryStore()
    chain = await published(trainer, store, 5, full_at=4)
    publisher = trainer.publisher(store)
    await publisher.claim(trainer.version0, resume=chain[2].state, saved=2)
    assert [await publisher.builds_on(m.state) for m in chain] == [False, False, False, False, True, True]
    trainer.resume(chain[2].state)
    with pytest.raises(PublishError, match="above its floor 4 lead to, up to its head 5: publish a full"):
        await trainer.publish(publisher)
    assert (await publisher.publish(trainer.full())).number == 7
    await rebuild_all(store, trainer, trainer.root / "host")


async def test_a_run_whose_head_was_removed_does_not_begin_anew(trainer: Trainer) -> None:
    """Its versions would have been published a second time, with other weights under the same numbers."""
    store = MemoryStore()
    publisher = trainer.publisher(store)
    await publisher.claim(trainer.version0)
    await trainer.publish(publisher)
    head = store.state.objects.pop(head_key("r"))
    assert "has no head, and has versions up to runs/r/manifests/000001." in await refused(
        trainer.publisher(store), trainer
    )
    assert head_key("r") not in store.state.objects
    store.state.objects[head_key("r")] = head
    assert (await trainer.publisher(store).claim(trainer.version0)).number == 1


async def test_what_a_resuming_trainer_says_must_be_so(trainer: Trainer) -> None:
    store = MemoryStore()
    publisher = trainer.publisher(store)
    assert "cannot go on from version 3: is this its store?" in await refused(publisher, trainer, saved=3)
    chain = await published(trainer, store, 2)
    why = await refused(publisher, trainer, saved=3)
    assert why == (
        "run r is at version 2, but the trainer's checkpoint was saved at version 3: is this the same store?"
    )
    why = await refused(publisher, trainer, resume="sha256:" + "1" * 64, saved=1)
    assert "is the state of no version of run r: a delta can only build on one" in why
    # An older state without a word of which version that is may be a trainer that forgot to resume.
    assert "say at which version it was saved" in await refused(publisher, trainer, resume=chain[1].state)
    await publisher.claim(trainer.version0, resume=chain[1].state, override=True)


# --------------------------------------------------------------------------------------- what was given up


async def test_c35_a_trainer_that_resumes_in_what_a_rollback_gave_up(trainer: Trainer) -> None:
    store = MemoryStore()
    chain = await published(trainer, store, 6)
    operator = trainer.publisher(store)
    assert (await operator.take_back(3)).number == 6
    trainer.resume(chain[6].state)
    fulls = trainer.full()
    await operator.publish(fulls)
    for claims in range(3):
        for saved in (4, 5, 6):
            why = await refused(trainer.publisher(store), trainer, saved=saved)
            assert f"at version {saved} of run r, and a rollback to 3 gave up the versions 4 to 6" in why
            assert "--override" in why
        why = await refused(trainer.publisher(store), trainer, resume=chain[5].state, saved=2)
        assert "would build on version 5 of run r, which a rollback gave up" in why
        for saved in (2, 3, 7):
            await trainer.publisher(store).claim(trainer.version0, saved=saved)
        assert (await head_of(store)).abandoned == ((4, 6),), claims


async def test_the_versions_are_given_up_before_the_rollback_is_published(trainer: Trainer) -> None:
    """A supervisor that restarts the fenced trainer meanwhile cannot fence the rollback."""
    store = MemoryStore()
    await published(trainer, store, 4)
    operator = trainer.publisher(store)
    await operator.take_back(2)
    assert await refused(trainer.publisher(store), trainer, saved=4)
    await operator.publish(trainer.full())
    assert (await head_of(store)).number == 5


async def test_to_override_brings_back_that_version(trainer: Trainer) -> None:
    store = MemoryStore()
    chain = await published(trainer, store, 6)
    await trainer.publisher(store).take_back(2)
    publisher = trainer.publisher(store)
    await publisher.claim(trainer.version0, saved=4, resume=chain[4].state, override=True)
    assert (await head_of(store)).abandoned == ((3, 3), (5, 6))
    trainer.resume(chain[4].state)
    await trainer.publish(publisher)
    await rebuild_all(store, trainer, trainer.root / "host")
    await trainer.publisher(store).claim(trainer.version0, saved=4)
    assert await refused(trainer.publisher(store), trainer, saved=5)


async def test_taking_back_to_what_is_not_before_the_head_fences_nobody(trainer: Trainer) -> None:
    store = MemoryStore()
    await published(trainer, store, 2)
    before = dict(store.state.objects)
    for to in (2, 3):
        with pytest.raises(ClaimRefused, match=f"run r is at version 2: {to} is not before it"):
            await trainer.publisher(store).take_back(to)
    assert store.state.objects == before


def at(number: int, *abandoned: tuple[int, int]) -> Head:
    key = f"manifests/{number:06d}.e0001.json"
    return Head(number, 1, key, "sha256:" + "0" * 64, "w", 0.0, abandoned)


@pytest.mark.parametrize(
    ("before", "to", "after"),
    [
        ((), 5, ((6, 20),)),
        (((7, 9),), 5, ((6, 20),)),
        (((7, 9),), 8, ((7, 7), (9, 20))),
        (((7, 9),), 9, ((7, 8), (10, 20))),
        (((7, 9),), 10, ((7, 9), (11, 20))),
        (((2, 3), (7, 9)), 3, ((2, 2), (4, 20))),
        (((2, 3), (7, 9)), 4, ((2, 3), (5, 20))),
    ],
)
def test_what_a_rollback_gives_up(
    before: tuple[tuple[int, int], ...], to: int, after: tuple[tuple[int, int], ...]
) -> None:
    assert at(20, *before).taken_back(to).abandoned == after


def test_the_number_of_ranges_is_bounded_on_the_side_of_refusing() -> None:
    head = at(0)
    for first in range(2, 4 * ABANDONED_RANGES, 2):
        head = at(first, *head.abandoned).taken_back(first - 1)
        assert len(head.abandoned) <= ABANDONED_RANGES
        assert head.abandoned_range(first) is not None
        assert Head.decode(head.encode()).abandoned == head.abandoned
    assert head.abandoned[-1] == (first, first)
    assert head.abandoned_range(2) is not None


def test_a_head_from_before_there_were_rollbacks_is_read() -> None:
    value = {
        "format": "stitch.head/1", "number": 3, "epoch": 1, "key": "manifests/000003.e0001.json",
        "digest": "sha256:" + "0" * 64, "writer": "w", "time": 1.5,
    }  # fmt: skip
    assert Head.decode(canonical_json(value)).abandoned == ()
    for bad in (
        None,
        {},
        [[1]],
        [[1, 2, 3]],
        [[2, 1]],
        [[1, 2], [3, 4]],
        [[5, 6], [1, 2]],
        [["1", 2]],
        [[-1, 2]],
    ):
        with pytest.raises(FormatError, match="abandoned"):
            Head.decode(canonical_json({**value, "abandoned": bad}))


# ------------------------------------------------------------------------------------------------ release


async def test_to_release_a_run_fences_its_writer_and_keeps_the_head(trainer: Trainer) -> None:
    store = MemoryStore()
    publisher = trainer.publisher(store)
    await publisher.claim(trainer.version0)
    await trainer.publish(publisher)
    before = await head_of(store)
    operator = trainer.publisher(store)
    fenced, newest = await operator.release()
    assert (fenced, newest) == (before, publisher.head)
    after = await head_of(store)
    assert (after.number, after.digest, after.epoch) == (1, before.digest, 2)
    assert after.writer != before.writer
    with pytest.raises(Fenced, match="epoch 2"):
        await trainer.publish(publisher)
    with pytest.raises(PublishError, match="has not been claimed by this publisher"):
        operator.reserve()
    assert (await trainer.publisher(store).claim(trainer.version0)).number == 1


async def test_a_rollback_and_a_trainer_race_and_one_wins(trainer: Trainer) -> None:
    store = MemoryStore()
    publisher = trainer.publisher(store)
    await publisher.claim(trainer.version0)
    await trainer.publish(publisher)
    operator = trainer.publisher(store)
    results = await asyncio.gather(operator.take_back(0), trainer.publish(publisher), return_exceptions=True)
    head = await head_of(store)
    if isinstance(results[1], Fenced):
        assert (head.number, head.abandoned) == (1, ((1, 1),))
    else:
        assert (head.number, head.abandoned) == (2, ((1, 2),))
    assert store.state.objects[head_key("r")] == head.encode()
