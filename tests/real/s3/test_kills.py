"""kill -9 of a publisher at its requests, and of the server under one: nothing acknowledged is lost."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stitch_core.ports import Unavailable
from stitch_core.retry import Retry
from stitch_s3.testing.server import ENVIRON, SeaweedServer
from tests.real.s3.publishing import BOOT, check_whole, payload, publisher

pytestmark = pytest.mark.real
ROOT = Path(__file__).resolve().parents[3]


async def killed(server: SeaweedServer, prefix: str, scratch: Path, event: str, count: int) -> list[int]:
    """What the process said before it died."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "plugins" / "s3")])
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(Path(__file__).with_name("publishing.py")), server.url(prefix.rstrip("/")), "run",
        str(scratch), event, str(count), env={**os.environ, **ENVIRON, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
    )  # fmt: skip
    output, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == -9
    return [int(line) for line in output.split()]


# Two versions are 12 requests or so: parts, read-backs, manifests and heads.
@pytest.mark.parametrize(
    ("event", "counts"), [("before-send", (1, 4, 7, 13)), ("response-received", (3, 6, 8))]
)
async def test_a_publisher_killed_at_a_request(
    server: SeaweedServer, prefix: str, tmp_path: Path, event: str, counts: tuple[int, ...]
) -> None:
    store = server.store(prefix)
    acknowledged = 0
    for count in counts:
        acknowledged = max([acknowledged, *await killed(server, prefix, tmp_path, event, count)])
        assert (await check_whole(store, "run"))[0].number >= acknowledged
    writer = publisher(store, "run")
    await writer.claim(BOOT)
    made = payload(tmp_path, writer, "on", full=True, sizes=(10, 10))
    newest = await writer.publish(made)
    assert newest.number > acknowledged
    assert (await check_whole(store, "run"))[0].digest() == newest.digest()
    await store.close()


@pytest.fixture
def own_server() -> Iterator[SeaweedServer]:
    with SeaweedServer() as server:
        yield server


async def test_a_server_killed_under_a_publisher(own_server: SeaweedServer, tmp_path: Path) -> None:
    store = own_server.store()
    writer = publisher(store, "run", retry=Retry(attempts=None))
    await writer.claim(BOOT)
    acknowledged: list[str] = []

    async def publish() -> None:
        for number in range(8):
            made = payload(tmp_path, writer, f"v{number}", full=False, sizes=(100_000, 3_000_000))
            acknowledged.append((await writer.publish(made)).digest())

    publishing = asyncio.ensure_future(publish())
    while len(acknowledged) < 3:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    await asyncio.to_thread(own_server.kill)
    with pytest.raises(Unavailable):
        await store.load("runs/run/head")
    await asyncio.to_thread(own_server.start)
    await publishing
    chain = [manifest.digest() for manifest in await check_whole(store, "run")]
    assert len(acknowledged) == 8
    assert set(acknowledged) <= set(chain)
    await store.close()
