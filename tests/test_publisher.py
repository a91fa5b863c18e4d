"""Promises 1 and 2 at the writer: a version is one set of bytes, the head names only what is all there."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from stitch_core.chain import ChainReader
from stitch_core.files import PosixFiles
from stitch_core.head import Head, head_key
from stitch_core.manifest import Manifest, Representation, run_prefix
from stitch_core.ports import (
    Buffer,
    Capabilities,
    Conflict,
    FileSource,
    Store,
    StoreError,
    Unavailable,
    WriteRefused,
)
from stitch_core.publisher import (
    Boot,
    ClaimRefused,
    Fenced,
    OutcomeUnknown,
    PublishError,
)
from stitch_core.retry import Retry
from stitch_core.stores.local import LocalStore
from stitch_core.stores.memory import MemoryObjects, MemoryStore
from tests.small_run import (
    FILES,
    QUICK_RETRY,
    FaultyStore,
    Trainer,
    chain_of,
    inline,
    rebuild_all,
)

Fault = Callable[[int, str, str], str | Exception | None]


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return Trainer(tmp_path)


def nth(wanted: int, fault: str | Exception) -> Fault:
    return lambda index, name, key: fault if index == wanted else None


def swap_of(number: int, fault: str, times: int = 1) -> Fault:
    """The first ``times`` head swaps of this trainer's ``number``-th kind (0: the claim) go wrong."""
    seen: list[int] = []

    def fail(index: int, name: str, key: str) -> str | None:
        if name == "swap":
            seen.append(index)
            if number < len(seen) <= number + times:
                return fault
        return None

    return fail


async def head_of(store: Store, run: str = "r") -> Head:
    return (await ChainReader(store).head(run))[0]


async def check_head_is_whole(state: MemoryObjects, run: str = "r") -> None:
    """Durable before visible: every object that the head's version needs is there, with its digest."""
    store = MemoryStore(state)
    if head_key(run) not in state.objects:
        return
    reader = ChainReader(store)
    manifest = await reader.manifest(run, (await reader.head(run))[0])
    for file in manifest.representation.files:
        assert len(state.objects[manifest.file_key(file.name)]) == file.size


# ------------------------------------------------------------------------------------------------- claims


async def test_the_first_claim_makes_version_0(trainer: Trainer) -> None:
    store = MemoryStore()
    publisher = trainer.publisher(store)
    manifest = await publisher.claim(trainer.version0)
    assert (manifest.number, manifest.state, publisher.epoch) == (0, trainer.state, 1)
    assert (await head_of(store)).number == 0
    assert manifest.representation == Representation("boot", source="boot")


async def test_every_claim_raises_the_epoch_and_keeps_the_head(trainer: Trainer) -> None:
    store = MemoryStore()
    first = trainer.publisher(store)
    await first.claim(trainer.version0)
    await trainer.publish(first)
    second = trainer.publisher(store)
    assert (await second.claim(trainer.version0)).number == 1
    assert second.epoch == 2
    with pytest.raises(Fenced, match=r"another writer has claimed run r \(epoch 2, head 1\)"):
        await trainer.publish(first)
    with pytest.raises(Fenced):
        first.reserve()
    assert (await trainer.publish(second)).number == 2
    await rebuild_all(store, trainer, trainer.root / "host")


async def test_a_base_that_is_not_version_0_is_refused_and_fences_nobody(trainer: Trainer) -> None:
    store = MemoryStore()
    publisher = trainer.publisher(store)
    await publisher.claim(trainer.version0)
    other = trainer.publisher(store)
    with pytest.raises(ClaimRefused, match="base checkpoint elsewhere is not version 0 of run r"):
        await other.claim(Boot("elsewhere", "sha256:" + "1" * 64))
    assert (await trainer.publish(publisher)).number == 1


async def test_resuming_from_other_weights_than_the_heads_fences_nobody(trainer: Trainer) -> None:
    store = MemoryStore()
    publisher = trainer.publisher(store)
    with pytest.raises(ClaimRefused, match="does not exist"):
        await publisher.claim(trainer.version0, resume="sha256:" + "1" * 64)
    await publisher.claim(trainer.version0, resume=trainer.state)
    await trainer.publish(publisher)
    other = trainer.publisher(store)
    with pytest.raises(ClaimRefused, match=r"run r is at version 1, whose state is .*: resume from a"):
        await other.claim(trainer.version0, resume=trainer.state)
    assert (await trainer.publish(publisher)).number == 2
    assert (await other.claim(trainer.version0, resume=publisher.head.state)).number == 2


