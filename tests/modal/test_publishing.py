"""Publishers on several containers: one publishes, none is lost, and no reader meets a head without bytes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from grpclib import GRPCError, Status

from stitch_core.claims import ClaimRefused, Fenced, PublishError
from stitch_core.ports import StoreError
from stitch_core.publisher import Publisher
from stitch_core.retry import Retry
from stitch_modal.store import ModalStore
from stitch_modal.writing import INLINE
from tests.modal.fake import Cloud, Container, Manners
from tests.real.s3.publishing import BOOT, check_whole, payload, publisher

SIZES = (100, INLINE + 1)
QUICK = Retry(attempts=3, first=0.01, cap=0.05)


async def publish(writer: Publisher, scratch: Path, text: str, *, full: bool = True) -> int:
    return (await writer.publish(payload(scratch, writer, text, full=full, sizes=SIZES))).number


async def test_two_trainers_one_publishes(cloud: Cloud, tmp_path: Path) -> None:
    stores = [cloud.store(name) for name in "ab"]
    writers = [publisher(store, "run", retry=QUICK) for store in stores]
    for round in range(2):
        claims = await asyncio.gather(*(writer.claim(BOOT) for writer in writers), return_exceptions=True)
        assert not all(isinstance(claim, BaseException) for claim in claims), claims
        results = await asyncio.gather(
            *(publish(writer, tmp_path, f"{round}") for writer in writers), return_exceptions=True
        )
        numbers = [result for result in results if isinstance(result, int)]
        (lost,) = [result for result in results if isinstance(result, BaseException)]
        assert numbers == [round + 1]
        assert isinstance(lost, Fenced)
        for name in "cd":
            reader = cloud.store(name)
            assert (await check_whole(reader, "run"))[0].number == round + 1
            await reader.close()
    await asyncio.gather(*(store.close() for store in stores))


@pytest.mark.slow
async def test_a_stalled_trainer_is_fenced_by_a_new_claim(cloud: Cloud, tmp_path: Path) -> None:
    old, new = cloud.store("a"), cloud.store("b", mounted=False)
    stalled, writer = publisher(old, "run"), publisher(new, "run")
    await stalled.claim(BOOT)
    assert await publish(stalled, tmp_path, "1") == 1
    await writer.claim(BOOT)
    with pytest.raises(Fenced):
        await publish(stalled, tmp_path, "2")
    assert await publish(writer, tmp_path, "2") == 2
    assert (await check_whole(old, "run"))[0].number == 2
    await asyncio.gather(old.close(), new.close())


async def reads(store: ModalStore, stop: asyncio.Event) -> int:
    """The newest version that was met; everything that a head names is there, at once and whole."""
    newest, rounds = -1, 0
    while not stop.is_set() or not rounds:
        manifests = await check_whole(store, "run", lowest=max(newest, 0))
        assert manifests[0].number >= newest, "a head went back"
        newest = manifests[0].number
        rounds += 1
    return newest


@pytest.mark.parametrize(
    "versions", [pytest.param(2, marks=pytest.mark.slow), pytest.param(30, marks=pytest.mark.long)]
)
async def test_no_reader_meets_a_head_without_its_bytes(cloud: Cloud, tmp_path: Path, versions: int) -> None:
    """Commits are late, and the Dict that tells of the head is not."""
    manners = cloud.manners
    manners.visible_after, manners.background, manners.skip_reload = 0.03, 0.01, False
    manners.lost_replies, manners.dedupe = 0.03, False
    trainer = cloud.store("a", visible_after=0.2)
    readers = [cloud.store("b", visible_after=0.2), cloud.store("c", visible_after=0.2),
               cloud.store("d", mounted=False, visible_after=0.2)]  # fmt: skip
    writer = publisher(trainer, "run")
    await writer.claim(BOOT)
    await asyncio.sleep(0.2)
    stop = asyncio.Event()
    reading = [asyncio.ensure_future(reads(reader, stop)) for reader in readers]
    for number in range(1, versions + 1):
        assert await publish(writer, tmp_path, f"{number}", full=False) == number
    await asyncio.sleep(0.3)
    stop.set()
    assert await asyncio.gather(*reading) == [versions] * 3
    await asyncio.gather(*(store.close() for store in (trainer, *readers)))


# ------------------------------------------------------------------------------------------------ death


class Death:
    """The ``count``-th call of container "a", or what follows it, is its last."""

    def __init__(self, cloud: Cloud, count: int, *, after: bool) -> None:
        self.seen, self.count, self.dead = 0, count, False
        self.after = after
        cloud.manners.fail, cloud.manners.after = self.before, self.afterwards

    def before(self, call: str, container: Container | None, request: Any) -> GRPCError | None:
        if container is None or container.name != "a":
            return None
        self.seen += 1
        self.dead = self.dead or (self.seen >= self.count and not self.after)
        return GRPCError(Status.INVALID_ARGUMENT, "dead") if self.dead else None

    def afterwards(self, call: str, container: Container | None, request: Any) -> None:
        if container is not None and container.name == "a" and self.seen >= self.count:
            self.dead = True
            raise GRPCError(Status.INVALID_ARGUMENT, "dead")


async def one_death(cloud: Cloud, scratch: Path, count: int, *, after: bool, commit: bool) -> bool:
    """Whether the trainer died. Another one then goes on, and what was acknowledged is there, whole."""
    store, acknowledged = cloud.store("a"), -1
    death = Death(cloud, count, after=after)
    writer = publisher(store, "run", retry=QUICK, deadline=0.2)
    with contextlib.suppress(PublishError, ClaimRefused, StoreError):
        await writer.claim(BOOT)
        acknowledged = 0
        for number in (1, 2):
            acknowledged = await publish(writer, scratch, f"{number}")
    assert death.dead or acknowledged == 2
    await store.close()
    await asyncio.to_thread(store._threads._pool.shutdown)  # nothing of it goes on
    cloud.end("a", commit=commit)
    cloud.manners.fail, cloud.manners.after = Manners().fail, Manners().after
    other, third = cloud.store("b"), cloud.store("c")
    writer = publisher(other, "run", retry=Retry(attempts=20, first=0.02, cap=0.05))
    before = await writer.claim(BOOT)
    assert before.number >= acknowledged
    number = await publish(writer, scratch, "on")
    assert number > before.number
    for reader in (other, third):
        assert (await check_whole(reader, "run"))[0].number == number
        await reader.close()
    return death.dead


@pytest.mark.slow
async def test_a_trainer_that_dies_at_a_call(cloud: Cloud, tmp_path: Path) -> None:
    for count, after in ((12, False), (24, True)):
        cloud.reset()
        assert await one_death(cloud, tmp_path, count, after=after, commit=after)


@pytest.mark.parametrize(
    ("after", "commit"), [pytest.param(None, None, marks=pytest.mark.slow),
                          *(pytest.param(after, commit, marks=pytest.mark.long)
                            for after in (False, True) for commit in (False, True))]
)  # fmt: skip
async def test_a_trainer_that_dies_at_any_call(
    cloud: Cloud, tmp_path: Path, after: bool | None, commit: bool | None
) -> None:
    """Reloads, commits, gets and puts: before each of them, or when it has taken effect. None: by turns,
    and every third.
    """
    count = 1
    while True:
        cloud.reset()
        late = bool(count & 1) if after is None else after
        kept = bool(count & 2) if commit is None else commit
        if not await one_death(cloud, tmp_path, count, after=late, commit=kept):
            break
        count += 3 if after is None else 1
    assert count > 30


WORKER = """
import asyncio, os, secrets, signal, sys
from pathlib import Path
from tests.real.s3.publishing import BOOT, payload, publisher
from stitch_core.stores import open_store
from stitch_modal.writing import INLINE

