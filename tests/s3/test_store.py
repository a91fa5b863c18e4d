"""The S3 store against a small server: the whole kit, then each bad manner and what follows from it."""

from __future__ import annotations

import asyncio
import hashlib
import random
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from stitch_core.files import PosixFiles
from stitch_core.ports import AlreadyExists, Conflict, Entry, FileSource, NotFound, StoreError, Unavailable
from stitch_core.stores.transfer import upload, verify
from stitch_core.testing.stores import StoreTests
from stitch_s3.errors import Refused
from stitch_s3.multipart import MAX_PARTS, PART, part_size
from stitch_s3.store import S3Store
from stitch_s3.testing.server import ENVIRON
from stitch_s3.url import Location
from tests.s3.fake import FakeS3, Manners, Object

DATA = random.Random(3).randbytes(5 * 2**20)


def sha(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


class TestKit(StoreTests):
    """Small parts and pages, so that what is large elsewhere is met here."""

    @pytest.fixture
    async def store(self, fake: FakeS3) -> AsyncIterator[S3Store]:
        fake.objects["elsewhere/k"] = fake.objects["x/y/.stitch/probe"] = Object(b"not of this store")
        store = fake.store("x/y/", single=2**20 - 1, page=2)
        yield store
        await store.close()
        assert fake.uploads == {}
        assert fake.objects["elsewhere/k"].data == b"not of this store"

    @pytest.fixture
    async def second_store(self, store: S3Store, fake: FakeS3) -> AsyncIterator[S3Store]:
        second = fake.store("x/y/")
        yield second
        await second.close()


@pytest.fixture
async def store(fake: FakeS3) -> AsyncIterator[S3Store]:
    store = fake.store("p/", single=2**20)
    yield store
    await store.close()


def once(status: int, code: str, method: str) -> Any:
    """Answers so to the first request of a method."""
    left = [(status, code)]
    return lambda m, key, query: left.pop() if m == method and left else None


# -------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("status", "code", "kind", "message"),
    [
        (403, "AccessDenied", Refused, "allow s3:GetObject"),
        (403, "SomethingElse", Refused, "allow s3:GetObject"),
        (403, "InvalidAccessKeyId", Refused, "set AWS_ACCESS_KEY_ID"),
        (403, "SignatureDoesNotMatch", Refused, "see AWS_SECRET_ACCESS_KEY"),
        (403, "RequestTimeTooSkewed", Refused, "clock is off"),
        (400, "ExpiredToken", Refused, "have expired: renew them"),
        (401, "Unauthorized", Refused, "set AWS_ACCESS_KEY_ID"),
        (404, "NoSuchBucket", Refused, "create it, or check its name"),
        (301, "PermanentRedirect", Refused, "say which with .region="),
        (400, "AuthorizationHeaderMalformed", Refused, "say which with .region="),
        (501, "NotImplemented", Refused, "no conditional writes"),
        (400, "InvalidRequest", Refused, "400 InvalidRequest"),
        (409, "ConditionalRequestConflict", Unavailable, "409"),
        (500, "InternalError", Unavailable, "500"),
        (503, "SlowDown", Unavailable, "503"),
        (429, "TooManyRequests", Unavailable, "429"),
        (400, "RequestTimeout", Unavailable, "RequestTimeout"),
        (400, "BadDigest", Unavailable, "damaged on the way"),
    ],
)
async def test_what_the_server_says(
    fake: FakeS3, store: S3Store, status: int, code: str, kind: type[StoreError], message: str
) -> None:
    fake.objects["p/k"] = Object(b"x")
    # botocore asks for the bucket itself where it may be in another region.
    fake.manners.answer = lambda method, key, query: (status, code) if key or query else None
    calls = (store.load("k"), store.read("k", 1, 2), store.create("j", b""), store.swap("k", '"x"', b""),
             store.replace("k", b""), store.delete("k"), store.list(""))  # fmt: skip
    for call in calls:
        with pytest.raises(kind, match=message) as error:
            await call
        assert type(error.value) is not StoreError
        assert "wJalr" not in str(error.value), "what a server quotes may be a secret"
        assert isinstance(error.value, Unavailable) == (kind is Unavailable)


async def test_each_request_is_made_once(fake: FakeS3, store: S3Store) -> None:
    """A second try of a conditional write that landed would be told that it failed."""
    fake.manners.answer = lambda method, key, query: (500, "InternalError")
    with pytest.raises(Unavailable):
        await store.create("k", b"")
    with pytest.raises(Unavailable):
        await store.load("k")
    assert fake.requests == {"PUT": 1, "GET": 1}


async def test_no_server_is_unavailable() -> None:
    store = FakeS3(endpoint="http://127.0.0.1:9").store()
    for call in (store.load("k"), store.swap("k", None, b"")):
        with pytest.raises(Unavailable, match="EndpointConnectionError"):
            await call
    await store.close()


