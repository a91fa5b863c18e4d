"""Where the gateway looks for replicas: hints, which are probed and never believed."""

import json
import socket
from typing import Any

import pytest

from stitch_core.ports import Unavailable
from stitch_core.stores.memory import MemoryStore
from stitch_gateway.pools import StaticPool, StorePool, open_dns, open_static, open_store


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
        record(expires="x"), record(expires=None), record(expires=10**400), record(time=10**400),
        record(expires=float("inf")), record(expires=float("nan")), record(time=True),
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


class Counting(MemoryStore):
    reads = 0

    async def load(self, key: str) -> Any:
        self.reads += 1
        return await super().load(key)


async def test_a_record_is_read_again_only_once_it_should_have_been_renewed() -> None:
    store, clock = Counting(), Clock()
    for number in range(100):
        await store.replace(f"replicas/{number}.json", record(id=str(number)))
    pool = StorePool(store, clock)
    for _ in range(5):
        assert len(await pool.replicas()) == 100
    assert store.reads == 100
    await store.replace("replicas/new.json", record(id="new"))
    await store.delete("replicas/7.json")
    assert {r.id for r in await pool.replicas()} ^ {str(number) for number in range(100)} == {"7", "new"}
    assert store.reads == 101
    clock.now = 1010.5
    await store.replace("replicas/1.json", record(id="1", address="http://moved:1", expires=1025.0))
    assert {r.id: r.url for r in await pool.replicas()}["1"] == "http://moved:1"
    assert store.reads == 201


async def test_a_replica_that_was_killed_and_came_back_elsewhere_is_found_before_its_old_record_expires() -> (
    None
):
    store, clock = Counting(), Clock()
    for id_ in "ab":
        await store.replace(f"replicas/{id_}.json", record(id=id_))
    pool = StorePool(store, clock)
    await pool.replicas()
    await store.replace("replicas/a.json", record(id="a", address="http://moved:1"))
    assert {r.id: r.url for r in await pool.replicas(["a"])}["a"] == "http://moved:1"
    assert store.reads == 3


async def test_a_clock_that_is_ahead_is_not_believed_for_ever() -> None:
    store, clock = Counting(), Clock()
    await store.replace("replicas/a.json", record(expires=1e12))
    pool = StorePool(store, clock)
    await pool.replicas()
    clock.now = 1031.0
    await pool.replicas()
    assert store.reads == 2


async def test_addresses_of_a_name() -> None:
    answers: list[Any] = [
        ["10.0.0.2", "10.0.0.1", "10.0.0.1", "fd00::1"],
        socket.gaierror(socket.EAI_AGAIN, "later"),
        OSError("no network"),
        ["10.0.0.3"],
        socket.gaierror(socket.EAI_NONAME, "no such name"),
    ]

    async def resolve(host: str, port: int) -> list[str]:
        assert (host, port) == ("replicas.svc", 30100)
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return list(answer)

    pool = open_dns("dns:replicas.svc:30100", resolve=resolve)
    seen = [[(r.id, r.url) for r in await pool.replicas()] for _ in range(5)]
    first = [
        ("10.0.0.1:30100", "http://10.0.0.1:30100"),
        ("10.0.0.2:30100", "http://10.0.0.2:30100"),
        ("[fd00::1]:30100", "http://[fd00::1]:30100"),
    ]
    assert seen == [first, first, first, [("10.0.0.3:30100", "http://10.0.0.3:30100")], []]


async def test_a_real_name() -> None:
    pool = open_dns("dns:localhost:30100")
    assert {r.id for r in await pool.replicas()} & {"127.0.0.1:30100", "[::1]:30100"}
    await pool.close()


@pytest.mark.parametrize(
    "url", ["dns:", "dns:a", "dns::1", "dns:a:0", "dns:a:x", "dns:http://a:1", "dns:a:99999", "dns:a:٣٠"]
)
def test_dns_refuses_what_is_no_name(url: str) -> None:
    with pytest.raises(ValueError, match="is not dns:NAME:PORT"):
        open_dns(url)