async def test_c02_a_head_that_cannot_be_read_is_not_taken_for_none(trainer: Trainer) -> None:
    store = MemoryStore()
    await trainer.publisher(store).claim(trainer.version0)
    good = store.state.objects[head_key("r")]
    for bad in (b"", good[:-9], good + b"x", b"\xff", b"r/weight_v000001"):
        store.state.objects[head_key("r")] = bad
        with pytest.raises(ValueError, match="head"):
            await trainer.publisher(store).claim(trainer.version0)
        assert store.state.objects[head_key("r")] == bad


async def test_a_claim_that_died_before_its_head_is_taken_up(trainer: Trainer) -> None:
    store = MemoryStore()
    with pytest.raises(OutcomeUnknown):
        await trainer.publisher(FaultyStore(store, swap_of(0, "before"))).claim(trainer.version0)
    assert list(store.state.objects) == ["runs/r/manifests/000000.e0001.json"]
    other = Trainer(trainer.root / "other", seed=1)
    elsewhere = MemoryStore(MemoryObjects(dict(store.state.objects)))
    assert (await trainer.publisher(store).claim(trainer.version0)).epoch == 1
    # From another checkpoint it is another version 0, and so another key.
    manifest = await other.publisher(elsewhere).claim(other.version0)
    assert (manifest.epoch, manifest.state) == (2, other.state)
    await rebuild_all(elsewhere, other, trainer.root / "host")


async def test_c07_two_claimants_race_from_an_empty_store(trainer: Trainer) -> None:
    """Whatever the order of their calls, both may claim, and only the last one publishes."""
    for first_steps in range(8):
        store = MemoryStore()
        pause = asyncio.Event()

        def stop_after(index: int, *_: str, steps: int = first_steps, pause: asyncio.Event = pause) -> None:
            if index == steps:
                pause.set()

        one = trainer.publisher(FaultyStore(store, stop_after))
        two = trainer.publisher(FaultyStore(store))
        claiming = asyncio.ensure_future(one.claim(trainer.version0))
        await asyncio.wait([claiming, asyncio.ensure_future(pause.wait())], return_when="FIRST_COMPLETED")
        pause.set()
        await two.claim(trainer.version0)
        await claiming
        assert {one.epoch, two.epoch} == {1, 2}
        winner, loser = sorted((one, two), key=lambda publisher: -publisher.epoch)
        trainer.resume(trainer.state)
        with pytest.raises(Fenced):
            await trainer.publish(loser)
        await trainer.publish(winner)
        assert len(await rebuild_all(store, trainer, trainer.root / f"host-{first_steps}")) == 2
        await asyncio.sleep(0)


class LosesOne(MemoryStore):
    """One file of each version never lands, and every other write succeeds."""

    broken = True

    async def create(self, key: str, source: Buffer | FileSource) -> None:
        if self.broken and "/weight_v" in key and key.endswith("-00002-of-00002.safetensors"):
            raise Unavailable("this one never lands")
        await super().create(key, source)


async def test_c05_a_shard_that_fails_among_those_that_succeed_is_no_version(trainer: Trainer) -> None:
    """The calls that finish a version would succeed: they are not made."""
    store = LosesOne()
    publisher = trainer.publisher(store)
    before = await publisher.claim(trainer.version0)
    with pytest.raises(PublishError, match="never lands"):
        await publisher.publish(trainer.full())
    assert any("-00001-of-00002.safetensors" in key for key in store.state.objects), "the others were written"
    assert not [key for key in store.state.objects if "/manifests/000001" in key]
    head, _ = await ChainReader(store).head("r")
    assert (head.number, head.digest) == (0, before.digest())
    store.broken = False
    newest = await publisher.publish(trainer.full())
    assert newest.number == 2
    assert [row.number for row in newest.history] == [0]
    await rebuild_all(store, trainer, trainer.root / "host")


class Collected(MemoryStore):
    """As soon as a payload file is there another writer claims the run, and a collector takes the file."""

    claim: Callable[[], Awaitable[object]] | None = None

    async def create(self, key: str, source: Buffer | FileSource) -> None:
        await super().create(key, source)
        if "/weight_v" in key and self.claim is not None:
            claim, self.claim = self.claim, None
            await claim()
            await self.delete(key)