async def test_no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_ROLE_ARN"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    store = S3Store(Location("bucket", endpoint="http://127.0.0.1:9"))
    with pytest.raises(Refused, match="no credentials: set AWS_ACCESS_KEY_ID"):
        await store.load("k")
    await store.close()
    store = S3Store(Location("bucket", endpoint="http://127.0.0.1:9", profile="nobody"))
    with pytest.raises(Refused, match=r"ProfileNotFound: check \?profile="):
        await store.load("k")
    await store.close()


async def test_a_bundle_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was tried again, as if the way to the server were down. Where there is no TLS it is unused."""
    monkeypatch.setenv("AWS_CA_BUNDLE", "/nowhere/ca.pem")
    for name, value in ENVIRON.items():
        monkeypatch.setenv(name, value)
    for scheme, kind, said in (
        ("https", Refused, "there is no file /nowhere/ca.pem, which AWS_CA_BUNDLE"),
        ("http", Unavailable, "EndpointConnectionError"),
    ):
        store = S3Store(Location("bucket", endpoint=f"{scheme}://127.0.0.1:9"))
        with pytest.raises(kind, match=said):
            await store.load("k")
        await store.close()


async def test_a_listing_that_is_none_is_not_an_empty_one(fake: FakeS3, store: S3Store) -> None:
    fake.manners.garbage = True
    with pytest.raises(Unavailable):
        await store.list("")


# ---------------------------------------------------------------------------------------------- tags


@pytest.mark.parametrize("missing_is_404", [True, False])
async def test_tags_without_quotes_where_a_probe_shows_it(
    fake: FakeS3, store: S3Store, missing_is_404: bool
) -> None:
    """Ceph 16 compares If-Match with the bare ETag: all quoted ones fail there."""
    fake.manners = Manners(bare_tags=True, missing_is_404=missing_is_404)
    tag = await store.swap("head", None, b"1")
    with pytest.raises(Conflict):
        await store.swap("head", '"0123"', b"x")
    tag = await store.swap("head", tag, b"2")
    tag = await store.swap("head", tag, b"3")
    with pytest.raises(Conflict):
        await store.swap("other", tag, b"x")
    assert (await store.load("head")).data == b"3"
    assert (await store.load("head")).tag == tag
    assert set(fake.objects) == {"p/head"}, "the probe is gone"


async def test_no_condition_is_sent_that_would_hold_for_anything(fake: FakeS3, store: S3Store) -> None:
    await store.replace("k", b"1")
    before = fake.requests["PUT"]
    for tag in ("", "*", '""', '"*"', '"a" "b"'):
        with pytest.raises(Conflict):
            await store.swap("k", tag, b"x")
    assert fake.requests["PUT"] == before


async def test_ranges_that_a_server_ignores(fake: FakeS3, store: S3Store) -> None:
    fake.manners.ranges = False
    await store.create("k", bytes(range(100)))
    assert await store.read("k", 10, 5) == bytes(range(10, 15))
    assert await store.read("k", 98) == bytes((98, 99))


# ------------------------------------------------------------------------------------ in several parts


@pytest.mark.parametrize("size", [1, PART * 10_000, PART * 10_000 + 1, 5 * 10**12, 5 * 2**40])
def test_parts_are_few_enough(size: int) -> None:
    part = part_size(size)
    assert part >= PART
    assert -(-size // part) <= MAX_PARTS
    assert part < 600 * 2**20


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stitch_s3.multipart.PART", 2**20)


@pytest.fixture
def source(tmp_path: Path) -> FileSource:
    (tmp_path / "f").write_bytes(DATA + b"end")
    return FileSource(PosixFiles(), tmp_path / "f", len(DATA) + 3)


@pytest.mark.usefixtures("small_parts")
async def test_a_large_file(fake: FakeS3, store: S3Store, source: FileSource) -> None:
    """Its digest is known from the parts: the server found theirs, and this process the whole one's."""
    steps: list[int] = []
    await upload(store, "k", source, sha(DATA + b"end"), progress=steps.append)
    assert len(steps) == 6
    assert sum(steps) == source.size
    assert fake.objects["p/k"].data == DATA + b"end"
    fake.requests.clear()
    await verify(store, "k", source.size, sha(DATA + b"end"))
    assert fake.requests == {"HEAD": 1}
    other = fake.store("p/")
    await verify(other, "k", source.size, sha(DATA + b"end"))  # another process has to read
    assert fake.requests["GET"] > 0
    await other.close()


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("on_complete", [True, False])
async def test_a_large_create_meets_an_object(
    fake: FakeS3, store: S3Store, source: FileSource, on_complete: bool
) -> None:
    fake.manners.conditions_on_complete = on_complete
    fake.objects["p/k"] = Object(b"first")
    with pytest.raises(AlreadyExists):
        await store.create("k", source)
    assert fake.objects["p/k"].data == b"first"


