"""What is no answer of an S3 server, and refusals without a reason: no object is missing for that."""

from __future__ import annotations

import time
from collections.abc import Awaitable
from datetime import UTC, datetime
from typing import Any

import pytest

from stitch_core.ports import Conflict, NotFound, StoreError, Unavailable
from stitch_s3.errors import Refused
from stitch_s3.reading import stamp_in
from tests.s3.fake import FakeS3, Object


@pytest.mark.parametrize(
    ("status", "headers", "kind", "message"),
    [
        (404, {}, Unavailable, "no answer of an S3 server: check .endpoint= and what is in between"),
        (502, {}, Unavailable, "502"),
        (503, {"Retry-After": "1"}, Unavailable, "503"),
        (200, {}, Unavailable, "no ETag|no listing|500|cut|pars"),
        (302, {"Location": "http://login.example/"}, Unavailable, "redirected in a circle"),
        (407, {"Proxy-Authenticate": "Basic"}, Refused, "give it in HTTPS_PROXY"),
    ],
)
async def test_a_page_of_something_in_between(
    fake: FakeS3, status: int, headers: dict[str, str], kind: type[StoreError], message: str
) -> None:
    """A load balancer's own 404 once looked like a run without a head."""
    fake.manners.page = (status, headers)
    store = fake.store("p/")

    async def meets(call: Awaitable[object]) -> None:
        with pytest.raises(kind, match=message) as error:
            await call
        assert not isinstance(error.value, NotFound | Conflict)

    await meets(store.load("k"))
    await meets(store.list(""))
    await meets(store.swap("k", '"x"', b"1"))
    await meets(store.create("k", b"1"))
    if status != 200:  # such a HEAD is a good one
        await meets(store.size("k"))
    await store.close()


@pytest.mark.parametrize(
    ("status", "code", "kind", "message"),
    [
        (403, "RequestTimeTooSkewed", Refused, "clock is off"),
        (400, "ExpiredToken", Refused, "have expired"),
        (404, "NoSuchBucket", Refused, "no such bucket there"),
        (404, "NoSuchKey", NotFound, "no such object"),
        (503, "SlowDown", Unavailable, "503"),
    ],
)
async def test_why_a_head_is_refused_is_asked_for(
    fake: FakeS3, status: int, code: str, kind: type[StoreError], message: str
) -> None:
    """The answer to a HEAD has no body: a wrong clock looked like missing permissions."""
    fake.manners.answer = lambda method, key, query: (status, code)
    store = fake.store("p/")
    for call in (store.size("k"), store.read("k", 0, 0), store.stamp("k")):
        with pytest.raises(kind, match=message):
            await call
    await store.close()


@pytest.mark.parametrize("ahead", [0.0, 7200.0, -7200.0])
async def test_an_age_is_by_the_servers_clock_alone(fake: FakeS3, ahead: float) -> None:
    fake.manners.ahead = ahead
    fake.objects["p/k"] = Object(b"bytes", written=time.time() - 100)
    store, now = fake.store("p/"), time.time()
    stamp = await store.stamp("k")
    assert stamp is not None
    assert stamp.age is not None
    assert 98 < stamp.age < 160
    assert abs(stamp.written - (now + ahead - 100)) < 60
    with pytest.raises(NotFound):
        await store.stamp("none")
    await store.close()


@pytest.mark.parametrize("headers", [{}, {"date": "yesterday"}])
def test_a_server_that_leaves_out_the_time(headers: dict[str, str]) -> None:
    """An answer without Last-Modified was a KeyError; without a Date, now was by this host's clock (C80)."""
    answer = {"ResponseMetadata": {"HTTPHeaders": headers}}
    assert stamp_in(answer) is None
    stamp = stamp_in({**answer, "LastModified": datetime(1970, 1, 1, 0, 1, tzinfo=UTC)})
    assert stamp is not None
    assert stamp.written == 60.0
    assert (stamp.now, stamp.age) == (None, None)


@pytest.mark.parametrize("left", [{}, {"LastModified": datetime(1970, 1, 1, 0, 1, tzinfo=UTC)}])
async def test_an_answer_that_was_cut_before_its_dates_is_no_answer(
    fake: FakeS3, left: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collector took the time of its own host's clock, or ended, for one answer without a date."""
    store = fake.store("p/")

    async def cut(key: str) -> dict[str, Any]:
        return {"ResponseMetadata": {"HTTPHeaders": {}}, **left}

    monkeypatch.setattr(store, "_head", cut)
    with pytest.raises(Unavailable):
        await store.stamp("k")
    await store.close()


@pytest.mark.parametrize("data", [b"bytes", b""])
async def test_head_is_refused_where_get_is_allowed(fake: FakeS3, data: bytes) -> None:
    fake.objects["p/k"] = Object(data)
    fake.manners.answer = lambda method, key, query: (403, "AccessDenied") if method == "HEAD" else None
    store = fake.store("p/")
    with pytest.raises(Refused, match=r"403 to HEAD, while GET is allowed: .* has to let HEAD pass"):
        await store.size("k")
    await store.close()


async def test_an_object_that_appears_between_two_looks_is_not_missing(fake: FakeS3) -> None:
    fake.objects["p/k"] = Object(b"bytes")
    fake.manners.answer = lambda method, key, query: (404, "NoSuchKey") if method == "HEAD" else None
    store = fake.store("p/")
    with pytest.raises(Unavailable, match="appeared just now"):
        await store.size("k")
    await store.close()