async def test_c07_a_writer_whose_upload_was_collected_is_told_that_it_is_fenced(trainer: Trainer) -> None:
    """It was told "no such object", and tried again."""
    store = Collected()
    loser, winner = trainer.publisher(store), trainer.publisher(store)
    await loser.claim(trainer.version0)
    store.claim = lambda: winner.claim(trainer.version0)
    with pytest.raises(Fenced, match="another writer has claimed run r"):
        await trainer.publish(loser)
    with pytest.raises(Fenced):
        await trainer.publish(loser)
    await trainer.publish(winner)
    trainer.resume(trainer.state)
    store = Collected()
    alone = trainer.publisher(store)
    await alone.claim(trainer.version0)
    store.claim = lambda: asyncio.sleep(0)
    with pytest.raises(PublishError, match="was not published") as told:
        await trainer.publish(alone)
    assert not isinstance(told.value, Fenced)


async def test_a_claim_whose_swap_is_unknown_can_be_made_again(trainer: Trainer) -> None:
    for fault in ("before", "after", "late"):
        store = MemoryStore()
        faulty = FaultyStore(store, swap_of(0, fault), late_by=2)
        publisher = trainer.publisher(faulty)
        with pytest.raises(OutcomeUnknown, match="whether its head moved to 0"):
            await publisher.claim(trainer.version0)
        with pytest.raises(PublishError, match="has not been claimed"):
            publisher.reserve()
        await publisher.claim(trainer.version0)
        await faulty.land()
        trainer.resume(trainer.state)
        assert (await trainer.publish(publisher)).number == 1


async def test_claims_that_never_win_end(trainer: Trainer) -> None:
    store = MemoryStore()

    def others(index: int, name: str, key: str) -> Exception | None:
        return Conflict("somebody was faster") if name == "swap" else None

    await trainer.publisher(store).claim(trainer.version0)
    with pytest.raises(ClaimRefused, match="is a second trainer running"):
        await trainer.publisher(FaultyStore(store, others)).claim(trainer.version0)


# --------------------------------------------------------------------------------------------- publishing


async def test_versions_are_rebuilt_from_the_store(trainer: Trainer) -> None:
    store = MemoryStore()
    publisher = trainer.publisher(store)
    await publisher.claim(trainer.version0)
    for _ in range(3):
        await trainer.publish(publisher)
    full = await publisher.publish(trainer.full())
    assert (full.floor, full.representation.kind) == (None, "full")
    newest = await trainer.publish(publisher)
    assert newest.floor == full.row()
    assert newest.boot is not None
    assert newest.boot.number == 0
    chain = await rebuild_all(store, trainer, trainer.root / "host")
    assert [m.number for m in chain] == list(range(6))
    assert [row.number for row in newest.history] == [4, 3, 2, 1, 0]


async def test_not_claimed(trainer: Trainer) -> None:
    publisher = trainer.publisher(MemoryStore())
    for call in (lambda: publisher.head, lambda: publisher.epoch, publisher.reserve):
        with pytest.raises(PublishError, match="has not been claimed"):
            call()
    with pytest.raises(PublishError, match="has not been claimed"):
        await publisher.publish(trainer.delta(1))


async def test_c08_a_number_is_never_reused_with_other_bytes(trainer: Trainer) -> None:
    """The same version again with other bytes of the same size is refused, and the next number works."""
    store = MemoryStore()
    faulty = FaultyStore(store)
    publisher = trainer.publisher(faulty)
    await publisher.claim(trainer.version0)
    number = publisher.reserve()
    payload = trainer.delta(number)
    faulty.fail = lambda _, name, key: "before" if "manifests/000001" in key else None
    with pytest.raises(PublishError, match="version 1 of run r was not published"):
        await publisher.publish(payload, number)
    faulty.fail = lambda *_: None
    shard = next(name for name in payload.files if name.endswith(".safetensors"))
    path = payload.directory / shard
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    first = store.state.objects["runs/r/e0001/weight_v000001/" + shard]
    with pytest.raises(PublishError, match="exists with other bytes"):
        await publisher.publish(payload, number)
    assert store.state.objects["runs/r/e0001/weight_v000001/" + shard] == first
    assert (await head_of(store)).number == 0
    trainer.encoder.undo()
    assert (await trainer.publish(publisher)).number == 2
    await rebuild_all(store, trainer, trainer.root / "host")


async def test_numbers_go_up_and_come_from_reserve(trainer: Trainer) -> None:
    publisher = trainer.publisher(MemoryStore())
    await publisher.claim(trainer.version0)
    with pytest.raises(PublishError, match="or was not reserved"):
        await publisher.publish(trainer.delta(5), 5)
    trainer.encoder.undo()
    one, two = publisher.reserve(), publisher.reserve()
    payload = trainer.delta(two)
    await publisher.publish(payload, two)
    with pytest.raises(PublishError, match="version 1 of run r is not above its head, 2"):
        await publisher.publish(replace(payload, base=payload.state), one)


