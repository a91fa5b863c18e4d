"""Moving a channel: exactly one of two movers wins, and an unknown outcome never comes back later."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from stitch_core.chain import ChainReader
from stitch_core.channels import ChannelRefused, channel_names, channel_target, delete_channel, move_channel
from stitch_core.head import Channel, channel_key
from stitch_core.manifest import FormatError, canonical_json
from stitch_core.ports import Store, Unavailable
from stitch_core.stores.memory import MemoryStore
from tests.small_run import NO_RETRY, QUICK_RETRY, FaultyStore, Trainer

A, B, C = Channel("a"), Channel("b"), Channel("a", 2)
NONCES = iter(range(10_000))


async def move(store: Store, channel: Channel, *, retry: bool = True) -> Channel | None:
    policy = QUICK_RETRY if retry else NO_RETRY
    return await move_channel(
        store, "latest", channel, rng=random.Random(0), nonce=f"n{next(NONCES)}", policy=policy
    )


async def now(store: Store) -> Channel:
    return await ChainReader(store).channel("latest")


async def test_a_channel_moves_and_says_what_it_said(tmp_path: Path) -> None:
    store = MemoryStore()
    assert await move(store, A) is None
    assert await move(store, B) == A
    assert await move(store, C) == B
    before = dict(store.state.objects)
    assert await move(store, C) == C
    assert store.state.objects == before, "there was nothing to do"
    assert await channel_names(store) == ["latest"]
    await delete_channel(store, "latest")
    with pytest.raises(ChannelRefused, match="there is no channel latest"):
        await delete_channel(store, "latest")


async def test_one_of_two_movers_is_told(tmp_path: Path) -> None:
    for start in (None, Channel("c")):
        store = MemoryStore()
        if start:
            await move(store, start)
        results = await asyncio.gather(
            move(FaultyStore(store), A), move(FaultyStore(store), B), return_exceptions=True
        )
        refused = [result for result in results if isinstance(result, ChannelRefused)]
        assert len(refused) == 1
        assert "was moved to the newest of" in str(refused[0])
        assert await now(store) in (A, B)
    # Both want the same: nobody has to be told.
    store = MemoryStore()
    await asyncio.gather(move(FaultyStore(store), A), move(FaultyStore(store), A))


@pytest.mark.parametrize("how", ["before", "after"])
async def test_an_unknown_outcome_is_settled(how: str) -> None:
    store = MemoryStore()
    await move(store, A)
    swaps: list[int] = []

    def fail(index: int, name: str, key: str) -> str | None:
        if name == "swap":
            swaps.append(index)
        return how if name == "swap" and len(swaps) == 1 else None

    assert await move(FaultyStore(store, fail), B) == A
    assert await now(store) == B


async def test_a_late_move_does_not_undo_the_moves_after_it() -> None:
    """It was to go from A to B; by the time it lands somebody has moved to C, and back to A."""
    store = MemoryStore()
    await move(store, A)
    faulty = FaultyStore(store, lambda index, name, key: "late" if name == "swap" else None)
    with pytest.raises(Unavailable):
        await move(faulty, B, retry=False)
    await move(store, C)
    await move(store, A)
    await faulty.land()
    assert await now(store) == A


async def test_what_a_channel_means(tmp_path: Path) -> None:
    trainer, store = Trainer(tmp_path, run="a"), MemoryStore()
    publisher = trainer.publisher(store)
    await publisher.claim(trainer.version0)
    chain = [await trainer.publish(publisher) for _ in range(3)]
    assert await channel_target(store, A) == chain[2]
    assert await channel_target(store, C) == chain[1]
    with pytest.raises(ChannelRefused, match="run a has no version 7: its head is 3"):
        await channel_target(store, Channel("a", 7))


def test_channels_from_before_moves_had_nonces_are_read() -> None:
    value = {"format": "stitch.channel/1", "run": "a", "exact": None}
    assert Channel.decode(canonical_json(value)) == A
    assert Channel.decode(Channel("a", mover="x").encode()) == A
    with pytest.raises(FormatError, match="mover must be text"):
        Channel.decode(canonical_json({**value, "mover": 7}))
    assert channel_key("latest") == "channels/latest"
