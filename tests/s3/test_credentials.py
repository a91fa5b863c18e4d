"""Where keys come from: the environment, a profile, and a web identity token that is read at each renewal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stitch_s3.errors import Refused
from stitch_s3.store import S3Store, open_url
from tests.s3.fake import FakeS3

NAMES = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_ROLE_ARN",
         "AWS_WEB_IDENTITY_TOKEN_FILE", "MODAL_IDENTITY_TOKEN", "MODAL_IDENTITY_TOKEN_FILE",
         "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3")  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fake: FakeS3) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", fake.endpoint)


async def key_of(fake: FakeS3, store: S3Store, *, times: int = 1) -> list[str]:
    """The access key that the server sees."""
    fake.signed.clear()
    for _ in range(times):
        await store.replace("k", b"1")
    await store.close()
    return [text.partition("Credential=")[2].partition("/")[0] for text in fake.signed]


async def test_keys_of_the_environment(fake: FakeS3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "ENVKEY")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    monkeypatch.setenv("AWS_REGION", "eu-west-9")
    store = open_url(f"s3://bucket/p?endpoint={fake.endpoint}")
    assert await key_of(fake, store) == ["ENVKEY"]
    assert "/eu-west-9/s3/" in fake.signed[0]
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", fake.endpoint)
    store = open_url("s3://bucket/p?region=us-west-2")
    assert await key_of(fake, store) == ["ENVKEY"]
    assert "/us-west-2/s3/" in fake.signed[0]
    assert set(fake.objects) == {"p/k"}
    assert repr(store) == "S3Store(s3://bucket/p/)"


async def test_a_profile(fake: FakeS3, tmp_path: Path) -> None:
    (tmp_path / "credentials").write_text(
        "[me]\naws_access_key_id=MINE\naws_secret_access_key=s\nregion=eu-north-1\n"
    )
    assert await key_of(fake, open_url(f"s3://bucket?profile=me&endpoint={fake.endpoint}")) == ["MINE"]
    assert "/eu-north-1/" in fake.signed[0]


@pytest.mark.parametrize("how", ["variable", "file", "aws file", "named"])
async def test_a_token_is_read_at_each_renewal(
    fake: FakeS3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: str
) -> None:
    """Modal rewrites it as it is renewed: one that was kept would go stale."""
    url = f"s3://bucket?endpoint={fake.endpoint}" + ("&token_env=MINE" if how == "named" else "")
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/trainer")
    path = tmp_path / "token"

    def renew(token: str) -> None:
        path.write_text(token)
        if how in ("variable", "named"):
            monkeypatch.setenv("MODAL_IDENTITY_TOKEN" if how == "variable" else "MINE", token)

    if how == "file":
        monkeypatch.setenv("MODAL_IDENTITY_TOKEN_FILE", str(path))
    if how == "aws file":
        monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(path))
    renew("token-1")
    store = open_url(url)
    await store.replace("k", b"1")
    assert set(fake.tokens) == {"token-1"}
    renew("token-2")
    fake.tokens.clear()
    # The server lends keys for a minute, so that each request renews them.
    assert set(await key_of(fake, store)) <= {"LENT-token-2"}
    assert set(fake.tokens) == {"token-2"}


@pytest.mark.slow
async def test_a_token_that_is_missing_or_refused(fake: FakeS3, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(url: str, message: str) -> None:
        store = open_url(url)
        with pytest.raises(Refused, match=message) as error:
            await store.load("k")
        assert "topsecret" not in str(error.value)
        await store.close()

    url = f"s3://bucket?token_env=MINE&endpoint={fake.endpoint}"
    await refused(url, r"needs a role: set AWS_ROLE_ARN or give \?role=")
    url += "&role=arn:aws:iam::123456789012:role/trainer"
    await refused(url, "no web identity token in MINE")
    monkeypatch.setenv("MINE", "topsecret" * 5)
    for code, message in (("InvalidIdentityToken", "trust policy"), ("ExpiredTokenException", "renew them"),
                          ("AccessDenied", "may not do this")):  # fmt: skip

        def answer(method: str, key: str, query: Any, code: str = code) -> tuple[int, str] | None:
            return (400 if code != "AccessDenied" else 403, code) if method == "POST" and not key else None

        fake.manners.answer = answer
        await refused(url, message)