async def test_a_delta_from_a_base_that_is_not_on_the_chain(trainer: Trainer) -> None:
    publisher = trainer.publisher(MemoryStore())
    await publisher.claim(trainer.version0)
    trainer.delta(1)  # never published
    with pytest.raises(PublishError, match="is no state that versions of run r above its floor 0 lead to"):
        await publisher.publish(trainer.delta(2))


async def test_a_delta_may_not_reach_below_the_floor(trainer: Trainer) -> None:
    publisher = trainer.publisher(MemoryStore())
    await publisher.claim(trainer.version0)
    boot = trainer.state
    await trainer.publish(publisher)
    await publisher.publish(trainer.full())
    trainer.resume(boot)
    with pytest.raises(PublishError, match="above its floor 2 lead to, up to its head 2"):
        await trainer.publish(publisher)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"files": ("~a",)}, "is not a file name"),
        ({"files": ("a/b",)}, "is not a file name"),
        ({"state": "7"}, "expected sha256"),
        ({"changed": {"a": ("1", "2")}}, "must have .old, new. xxh3-128"),
        ({"encoding": "zip"}, "unknown delta encoding 'zip'"),
        ({"step": -1}, "step: expected a non-negative integer"),
        ({"metadata": {"loss": float("nan")}}, "cannot be written"),
        ({"metadata": {"loss": {1, 2}}}, "cannot be written"),
    ],
)
async def test_a_manifest_that_nobody_could_read_is_not_published(
    trainer: Trainer, change: dict[str, object], message: str
) -> None:
    store = MemoryStore()
    publisher = trainer.publisher(store)
    await publisher.claim(trainer.version0)
    payload = trainer.delta(1)
    for name in change.get("files", ()):  # type: ignore[attr-defined]
        path = payload.directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x")
    with pytest.raises(PublishError, match=message):
        await publisher.publish(replace(payload, **change))
    trainer.encoder.undo()
    assert (await head_of(store)).number == 0
    assert (await trainer.publish(publisher)).number == 2
    await rebuild_all(store, trainer, trainer.root / "host")


async def test_a_payload_file_that_is_not_there(trainer: Trainer) -> None:
    publisher = trainer.publisher(MemoryStore())
    await publisher.claim(trainer.version0)
    payload = trainer.delta(1)
    FILES.remove(payload.directory / payload.files[0])
    with pytest.raises(PublishError, match="No such file"):
        await publisher.publish(payload)


async def test_what_the_store_holds_is_read_back(trainer: Trainer) -> None:
    """A store that takes bytes and keeps others must not become a version."""

    class Forgetful(MemoryStore):
        async def create(self, key: str, source: object) -> None:
            await super().create(key, source)  # type: ignore[arg-type]
            if key.endswith(".safetensors"):
                self.state.objects[key] = self.state.objects[key][:-1] + b"?"

    store = Forgetful()
    publisher = trainer.publisher(store)
    await publisher.claim(trainer.version0)
    with pytest.raises(PublishError, match="is not what was announced"):
        await trainer.publish(publisher)
    assert (await head_of(store)).number == 0


# ------------------------------------------------------------------------------- what may go wrong, and when


async def life(trainer: Trainer, faulty: FaultyStore) -> int:
    """A trainer that publishes two versions and does after every failure what the docstrings tell it to.

    The number of failures. The head is whole at every moment between its calls.
    """
    state = faulty.store.state  # type: ignore[attr-defined]
    failures = published = 0
    publisher = trainer.publisher(faulty)
    claimed = False
    while published < 2:
        assert failures < 10
        try:
            if not claimed:
                trainer.resume((await publisher.claim(trainer.version0)).state)
                claimed = True
            await trainer.publish(publisher)
            published += 1
        except (OutcomeUnknown, Fenced, StoreError):
            failures, claimed = failures + 1, False
        except PublishError:
            failures += 1
        await check_head_is_whole(state)
    return failures


