"""What an s3: URL may say, and that no message repeats what could be a secret."""

from typing import Any

import pytest

from stitch_core.stores import BadUrl, open_store
from stitch_s3.client import connect
from stitch_s3.store import S3Store, open_url
from stitch_s3.url import Location, parse_url


@pytest.mark.parametrize(
    ("url", "location"),
    [
        ("s3://bucket", Location("bucket")),
        ("s3://bucket/", Location("bucket")),
        ("s3://bucket/a", Location("bucket", "a/")),
        ("s3://bucket/a/b-c/", Location("bucket", "a/b-c/")),
        ("s3://My_bucket.x", Location("My_bucket.x")),
        (
            "s3://b-1/p?endpoint=http://127.0.0.1:9000&region=eu-west-1&profile=me",
            Location("b-1", "p/", "http://127.0.0.1:9000", "eu-west-1", "me"),
        ),
        (
            "s3://bucket?ca=/etc/ca.pem&addressing=virtual&role=arn:aws:iam::1:role/x&token_env=TOKEN&readback=bytes",
            Location("bucket", addressing="virtual", role="arn:aws:iam::1:role/x", token_env="TOKEN",
                     readback="bytes", ca="/etc/ca.pem"),
        ),
    ],
)  # fmt: skip
def test_locations(url: str, location: Location) -> None:
    assert parse_url(url) == location
    store = open_store(url)
    assert isinstance(store, S3Store)
    assert store.location == location


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3:///prefix", "'' is not a bucket"),
        ("s3:bucket/x", "write s3://bucket/prefix"),
        ("s3://bucket:9000/x", "is not a bucket"),
        ("s3://b/x", "'b' is not a bucket"),
        ("s3://bucket/a//b", "'a//b' is not a prefix"),
        ("s3://bucket/a b", "is not a prefix"),
        ("s3://bucket/a%20b", "is not a prefix"),
        ("s3://bucket/../b", "is not a prefix"),
        ("s3://bucket/.hidden", "is not a prefix"),
        ("s3://bucket/caf\u00e9", "is not a prefix"),
        ("s3://bucket/" + "a/" * 150, "200 characters"),
        ("s3://bucket/a#b", "'#' in the URL"),
        ("s3://bucket?key=1", "'key' is no option .*: there are endpoint, region"),
        ("s3://bucket?region=", "given once, with a value"),
        ("s3://bucket?region=a&region=b", "given once"),
        ("s3://bucket?addressing=both", "it is path or virtual"),
        ("s3://bucket?endpoint=localhost:9000", "the option endpoint is a URL"),
        ("s3://bucket?endpoint=http://x:99999", "the option endpoint is a URL"),
        ("s3://bucket?ca=certificates.pem", "the absolute path of a file with certificates"),
        ("s3://bucket?token_env=eyJhbGciOi.x", "the name of an environment variable"),
    ],
)
def test_what_is_refused(url: str, message: str) -> None:
    with pytest.raises(BadUrl, match=message):
        open_url(url)


@pytest.mark.parametrize(
    "url",
    [
        "s3://AKIAEXAMPLE:topsecret@bucket/x",
        "s3://bucket?secret_key=topsecret",
        "s3://bucket?endpoint=https://me:topsecret@host",
        "s3://bucket?endpoint=https://host/?token=topsecret",
        "s3://bucket?token_env=topsecret.and-more",
    ],
)
def test_secrets_are_not_repeated(url: str) -> None:
    with pytest.raises(BadUrl) as error:
        open_url(url)
    assert "topsecret" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "place"),
    [
        ("", "https://bucket.s3.eu-west-1.amazonaws.com/p/k"),
        ("&addressing=path", "https://s3.eu-west-1.amazonaws.com/bucket/p/k"),
        ("&endpoint=http://objects.example.com:9000", "http://objects.example.com:9000/bucket/p/k"),
        (
            "&endpoint=http://objects.example.com:9000&addressing=virtual",
            "http://bucket.objects.example.com:9000/p/k",
        ),
    ],
)
def test_where_the_bucket_is_in_a_request(monkeypatch: pytest.MonkeyPatch, options: str, place: str) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    location = parse_url("s3://bucket/p?region=eu-west-1" + options)
    client = connect(location, 1, credentials=("key", "secret"))
    seen: list[str] = []

    def stop(request: Any, **_: Any) -> None:
        seen.append(request.url)
        raise InterruptedError

    client.meta.events.register("before-send.s3", stop)
    with pytest.raises(InterruptedError):
        client.get_object(**location.where("k"))
    assert seen == [place]
    client.close()


def test_without_boto3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BadUrl, match=r"install 'stitch-rl\[s3\]'"):
        open_url("s3://bucket")
