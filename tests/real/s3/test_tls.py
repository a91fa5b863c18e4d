"""S3 over HTTPS with a private authority, which the URL or AWS_CA_BUNDLE names; what is wrong is said."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from stitch_core.ports import AlreadyExists
from stitch_core.stores import open_store
from stitch_core.stores.transfer import verify
from stitch_s3.errors import Refused
from stitch_s3.testing.proxy import FaultProxy, Request
from stitch_s3.testing.server import ENVIRON, SeaweedServer
from tests.real.s3.publishing import BOOT, LARGE, check_whole, payload, publisher
from tests.real.s3.tls import Authority, TlsFront, make_authority

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return make_authority(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture
async def front(
    server: SeaweedServer, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[TlsFront]:
    for name, value in ENVIRON.items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    async with TlsFront(server.endpoint, authority) as front:
        yield front


@pytest.mark.parametrize("how", ["url", "variable"])
async def test_a_private_authority(
    server: SeaweedServer, front: TlsFront, authority: Authority, prefix: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, how: str,
) -> None:  # fmt: skip
    """A publish of small files and of parts, read back; no body has a trailer, which not all servers know."""
    url = server.url(prefix.rstrip("/"), front.endpoint)
    if how == "url":
        url += f"&ca={authority.ca}"
    else:
        monkeypatch.setenv("AWS_CA_BUNDLE", str(authority.ca))
    store = open_store(url)
    writer = publisher(store, "run")
    await writer.claim(BOOT)
    made = payload(tmp_path, writer, "v", full=True, sizes=(0, 10, LARGE))
    newest = await writer.publish(made)
    assert (await check_whole(store, "run"))[0].digest() == newest.digest()
    with pytest.raises(AlreadyExists):
        await store.create(newest.file_key("part-1"), b"other")
    await store.close()
    plain = server.store(prefix)
    for file in newest.representation.files:
        await verify(plain, newest.file_key(file.name), file.size, file.sha256)
    await plain.close()


async def test_an_unknown_authority_is_named_with_what_to_do(
    server: SeaweedServer, front: TlsFront, prefix: str, tmp_path: Path
) -> None:
    other = make_authority(tmp_path / "another")
    for options in ("", f"&ca={other.ca}"):
        store = open_store(server.url(prefix.rstrip("/"), front.endpoint) + options)
        with pytest.raises(Refused) as error:
            await store.load("runs/run/head")
        message = str(error.value)
        assert f"the certificate of {front.endpoint} is not trusted" in message
        assert "AWS_CA_BUNDLE or with ?ca=" in message
        assert "local issuer" in message or "self-signed" in message
        await store.close()


@pytest.mark.usefixtures("front")
async def test_a_certificate_for_another_name(server: SeaweedServer, prefix: str, tmp_path: Path) -> None:
    other = make_authority(tmp_path / "named", "DNS:objects.example.com")
    async with TlsFront(server.endpoint, other) as named:
        store = open_store(server.url(prefix.rstrip("/"), named.endpoint) + f"&ca={other.ca}")
        with pytest.raises(
            Refused, match=f"certificate of {named.endpoint} is for another name: .*objects.example"
        ):
            await store.load("k")
        await store.close()


async def test_https_to_a_port_that_speaks_http(
    server: SeaweedServer, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ENVIRON.items():
        monkeypatch.setenv(name, value)
    endpoint = server.endpoint.replace("http:", "https:")
    store = open_store(server.url(prefix.rstrip("/"), endpoint))
    with pytest.raises(Refused, match=f"{endpoint} does not speak TLS: is it http://"):
        await store.load("k")
    await store.close()


async def test_a_file_of_certificates_that_is_not_there_or_none(
    server: SeaweedServer, front: TlsFront, prefix: str, tmp_path: Path
) -> None:
    (tmp_path / "empty.pem").write_text("no certificate")
    for name, message in (
        ("missing.pem", "there is no file"),
        ("empty.pem", r"\?ca= names holds no certificate"),
    ):
        path = tmp_path / name
        store = open_store(server.url(prefix.rstrip("/"), front.endpoint) + f"&ca={path}")
        with pytest.raises(Refused, match=message):
            await store.load("k")
        await store.close()


async def test_the_body_is_digested_once_and_sent_as_it_is(
    server: SeaweedServer, authority: Authority, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over TLS boto3's own default would be a checksum in a trailer, stored as data by some servers."""
    for name, value in ENVIRON.items():
        monkeypatch.setenv(name, value)
    seen: list[dict[str, str]] = []

    def note(request: Request) -> None:
        if request.method == "PUT":
            seen.append({name.lower(): value for name, value in request.headers})

    async with (
        FaultProxy(server.endpoint, change=note) as proxy,
        TlsFront(proxy.endpoint, authority) as front,
    ):
        store = open_store(server.url(prefix.rstrip("/"), front.endpoint) + f"&ca={authority.ca}")
        await store.create("k", b"bytes")
        await store.close()
    (headers,) = seen
    assert headers["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"
    assert headers["content-length"] == "5"
    assert "x-amz-checksum-sha256" in headers["authorization"], "the checksum is signed"
    assert not {"x-amz-trailer", "transfer-encoding", "x-amz-decoded-content-length"} & headers.keys()
