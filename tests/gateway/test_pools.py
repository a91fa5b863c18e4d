"""Where the gateway looks for replicas: hints, which are probed and never believed."""

import json
from typing import Any

import pytest

from stitch_core.ports import Unavailable
from stitch_core.stores.memory import MemoryStore
from stitch_gateway.pools import StaticPool, StorePool, open_static, open_store


class Clock:
    now = 1000.0

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now


def record(**fields: Any) -> bytes:
    return json.dumps({"id": "a", "address": "http://a:1/", "expires": 1010.0, **fields}).encode()


async def test_static() -> None:
    pool = open_static("static:http://a:1,https://b:2/")
    assert [(r.id, r.url) for r in await pool.replicas()] == [("a:1", "http://a:1"), ("b:2", "https://b:2")]
    await pool.close()


@pytest.mark.parametrize("urls", [[], ["a:1"], ["http://"], ["http://:1"], ["http://a:99999"], ["ftp://a"]])
def test_static_refuses_what_is_no_url(urls: list[str]) -> None:
    with pytest.raises(ValueError, match="replica"):
        StaticPool(urls)


async def test_records_in_the_store() -> None:
    store, clock = MemoryStore(), Clock()
    pool = StorePool(store, clock, long_gone=100)
    assert list(await pool.replicas()) == []
    await store.replace("replicas/a.json", record())
    (address,) = await pool.replicas()
    assert (address.id, address.url, address.record["expires"]) == ("a", "http://a:1", 1010.0)
    clock.now = 1100.0  # expired: unknown, not gone
    assert len(await pool.replicas()) == 1
    clock.now = 1111.0
    assert list(await pool.replicas()) == []


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{", b"[]", b"5", b"\xff", b"{}", record(address=5), record(address="file:///etc"),
        record(expires="x"), record(expires=None),
    ],
)  # fmt: skip
async def test_record_that_cannot_be_read_hides_no_other(data: bytes) -> None:
    store = MemoryStore()
    await store.replace("replicas/a.json", record())
    await store.replace("replicas/b.json", data)
    assert [r.id for r in await StorePool(store, Clock()).replicas()] == ["a"]


async def test_last_known_while_the_store_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    await store.replace("replicas/a.json", record())
    pool = StorePool(store, Clock())
    await pool.replicas()

    async def away(prefix: str) -> Any:
        raise Unavailable("away")

    monkeypatch.setattr(store, "list", away)
    assert [r.id for r in await pool.replicas()] == ["a"]


async def test_open_store(tmp_path: Any) -> None:
    pool = open_store(f"store:file:{tmp_path}")
    assert list(await pool.replicas()) == []
    await pool.close()
