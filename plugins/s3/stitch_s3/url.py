"""What ``s3://bucket/prefix?endpoint=...`` says. No message repeats a part of it that could be a secret."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from stitch_core.stores import BadUrl
from stitch_core.stores.keys import check_key
from stitch_core.stores.urls import url_options, url_prefix

OPTIONS = ("endpoint", "region", "profile", "addressing", "role", "token_env", "readback", "ca")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,62}\Z")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


@dataclass(frozen=True)
class Location:
    """Where the objects are and how to get there. ``prefix`` is empty or ends with '/'.

    ``addressing``: ``path`` or ``virtual`` (the bucket in the host name); None: path at a custom endpoint.
    ``role`` is assumed with the web identity token in the variable ``token_env``. ``readback`` ``bytes``:
    what was written is read back whole even where the server tells the digest that it found. ``ca``: the
    file with the certificates of who may vouch for the endpoint, in place of the machine's.
    """

    bucket: str
    prefix: str = ""
    endpoint: str | None = None
    region: str | None = None
    profile: str | None = None
    addressing: str | None = None
    role: str | None = None
    token_env: str | None = None
    readback: str = "digest"
    ca: str | None = None

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}"

    def name(self, key: str) -> str:
        """The key as errors name it."""
        return f"{self}{check_key(key)}"

    def where(self, key: str) -> dict[str, str]:
        """The key as boto3's calls name it."""
        return {"Bucket": self.bucket, "Key": self.prefix + check_key(key)}


def parse_url(url: str) -> Location:
    """The location that a URL names. Raises BadUrl."""
    parts = urlsplit(url)
    if "@" in parts.netloc:
        raise BadUrl(
            "an s3: URL holds no keys: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or name a profile "
            "with ?profile="
        )
    if not _BUCKET.match(parts.netloc):
        raise BadUrl(f"{parts.netloc!r} is not a bucket: write s3://bucket/prefix")
    return Location(parts.netloc, url_prefix(parts), **_options(parts))


def _options(parts: SplitResult) -> dict[str, str]:
    found = url_options(parts, OPTIONS)
    _check_endpoint(found.get("endpoint"))
    for name, allowed in (("addressing", ("path", "virtual")), ("readback", ("digest", "bytes"))):
        if found.get(name, allowed[0]) not in allowed:
            raise BadUrl(f"{name}={found[name]!r}: it is {' or '.join(allowed)}")
    if not found.get("ca", "/").startswith("/"):
        raise BadUrl(f"ca={found['ca']!r}: it is the absolute path of a file with certificates, as PEM")
    if "token_env" in found and not _VARIABLE.match(found["token_env"]):
        raise BadUrl("token_env is the name of an environment variable, not what is in it")
    return found


def _check_endpoint(endpoint: str | None) -> None:
    if endpoint is None:
        return
    try:
        parts = urlsplit(endpoint)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good or parts.query or parts.fragment or "@" in parts.netloc:
        raise BadUrl("the option endpoint is a URL such as https://objects.example.com:9000, without keys")