@pytest.mark.parametrize("fault", ["before", "after", "late"])
async def test_c04_c06_c31_any_call_may_fail(tmp_path: Path, fault: str) -> None:
    """Whichever call fails, and whether or when it lands: the next publish works, every version is whole."""
    quiet = FaultyStore(MemoryStore())
    await life(Trainer(tmp_path / "quiet"), quiet)
    total = len(quiet.calls)
    assert total > 12
    failed = 0
    for k in range(total):
        trainer = Trainer(tmp_path / f"{fault}-{k}")
        store = MemoryStore()
        faulty = FaultyStore(store, nth(k, fault), late_by=1 + k % 5)
        failed += await life(trainer, faulty)
        await faulty.land()
        await check_head_is_whole(store.state)
        chain = await rebuild_all(store, trainer, tmp_path / f"host-{fault}-{k}")
        numbers = [manifest.number for manifest in chain]
        assert len(numbers) in (3, 4), "two versions, and perhaps one whose outcome was unknown"
    assert failed > total / 2  # the others are settled by reading back


@pytest.mark.parametrize("fault", ["before", "after", "late"])
async def test_retries_hide_a_fault_of_any_call(tmp_path: Path, fault: str) -> None:
    for k in range(0, 30, 4):
        trainer = Trainer(tmp_path / f"{fault}-{k}")
        store = MemoryStore()
        faulty = FaultyStore(store, nth(k, fault), late_by=2)
        publisher = trainer.publisher(faulty, retry=QUICK_RETRY, deadline=120.0)
        await publisher.claim(trainer.version0)
        for _ in range(3):
            await trainer.publish(publisher)
        await faulty.land()
        chain = await rebuild_all(store, trainer, tmp_path / f"host-{fault}-{k}")
        assert [manifest.number for manifest in chain] == [0, 1, 2, 3]


async def test_c04_publish_fail_publish_again(trainer: Trainer) -> None:
    """The encoder's base is that of the head: what a failed publish changed is in the next delta."""
    store = MemoryStore()
    faulty = FaultyStore(store)
    publisher = trainer.publisher(faulty)
    await publisher.claim(trainer.version0)
    await trainer.publish(publisher)
    faulty.fail = lambda index, name, key: "before" if "weight_v000002" in key else None
    with pytest.raises(PublishError):
        await trainer.publish(publisher)
    faulty.fail = lambda *_: None
    newest = await trainer.publish(publisher)
    assert newest.number == 3
    assert newest.representation.base == newest.history[0].state
    assert [m.number for m in await rebuild_all(store, trainer, trainer.root / "host")] == [0, 1, 3]


async def test_c31_a_swap_that_lands_after_the_claim(trainer: Trainer) -> None:
    """Unknown, the old head is seen, a new claim wins: then the late write finds another head."""
    store = MemoryStore()
    faulty = FaultyStore(store, swap_of(1, "late"), late_by=1000)
    publisher = trainer.publisher(faulty)
    await publisher.claim(trainer.version0)
    with pytest.raises(OutcomeUnknown, match="whether its head moved to 1"):
        await trainer.publish(publisher)
    with pytest.raises(OutcomeUnknown):
        await trainer.publish(publisher)
    assert (await head_of(store)).number == 0
    assert (await publisher.claim(trainer.version0)).number == 0
    await faulty.land()
    assert (await head_of(store)).epoch == 2
    trainer.resume(trainer.state)
    manifest = await trainer.publish(publisher)
    assert (manifest.number, manifest.epoch) == (1, 2)
    assert [m.number for m in await rebuild_all(store, trainer, trainer.root / "host")] == [0, 1]


async def test_c31_a_swap_that_lands_before_the_claim(trainer: Trainer) -> None:
    store = MemoryStore()
    faulty = FaultyStore(store, swap_of(1, "late"), late_by=1000)
    publisher = trainer.publisher(faulty)
    await publisher.claim(trainer.version0)
    with pytest.raises(OutcomeUnknown):
        await trainer.publish(publisher)
    await faulty.land()
    assert (await publisher.claim(trainer.version0)).number == 1
    trainer.resume(publisher.head.state)
    assert (await trainer.publish(publisher)).number == 2
    assert [m.number for m in await rebuild_all(store, trainer, trainer.root / "host")] == [0, 1, 2]


async def test_c31_the_same_swap_is_repeated_until_it_is_known(trainer: Trainer) -> None:
    """Landing late between two tries, or landing at once with every answer lost."""
    for fault, times, late_by in (("late", 1, 2), ("late", 2, 3), ("after", 3, 0), ("before", 3, 0)):
        store = MemoryStore()
        trainer.resume(trainer.state)
        faulty = FaultyStore(store, swap_of(1, fault, times), late_by=late_by)
        publisher = trainer.publisher(faulty, retry=QUICK_RETRY, deadline=120.0)
        await publisher.claim(trainer.version0)
        assert (await trainer.publish(publisher)).number == 1
        await faulty.land()
        assert (await trainer.publish(publisher)).number == 2
        assert len(await rebuild_all(store, trainer, trainer.root / f"host-{fault}-{times}")) == 3


