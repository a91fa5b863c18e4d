"""Nothing is trusted but what hangs on the head by its digest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from stitch_core.chain import ChainBroken, ChainReader, NoHead
from stitch_core.head import Channel, Head, channel_key, head_key
from stitch_core.manifest import FormatError, Manifest, Row, run_prefix
from stitch_core.ports import NotFound, Unavailable
from stitch_core.stores.memory import MemoryStore
from tests.small_run import FaultyStore, Trainer


class Run:
    """A store with a run of ``count`` versions; those in ``fulls`` are fulls."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.store = MemoryStore()
        self.manifests: list[Manifest] = []

    async def make(self, count: int, fulls: tuple[int, ...] = ()) -> ChainReader:
        publisher = self.trainer.publisher(self.store)
        self.manifests.append(await publisher.claim(self.trainer.version0))
        for number in range(1, count + 1):
            if number in fulls:
                self.manifests.append(await publisher.publish(self.trainer.full()))
            else:
                self.manifests.append(await self.trainer.publish(publisher))
        return ChainReader(self.store)

    @property
    def newest(self) -> Manifest:
        return self.manifests[-1]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(Trainer(tmp_path))


def numbers(chain: list[Manifest]) -> list[int]:
    return [manifest.number for manifest in chain]


async def test_a_run_that_nobody_claimed(run: Run) -> None:
    with pytest.raises(NoHead, match="run r has no head yet: no trainer has claimed it"):
        await ChainReader(run.store).head("r")


async def test_c02_no_bad_head_is_read_as_no_head(run: Run) -> None:
    reader = await run.make(1)
    good = run.store.state.objects[head_key("r")]
    for bad in (b"", b"null", good[:-1], good + b"\n", b"\xff" + good, b"weight_v000001", b"[" * 100_000):
        run.store.state.objects[head_key("r")] = bad
        with pytest.raises(FormatError, match="runs/r/head"):
            await reader.head("r")


async def test_c02_a_head_that_names_what_is_not_there(run: Run) -> None:
    reader = await run.make(1)
    head = (await reader.head("r"))[0]
    missing = replace(head, number=9, key="manifests/000009.e0001.json")
    with pytest.raises(
        ChainBroken, match=r"manifests/000009.e0001.json is named by the chain of run r and is"
    ):
        await ChainReader(run.store).manifest("r", replace(missing, digest="sha256:" + "0" * 64))