async def main():
    store, scratch = open_store(sys.argv[1]), Path(sys.argv[2])
    writer = publisher(store, "run")
    await writer.claim(BOOT)
    print("ready", flush=True)
    while True:
        made = payload(scratch, writer, secrets.token_hex(8), full=True, sizes=(100, INLINE * 8))
        print((await writer.publish(made)).number, flush=True)

asyncio.run(main())
"""


@pytest.mark.slow
async def test_a_trainer_killed_at_any_time(cloud: Cloud, tmp_path: Path) -> None:
    """kill -9 of a process with the SDK's own client, in a container that commits on its own."""
    rng, acknowledged = random.Random(1), 0
    cloud.manners.background = 0.01
    for round in range(2):
        container = cloud.container("a")
        environ = {
            **os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "MODAL_TOKEN_ID": "ak-a",
            "MODAL_TOKEN_SECRET": "as-secret", "MODAL_SERVER_URL": cloud.url,
        }  # fmt: skip
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", WORKER, f"modal://volume/p?mount={container.root}", str(tmp_path),
            env=environ, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert process.stdout is not None
        container.pids = {process.pid}
        assert await asyncio.wait_for(process.stdout.readline(), 30) == b"ready\n"
        await asyncio.sleep(rng.uniform(0.2, 0.5))
        process.send_signal(signal.SIGKILL)
        said, _ = await process.communicate()
        acknowledged = max([acknowledged, *map(int, said.split())])
        cloud.end("a", commit=round % 2 == 0)
        reader = cloud.store("b", prefix="p/")
        assert (await check_whole(reader, "run"))[0].number >= acknowledged
        await reader.close()
    assert acknowledged > 0
