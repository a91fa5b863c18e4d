"""Channels: which run a fleet follows. Moved by operators and launchers, always by compare-and-swap."""

from __future__ import annotations

import random
from dataclasses import replace

from .chain import ChainReader
from .head import Channel, channel_key
from .manifest import FormatError, Manifest
from .ports import Conflict, NotFound, Store
from .retry import Retry, retrying

PREFIX = "channels/"


class ChannelRefused(Exception):
    """The channel cannot be moved as asked; the message says why."""


async def channel_names(store: Store) -> list[str]:
    return [entry.key.removeprefix(PREFIX) for entry in await store.list(PREFIX)]


async def channel_target(store: Store, channel: Channel) -> Manifest:
    """The version that a channel means now. Raises NoHead, ChannelRefused, FormatError, Unavailable."""
    chain = ChainReader(store)
    head, _ = await chain.head(channel.run)
    newest = await chain.manifest(channel.run, head)
    if channel.exact is None:
        return newest
    found = await chain.find(newest, lambda row: row.number == channel.exact)
    if found is None:
        raise ChannelRefused(
            f"run {channel.run} has no version {channel.exact}: its head is {newest.number}, and what it has "
            "is listed by 'stitch versions'"
        )
    return found


async def move_channel(
    store: Store, name: str, channel: Channel, *, rng: random.Random, nonce: str, policy: Retry | None = None
) -> Channel | None:
    """Point the channel; what it said before, None if it was not there or could not be read.

    ``nonce`` is fresh text of this move.

    Raises ChannelRefused when somebody else moves it at the same time, Unavailable when the store does not
    say what became of it.
    """
    key, policy = channel_key(name), policy or Retry()
    before, tag = await retrying(lambda: _read(store, key), policy, rng)
    if before == channel:
        return before
    data = replace(channel, mover=nonce).encode()

    async def swap() -> None:
        try:
            await store.swap(key, tag, data)
        except Conflict:
            now, _ = await _read(store, key)
            if now != channel:  # else this write, or one that says the same, is there
                raise ChannelRefused(
                    f"channel {name} was moved to {now} by somebody else meanwhile: look, and move it again"
                ) from None

    await retrying(swap, policy, rng)
    return before


async def delete_channel(store: Store, name: str) -> None:
    """Raises ChannelRefused when there is none of that name."""
    try:
        await store.load(channel_key(name))
    except NotFound:
        raise ChannelRefused(f"there is no channel {name}") from None
    await store.delete(channel_key(name))


async def _read(store: Store, key: str) -> tuple[Channel | None, str | None]:
    try:
        blob = await store.load(key)
    except NotFound:
        return None, None
    try:
        return Channel.decode(blob.data, key), blob.tag
    except FormatError:
        return None, blob.tag  # to point it anew is how it is repaired