async def test_c09_a_manifest_with_one_flipped_byte(run: Run) -> None:
    await run.make(1)
    key = run_prefix("r") + run.newest.key
    data = bytearray(run.store.state.objects[key])
    data[len(data) // 2] ^= 1
    run.store.state.objects[key] = bytes(data)
    reader = ChainReader(run.store)
    head = (await reader.head("r"))[0]
    with pytest.raises(ChainBroken, match=r"has digest sha256:.*, the chain of run r names"):
        await reader.manifest("r", head)


@pytest.mark.parametrize("warm", [False, True], ids=["read", "remembered"])
@pytest.mark.parametrize(
    "lie",
    [
        lambda row: replace(row, number=2),
        lambda row: replace(row, key="manifests/000001.e0009.json"),
        lambda row: replace(row, state="sha256:" + "1" * 64),
        lambda row: replace(row, bytes=row.bytes + 1),
    ],
    ids=["number", "key", "state", "bytes"],
)
async def test_a_row_that_says_something_else_than_its_manifest(
    run: Run, lie: Callable[[Row], Row], warm: bool
) -> None:
    reader = await run.make(2)
    row = run.newest.history[0]
    wrong = lie(row)
    if warm:
        await reader.manifest("r", row)
    # What the row names as key is there, with the bytes of the digest that it names.
    run.store.state.objects[run_prefix("r") + wrong.key] = run.store.state.objects[run_prefix("r") + row.key]
    with pytest.raises(ChainBroken):
        await reader.manifest("r", wrong)


async def test_a_manifest_of_another_run_is_not_taken(run: Run, tmp_path: Path) -> None:
    reader = await run.make(1)
    for key in list(run.store.state.objects):
        run.store.state.objects[key.replace("runs/r/", "runs/s/")] = run.store.state.objects[key]
    head, _ = await reader.head("s")
    for _ in range(2):
        with pytest.raises(ChainBroken, match=r"is the manifest manifests/000001.e0001.json of r/weight_v"):
            await reader.manifest("s", head)
        await reader.manifest("r", head)


async def test_manifests_are_read_once_and_forgotten_when_too_many(run: Run) -> None:
    await run.make(6)
    faulty = FaultyStore(run.store)
    reader = ChainReader(faulty, keep=3)
    chain = await reader.back_to(run.newest)
    assert numbers(chain) == [6, 5, 4, 3, 2, 1, 0]
    before = len(faulty.calls)
    assert len(reader._cache) == 3
    await reader.manifest("r", run.newest.history[-1])
    assert len(faulty.calls) == before
    await reader.manifest("r", run.newest.history[0])
    assert len(faulty.calls) == before + 1


async def test_unavailable_is_passed_on_and_not_remembered(run: Run) -> None:
    await run.make(1)
    faulty = FaultyStore(run.store, lambda index, *_: "before" if index < 2 else None)
    reader = ChainReader(faulty)
    for _ in range(2):
        with pytest.raises(Unavailable):
            await reader.head("r")
    head, _ = await reader.head("r")
    assert (await reader.manifest("r", head)).number == 1


async def test_back_to(run: Run) -> None:
    reader = await run.make(9, fulls=(5,))
    by = run.manifests
    assert numbers(await reader.back_to(by[4])) == [4, 3, 2, 1, 0]
    assert numbers(await reader.back_to(by[9])) == [9, 8, 7, 6, 5]
    assert numbers(await reader.back_to(by[9], {by[7].state})) == [9, 8, 7]
    assert numbers(await reader.back_to(by[9], {by[9].state})) == [9]
    assert numbers(await reader.back_to(by[9], {by[2].state})) == [9, 8, 7, 6, 5]
    assert numbers(await reader.back_to(by[9], number=8)) == [9, 8]
    assert numbers(await reader.back_to(by[9], number=3)) == [9, 8, 7, 6, 5]
    assert numbers(await reader.back_to(by[9], number=3, above_floor=False)) == [9, 8, 7, 6, 5, 4, 3]
    assert numbers(await reader.back_to(by[5])) == [5]
    assert numbers(await reader.back_to(by[5], above_floor=False)) == [5, 4, 3, 2, 1, 0]
    assert numbers(await reader.back_to(by[0])) == [0]


async def test_a_chain_longer_than_one_table(run: Run) -> None:
    reader = await run.make(70)
    assert numbers(await reader.back_to(run.newest)) == list(range(70, -1, -1))
    found = await reader.find(run.newest, lambda row: row.number == 1)
    assert found == run.manifests[1]
    assert await reader.find(run.newest, lambda row: row.number == 70) == run.newest
    assert await reader.find(run.newest, lambda row: row.number == 99) is None
    assert await reader.boot(run.newest) == run.manifests[0]
    assert await reader.boot(run.manifests[0]) == run.manifests[0]


async def test_c06_numbers_that_were_never_published_are_not_on_the_chain(run: Run) -> None:
    publisher = run.trainer.publisher(run.store)
    await publisher.claim(run.trainer.version0)
    publisher.reserve()
    newest = await run.trainer.publish(publisher)
    reader = ChainReader(run.store)
    assert numbers(await reader.back_to(newest)) == [2, 0]
    assert await reader.find(newest, lambda row: row.number == 1) is None


async def test_channels(run: Run) -> None:
    reader = ChainReader(run.store)
    with pytest.raises(NotFound):
        await reader.channel("latest")
    for channel in (Channel("r"), Channel("r", 7)):
        run.store.state.objects[channel_key("latest")] = channel.encode()
        assert await reader.channel("latest") == channel
    for bad in (b"", b"r", channel.encode()[:-2], Head(0, 1, "", "", "").encode()):
        run.store.state.objects[channel_key("latest")] = bad
        with pytest.raises(FormatError, match="channels/latest"):
            await reader.channel("latest")