async def test_a_swap_that_landed_under_a_new_claim_counts(trainer: Trainer) -> None:
    """Our version is on the chain, so publishing it was a success; but the run is another writer's now."""
    store = MemoryStore()
    trainer_2 = trainer.publisher(store)
    faulty = FaultyStore(store)
    publisher = trainer.publisher(faulty, retry=QUICK_RETRY, deadline=120.0)
    await publisher.claim(trainer.version0)
    landed: list[str] = []

    def fail(index: int, name: str, key: str) -> str | None:
        if name == "swap" and not landed:
            landed.append(key)
            return "after"
        return None

    async def claim_then_swap(key: str, expected: str | None, data: bytes) -> str:
        if landed and trainer_2._claim is None:
            await trainer_2.claim(trainer.version0)
        return await FaultyStore.swap(faulty, key, expected, data)

    faulty.fail = fail
    faulty.swap = claim_then_swap  # type: ignore[method-assign]
    assert (await trainer.publish(publisher)).number == 1
    with pytest.raises(Fenced):
        await trainer.publish(publisher)
    assert publisher.head.number <= 1
    assert (await trainer.publish(trainer_2)).number == 2
    assert [m.number for m in await rebuild_all(store, trainer, trainer.root / "host")] == [0, 1, 2]


async def test_the_answer_to_a_conflict_is_lost(trainer: Trainer) -> None:
    """The swap landed, its answer did not, and the read-back fails: neither "published" nor "fenced"."""
    store = MemoryStore()
    faulty = FaultyStore(store)
    publisher = trainer.publisher(faulty)
    await publisher.claim(trainer.version0)
    faulty.fail = lambda index, name, key: (
        Conflict("as if it had been repeated") if name == "swap" else "before" if name == "load" else None
    )
    with pytest.raises(OutcomeUnknown, match="claim the run again"):
        await trainer.publish(publisher)
    faulty.fail = lambda *_: None
    with pytest.raises(OutcomeUnknown):
        publisher.reserve()
    await publisher.claim(trainer.version0)
    assert (await trainer.publish(publisher)).number == 1


async def test_a_publish_that_is_cancelled_in_the_swap_is_unknown(trainer: Trainer) -> None:
    store = MemoryStore()
    faulty = FaultyStore(store, swap_of(1, "before", 10**6))
    publisher = trainer.publisher(faulty, retry=QUICK_RETRY, deadline=60.0)
    await publisher.claim(trainer.version0)
    task = asyncio.ensure_future(trainer.publish(publisher))
    await asyncio.sleep(0.05)  # it tries again and again
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(OutcomeUnknown, match="cut off"):
        publisher.reserve()


async def test_a_store_that_will_not_swap_at_all(trainer: Trainer) -> None:
    faulty = FaultyStore(MemoryStore())
    publisher = trainer.publisher(faulty)
    await publisher.claim(trainer.version0)
    faulty.fail = lambda index, name, key: StoreError("access denied") if name == "swap" else None
    with pytest.raises(OutcomeUnknown, match="access denied"):
        await trainer.publish(publisher)


async def test_a_store_that_refuses_a_write_is_told_at_once_and_the_claim_holds(trainer: Trainer) -> None:
    faulty = FaultyStore(MemoryStore())
    publisher = trainer.publisher(faulty, retry=QUICK_RETRY, deadline=120.0)
    await publisher.claim(trainer.version0)
    for refused in ("create", "swap"):
        faulty.fail = lambda index, name, key, what=refused: (  # type: ignore[misc]
            WriteRefused("head cannot be written (EROFS)") if name == what else None
        )
        calls = len(faulty.calls)
        with pytest.raises(
            PublishError, match=r"was not published: head cannot be written \(EROFS\)"
        ) as error:
            await trainer.publish(publisher)
        assert type(error.value) is PublishError
        assert [name for name, _ in faulty.calls[calls:]].count(refused) <= 2  # the payload's two files
    with pytest.raises(ClaimRefused, match="run r cannot be claimed: head cannot be written"):
        await trainer.publisher(faulty).claim(trainer.version0)
    faulty.fail = lambda *_: None
    assert (await trainer.publish(publisher)).number == 3
    await rebuild_all(faulty.store, trainer, trainer.root / "host")