@pytest.mark.usefixtures("small_parts")
async def test_a_large_create_that_lost_a_race(fake: FakeS3, store: S3Store, source: FileSource) -> None:
    """Both saw nothing; a server that ignores conditions here takes both, and the first is told."""
    fake.manners.conditions_on_complete = False

    def overtaken(method: str, key: str, query: Any) -> None:
        if method == "HEAD" and "p/k" in fake.objects:
            fake.objects["p/k"] = Object(b"the other's")

    fake.manners.answer = overtaken
    with pytest.raises(AlreadyExists, match="another writer at the same time"):
        await store.create("k", source)
    fake.manners.answer = lambda *_: None
    with pytest.raises(AlreadyExists, match="other bytes"):
        await upload(store, "k", source, sha(DATA + b"end"))


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize(
    ("method", "status", "code", "kind"),
    [
        ("POST", 403, "AccessDenied", Refused),
        ("PUT", 403, "AccessDenied", Refused),
        ("POST-complete", 500, "InternalError", Unavailable),
        ("POST-complete", 412, "PreconditionFailed", AlreadyExists),
        ("POST-complete", 409, "ConditionalRequestConflict", Unavailable),
    ],
)
async def test_an_upload_that_fails_leaves_nothing(
    fake: FakeS3, source: FileSource, method: str, status: int, code: str, kind: type[StoreError]
) -> None:
    def answer(m: str, key: str, query: dict[str, list[str]]) -> tuple[int, str] | None:
        completing = m == "POST" and "uploadId" in query
        hit = completing if method == "POST-complete" else m == method
        return (status, code) if hit else None

    fake.manners.answer = answer
    store = fake.store("p/", single=2**20)
    with pytest.raises(kind):
        await store.create("k", source)
    await store.close()
    assert fake.uploads == {}
    assert fake.objects == {}


@pytest.mark.usefixtures("small_parts")
async def test_a_part_that_is_refused_once_is_sent_again(
    fake: FakeS3, store: S3Store, source: FileSource
) -> None:
    fake.manners.answer = once(503, "SlowDown", "PUT")
    await store.create("k", source)
    assert fake.objects["p/k"].data == DATA + b"end"


@pytest.mark.usefixtures("small_parts")
async def test_an_upload_that_is_given_up_leaves_nothing(fake: FakeS3, source: FileSource) -> None:
    sending = threading.Event()

    def slow(method: str, key: str, query: dict[str, list[str]]) -> None:
        if "partNumber" in query:
            sending.set()
            threading.Event().wait(0.1)

    fake.manners.answer = slow
    store = fake.store("p/", single=2**20)
    task = asyncio.ensure_future(store.create("k", source))
    await asyncio.to_thread(sending.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await store.close()
    assert fake.uploads == {}
    assert fake.objects == {}


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("size", [1000, len(DATA)])
async def test_a_file_that_changed_since_it_was_hashed(fake: FakeS3, size: int, tmp_path: Path) -> None:
    store = fake.store("p/", single=2**20)
    (tmp_path / "f").write_bytes(DATA[:size])
    with pytest.raises(StoreError, match="changed since it was hashed") as error:
        await upload(store, "k", FileSource(PosixFiles(), tmp_path / "f", size), sha(b"before"))
    assert not isinstance(error.value, Unavailable)
    await store.close()
    assert fake.uploads == {}
    assert fake.objects == {}


@pytest.mark.usefixtures("small_parts")
async def test_a_server_without_checksums_is_read_back(
    fake: FakeS3, store: S3Store, source: FileSource
) -> None:
    fake.manners.checksums = False
    await upload(store, "large", source, sha(DATA + b"end"))
    await upload(store, "small", b"small", sha(b"small"))
    fake.requests.clear()
    await verify(store, "large", source.size, sha(DATA + b"end"))
    await verify(store, "small", 5, sha(b"small"))
    assert fake.requests["GET"] >= 2
    fake.objects["p/small"].data = b"smalL"
    with pytest.raises(StoreError, match="not what was announced"):
        await verify(store, "small", 5, sha(b"small"))


async def test_reading_back_may_be_asked_for(fake: FakeS3) -> None:
    store = fake.store("p/", readback="bytes")
    await upload(store, "small", b"small", sha(b"small"))
    await verify(store, "small", 5, sha(b"small"))
    assert fake.requests["GET"] == 1
    await store.close()


async def test_bytes_damaged_on_the_way_are_sent_again(fake: FakeS3, store: S3Store) -> None:
    fake.manners.answer = once(400, "BadDigest", "PUT")
    await upload(store, "k", b"data", sha(b"data"))
    assert fake.objects["p/k"].data == b"data"


async def test_what_is_not_there(store: S3Store) -> None:
    for call in (store.load("k"), store.size("k"), store.read("k", 0, 0), store.digest("k")):
        with pytest.raises(NotFound):
            await call
    assert await store.list("k") == []
    await store.replace("k", b"1")
    assert await store.list("k") == [Entry("k", 1)]
