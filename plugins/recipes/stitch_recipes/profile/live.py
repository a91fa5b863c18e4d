"""The same update on a replica that serves already, wherever it is, of a run in any store."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from pathlib import Path

from stitch_core.chain import ChainReader
from stitch_core.checkpoint import Checkpoint
from stitch_core.cli.claim import new_publisher
from stitch_core.cli.common import opened_store, say
from stitch_core.cli.profile_server import HttpServer
from stitch_core.cli.publish import rebuild
from stitch_core.files import PosixFiles
from stitch_core.manifest import Manifest
from stitch_core.payload import Boot
from stitch_core.ports import SystemClock
from stitch_core.profile_moves import Follow, stitch_status

from .bases import given
from .host_path import memcpy_rate
from .measure import Asked, Measured, compare, delta_of, under_traffic


@dataclass(frozen=True)
class Replica:
    """``reference``: a server of the new version; None: nothing is compared."""

    server: str
    store: str
    run: str
    reference: str | None = None


async def measure_live(asked: Asked, replica: Replica, work: Path) -> Measured:
    """Make the run's next version, claim the run, publish it, and let the replica take it.

    ``asked.base`` is version 0 of the run; where the head has gone on from it, ``work`` takes a copy of the
    head. Raises PublishError, StoreError, NotMoved, ServerError, and what reading and staging raise.
    """
    assert asked.base is not None
    files = PosixFiles()
    base = given(asked.recipe, asked.base)
    state = await asyncio.to_thread(lambda: Checkpoint.open(base.directory, files).state())
    async with opened_store(replica.store) as store, HttpServer.opened(replica.server) as server:
        follow = Follow(server, ChainReader(store), replica.run, SystemClock(), asked.traffic.patience, None)
        await follow.serving()  # before anybody is fenced, as all that is made ready here
        publisher, version0 = (
            new_publisher(store, replica.run, "recipe profile"),
            Boot(str(base.directory), state),
        )
        head = await publisher.look(version0)
        with contextlib.ExitStack() as held:
            directory = base.directory
            if head.state != state:
                say(f"rebuilding version {head.number}, which the next one is a delta from")
                host = await rebuild(store, head, base.directory, work / "host", files)
                held.callback(host.close)
                directory = host.directory
            streamed = await asyncio.to_thread(delta_of, asked, base, directory, head.number, work)
            await publisher.check(streamed.payload, head)
            await publisher.claim(version0, at=head)
            result = Measured(asked, base, streamed, where="as the replica was started")

            async def publish() -> Manifest:
                return await publisher.publish(streamed.payload)

            follow.publish = publish
            result.profile = await under_traffic(server, follow, asked, None)
            result.status = await stitch_status(server)
            if replica.reference is None:
                result.why_not_compared = "no --reference was given"
            else:
                async with HttpServer.opened(replica.reference) as fresh:
                    await compare(result.profile, fresh)
            result.memcpy = memcpy_rate(result.profile.moved.copied or streamed.bytes)
    return result