async def test_a_local_store_that_became_read_only_is_told_at_once(trainer: Trainer, tmp_path: Path) -> None:
    """It used to be an unknown outcome, two minutes later."""

    class Mount(PosixFiles):
        read_only = False

        def write_new(self, path: Path, data: Buffer) -> None:
            if self.read_only:
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
            super().write_new(path, data)

    mount = Mount()
    store = LocalStore(tmp_path / "store", mount, inline)
    publisher = trainer.publisher(store, retry=Retry(), deadline=120.0)
    await publisher.claim(trainer.version0)
    await trainer.publish(publisher)
    mount.read_only = True
    async with asyncio.timeout(60):
        with pytest.raises(PublishError, match=r"was not published: .*EROFS"):
            await trainer.publish(publisher)
        with pytest.raises(ClaimRefused, match=r"run r cannot be claimed: .*EROFS"):
            await trainer.publisher(store, retry=Retry(), deadline=120.0).claim(trainer.version0)
    mount.read_only = False
    assert (await trainer.publish(publisher)).number == 3


async def test_a_refusal_after_a_swap_that_may_yet_land_is_an_unknown_outcome(trainer: Trainer) -> None:
    faulty = FaultyStore(MemoryStore())
    publisher = trainer.publisher(faulty, retry=QUICK_RETRY, deadline=120.0)
    await publisher.claim(trainer.version0)
    swaps: list[int] = []

    def fail(index: int, name: str, key: str) -> str | Exception | None:
        if name != "swap":
            return None
        swaps.append(index)
        return "late" if len(swaps) == 1 else WriteRefused("read-only by now")

    faulty.fail = fail
    with pytest.raises(OutcomeUnknown, match="read-only by now"):
        await trainer.publish(publisher)


# ---------------------------------------------------------------------- stores that cannot compare and swap


class WeakStore(FaultyStore):
    """It reads, compares and then writes: two that meet both hear that they won, the later write stays."""

    capabilities = Capabilities(conditional_writes=False, visible_after=0.01)  # type: ignore[assignment]
    meeting: asyncio.Barrier | None = None

    async def swap(self, key: str, expected: str | None, data: bytes) -> str:
        assert isinstance(self.store, MemoryStore)
        found = self.store.state.objects.get(key)
        tag = None if found is None else (await self.store.load(key)).tag
        if tag != expected:
            raise Conflict(f"{key} is not as it was read")
        if self.meeting is not None:
            meeting, self.meeting = self.meeting, None
            await meeting.wait()
        await self.store.replace(key, data)
        return (await self.store.load(key)).tag


async def test_a_store_that_cannot_swap_needs_a_caller_who_is_alone(trainer: Trainer) -> None:
    store = MemoryStore()
    with pytest.raises(ClaimRefused, match="two trainers that claim at once may both publish"):
        await trainer.publisher(WeakStore(store)).claim(trainer.version0)
    assert store.state.objects == {}
    publisher = trainer.publisher(WeakStore(store), alone=True)
    await publisher.claim(trainer.version0)
    await trainer.publish(publisher)
    assert (await trainer.publish(publisher)).number == 2
    await rebuild_all(store, trainer, trainer.root / "host")


async def test_c07_on_a_store_that_cannot_swap_the_second_writer_is_found_out(trainer: Trainer) -> None:
    """Two claims meet between compare and write: one of them is told, by reading back."""
    store = MemoryStore()
    await trainer.publisher(WeakStore(store), alone=True).claim(trainer.version0)
    meeting = asyncio.Barrier(2)
    publishers = []
    for _ in range(2):
        weak = WeakStore(store)
        weak.meeting = meeting
        publishers.append(trainer.publisher(weak, alone=True))
    await asyncio.gather(*(publisher.claim(trainer.version0) for publisher in publishers))
    loser, winner = sorted(publishers, key=lambda publisher: publisher.epoch)
    assert (loser.epoch, winner.epoch) == (2, 3)
    with pytest.raises(Fenced):
        await trainer.publish(loser)
    assert (await trainer.publish(winner)).number == 1


# ---------------------------------------------------------------------------------------- several writers


