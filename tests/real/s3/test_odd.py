"""What buckets, clocks, networks and proxies do besides working, on a real server."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

import botocore.auth
import pytest

from stitch_core.chain import NoHead
from stitch_core.files import PosixFiles
from stitch_core.ports import AlreadyExists, Unavailable
from stitch_core.publisher import PublishError
from stitch_core.retry import Retry
from stitch_core.stores import open_store
from stitch_core.stores.transfer import download
from stitch_s3.errors import Refused
from stitch_s3.testing.proxy import Fault, FaultProxy, Request
from stitch_s3.testing.server import ENVIRON, SeaweedServer
from tests.real.s3.conftest import NO_LIST, READ_ONLY
from tests.real.s3.publishing import BOOT, LARGE, check_whole, payload, publisher

pytestmark = pytest.mark.real


def first(count: int, fault: Fault, method: str) -> Callable[[Request], Fault | None]:
    """``fault`` for the first ``count`` requests of ``method``."""
    left = [fault] * count

    def plan(request: Request) -> Fault | None:
        return left.pop() if left and request.method == method else None

    return plan


async def test_keys_that_may_not_list(server: SeaweedServer, prefix: str, tmp_path: Path) -> None:
    """A run goes on without; beginning one looks for what is there, and says what is missing."""
    store, limited = server.store(prefix), server.store(prefix, key=NO_LIST)
    with pytest.raises(Refused, match=r"listing .*403 AccessDenied.*s3:ListBucket"):
        await publisher(limited, "run").claim(BOOT)
    with pytest.raises(NoHead):
        await check_whole(store, "run")
    await publisher(store, "run").claim(BOOT)
    writer = publisher(limited, "run")
    await writer.claim(BOOT)
    newest = await writer.publish(payload(tmp_path, writer, "v", full=True, sizes=(10, LARGE)))
    assert (await check_whole(limited, "run"))[0].digest() == newest.digest()
    for one in (store, limited):
        await one.close()


async def test_keys_that_may_only_read(server: SeaweedServer, prefix: str) -> None:
    store, limited = server.store(prefix), server.store(prefix, key=READ_ONLY)
    await store.create("k", b"bytes")
    assert (await limited.load("k")).data == b"bytes"
    for call in (limited.create("new", b"1"), limited.swap("k", None, b"1"), limited.delete("k")):
        with pytest.raises(Refused, match=r"403 AccessDenied.*s3:PutObject"):
            await call
    assert [entry.key for entry in await store.list("")] == ["k"]
    for one in (store, limited):
        await one.close()


async def test_a_head_that_something_in_between_forbids(
    server: SeaweedServer, prefix: str, tmp_path: Path
) -> None:
    """What cannot be read back is not published."""
    async with FaultProxy(server.endpoint, first(100, "forbid", "HEAD")) as proxy:
        store = server.store(prefix, proxy.endpoint)
        writer = publisher(store, "run")
        await writer.claim(BOOT)
        with pytest.raises(PublishError, match="403 to HEAD, while GET is allowed"):
            await writer.publish(payload(tmp_path, writer, "v", full=True, sizes=(10,)))
        assert (await check_whole(store, "run"))[0].number == 0
        await store.close()


async def test_a_bucket_that_does_not_exist(server: SeaweedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """This server makes one at the first write: a misspelt name must not get that far."""
    for name, value in ENVIRON.items():
        monkeypatch.setenv(name, value)
    store = open_store(f"s3://misspelt/p?endpoint={server.endpoint}")
    with pytest.raises(Refused, match="there is no such bucket there: create it"):
        await publisher(store, "run").claim(BOOT)
    for call in (store.size("k"), store.load("k"), store.list("")):
        with pytest.raises(Refused, match="there is no such bucket"):
            await call
    await store.close()


@pytest.mark.parametrize("hours", [-1, 1])
async def test_a_wrong_clock(
    server: SeaweedServer, prefix: str, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    store, now = server.store(prefix), botocore.auth.get_current_datetime
    await store.create("k", b"bytes")

    def wrong(remove_tzinfo: bool = True) -> datetime:
        shown: datetime = now(remove_tzinfo) + timedelta(hours=hours)
        return shown

    monkeypatch.setattr(botocore.auth, "get_current_datetime", wrong)
    for call in (store.load("k"), store.size("k"), store.create("j", b"1"), store.list("")):
        with pytest.raises(Refused, match=r"RequestTimeTooSkewed.*clock is off by more than 15 minutes"):
            await call
    await store.close()


async def test_a_busy_server_is_asked_again_and_not_for_ever(
    server: SeaweedServer, prefix: str, tmp_path: Path
) -> None:
    quick = Retry(attempts=4, first=0.01, cap=0.05)
    async with FaultProxy(server.endpoint, first(3, "busy", "PUT")) as proxy:
        store = server.store(prefix, proxy.endpoint)
        writer = publisher(store, "run", retry=quick)
        await writer.claim(BOOT)
        newest = await writer.publish(payload(tmp_path, writer, "v", full=True, sizes=(10, 10)))
        assert (await check_whole(store, "run"))[0].digest() == newest.digest()
        assert proxy.faults == {"busy": 3}
        proxy.plan = first(100, "busy", "PUT")
        with pytest.raises(PublishError, match="503 SlowDown"):
            await writer.publish(payload(tmp_path, writer, "w", full=True, sizes=(10,)))
        assert proxy.faults["busy"] == 3 + 4
        assert (await check_whole(store, "run"))[0].digest() == newest.digest()
        await store.close()


def test_who_waits_for_a_busy_server_does_not_come_back_in_step() -> None:
    delays = {Retry(first=1.0).delay(2, random.Random(seed)) for seed in range(20)}
    assert len(delays) == 20


async def test_bodies_cut_short(server: SeaweedServer, prefix: str, tmp_path: Path) -> None:
    """Never taken for the object: what is missing is fetched again."""
    data = random.Random(0).randbytes(100_000)
    plain = server.store(prefix)
    await plain.create("k", data)
    async with FaultProxy(server.endpoint, first(1, "truncate", "GET")) as proxy:
        store = server.store(prefix, proxy.endpoint)
        with pytest.raises(Unavailable, match=r"reading .*k: "):
            await store.load("k")
        proxy.plan = first(3, "truncate", "GET")
        digest = "sha256:" + hashlib.sha256(data).hexdigest()
        retry = Retry(attempts=5, first=0.01, cap=0.05)
        await download(store, "k", PosixFiles(), tmp_path / "k", len(data), digest, policy=retry)
        assert (tmp_path / "k").read_bytes() == data
        assert proxy.faults["truncate"] == 4
        proxy.plan = first(1, "cut_answer", "PUT")  # of a write that has landed
        with pytest.raises(Unavailable):
            await store.create("j", b"bytes")
        with pytest.raises(AlreadyExists):
            await store.create("j", b"bytes")
        await store.close()
    await plain.close()


async def test_a_proxy_of_the_environment(
    server: SeaweedServer, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with FaultProxy(server.endpoint) as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy.endpoint)
        monkeypatch.delenv("NO_PROXY", raising=False)
        monkeypatch.delenv("no_proxy", raising=False)
        store = server.store(prefix)
        await store.create("k", b"bytes")
        assert (await store.load("k")).data == b"bytes"
        assert await store.size("k") == 5
        assert proxy.requests == {"PUT": 1, "GET": 1, "HEAD": 1}
        await store.close()
    monkeypatch.setenv("HTTP_PROXY", "http://me:topsecret@127.0.0.1:9")
    store = server.store(prefix)
    with pytest.raises(Unavailable, match=r"Failed to connect to proxy URL.*127\.0\.0\.1:9") as error:
        await store.load("k")
    assert "topsecret" not in str(error.value)
    await store.close()