async def test_c06_killed_while_version_8_is_half_uploaded(trainer: Trainer) -> None:
    """The leftover is never readable, and in nobody's way: numbers go on above the highest head."""
    store = MemoryStore()
    publisher = trainer.publisher(store)
    await publisher.claim(trainer.version0)
    for _ in range(7):
        await trainer.publish(publisher)
    dying = trainer.publisher(FaultyStore(store, lambda i, name, key: "after" if "v000008" in key else None))
    await dying.claim(trainer.version0)
    with pytest.raises(PublishError):
        await trainer.publish(dying)
    left = {key for key in store.state.objects if "v000008" in key}
    assert left
    resumed = trainer.publisher(store)
    head = await resumed.claim(trainer.version0)
    assert head.number == 7
    trainer.resume(head.state)
    manifest = await trainer.publish(resumed)
    assert (manifest.number, manifest.epoch) == (8, 3)
    assert not left & {manifest.file_key(file.name) for file in manifest.representation.files}
    assert [m.number for m in await rebuild_all(store, trainer, trainer.root / "host")] == list(range(9))


async def test_c07_a_stalled_writer_wakes_after_a_new_claim(trainer: Trainer, tmp_path: Path) -> None:
    """It stops before every one of its calls in turn; nothing of it is ever in the owner's way or chain."""
    for k in range(12):
        store = MemoryStore()
        owner_trainer, stalled = Trainer(tmp_path / f"o{k}"), Trainer(tmp_path / f"s{k}")
        wake = asyncio.Event()
        old_store = FaultyStore(store)
        old = stalled.publisher(old_store)
        await old.claim(stalled.version0)
        start = len(old_store.calls)

        class Stalls(FaultyStore):
            async def _do(self, name: str, key: str, call: object, at: int = start + k) -> object:
                if len(self.calls) == at:
                    await wake.wait()  # noqa: B023
                return await FaultyStore._do(self, name, key, call)  # type: ignore[arg-type]

        old_store.__class__ = Stalls
        publishing = asyncio.ensure_future(stalled.publish(old))
        for _ in range(200):
            await asyncio.sleep(0)
        owner = owner_trainer.publisher(store)
        owner_trainer.weights |= stalled.weights
        owner_trainer.resume((await owner.claim(owner_trainer.version0)).state)
        first = await owner_trainer.publish(owner)
        wake.set()
        if first.number == 2:  # it had finished before the claim
            assert (await publishing).number == 1
        else:
            with pytest.raises(Fenced):
                await publishing
            stalled.encoder.undo()
        with pytest.raises(Fenced):
            await stalled.publish(old)
        await owner_trainer.publish(owner)
        owner_trainer.weights |= stalled.weights
        chain = await rebuild_all(store, owner_trainer, tmp_path / f"host{k}")
        assert [m.epoch for m in chain if m.number >= first.number] == [2, 2]


async def test_c30_claim_a_publish_claim_b_claim_a(tmp_path: Path) -> None:
    """The second life of a run never meets the first one's keys."""
    store = MemoryStore()
    a, b = Trainer(tmp_path / "a", run="a"), Trainer(tmp_path / "b", run="b")
    first = a.publisher(store)
    await first.claim(a.version0)
    payload = a.delta(1)
    # Version 1 of a is written to its last byte, but the head never names it.
    broken = a.publisher(FaultyStore(store, swap_of(1, "before")))
    await broken.claim(a.version0)
    with pytest.raises(OutcomeUnknown):
        await broken.publish(payload)
    before = dict(store.state.objects)
    other = b.publisher(store)
    await other.claim(b.version0)
    await b.publish(other)
    again = a.publisher(store)
    assert (await again.claim(a.version0)).number == 0
    a.resume(a.state)
    manifest = await a.publish(again)
    assert (manifest.number, manifest.epoch) == (1, 3)
    changed = {key for key in before if store.state.objects[key] != before[key]}
    assert changed == {head_key("a")}
    for run in (a, b):
        assert [m.number for m in await rebuild_all(store, run, tmp_path / f"host-{run.run}")] == [0, 1]


async def test_history_holds_64_versions_and_the_chain_goes_on(trainer: Trainer) -> None:
    store = MemoryStore()
    publisher = trainer.publisher(store)
    await publisher.claim(trainer.version0)
    for _ in range(70):
        newest = await trainer.publish(publisher)
    assert [row.number for row in newest.history] == list(range(69, 5, -1))
    assert len(await chain_of(store, "r")) == 71
    assert Manifest.decode(store.state.objects[run_prefix("r") + newest.key]) == newest


async def test_an_unreachable_store_fails_the_claim(trainer: Trainer) -> None:
    with pytest.raises(Unavailable):
        await trainer.publisher(FaultyStore(MemoryStore(), lambda *_: "before")).claim(trainer.version0)
