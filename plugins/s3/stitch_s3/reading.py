"""Reading the objects of a bucket. All of it is blocking; ``client`` is boto3's, whose errors it raises."""

from __future__ import annotations

import builtins
import contextlib
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from typing import Any

from stitch_core.ports import Blob, Entry, Stamp, Unavailable
from stitch_core.stores.keys import is_key

from .errors import Refused, status_of, without_reason
from .url import Location


class Reader:
    """``page``: rows of one request of a listing."""

    def __init__(self, location: Location, page: int) -> None:
        self._location, self._page = location, page

    def load(self, client: Any, key: str) -> Blob:
        answer = client.get_object(**self._location.where(key))
        data = answer["Body"].read()
        return Blob(data, tag_of(answer, key))

    def read(self, client: Any, key: str, start: int, length: int | None) -> bytes:
        if length == 0:
            self.head(client, key)
            return b""
        wanted = {}
        if start or length is not None:
            wanted["Range"] = f"bytes={start}-" + ("" if length is None else str(start + length - 1))
        try:
            answer = client.get_object(**self._location.where(key), **wanted)
        except Exception as error:
            if status_of(error) == 416:  # nothing from there on
                return b""
            raise
        data: bytes = answer["Body"].read()
        if not wanted:
            return data
        found = answer.get("ContentRange")
        if found is None:  # the server knows no ranges and sent it all
            return data[start:] if length is None else data[start : start + length]
        if not found.startswith(f"bytes {start}-{start + len(data) - 1}/"):
            name = self._location.name(key)
            raise Unavailable(f"reading {name}: asked for bytes from {start} on, got {found}")
        return data

    def head(self, client: Any, key: str) -> dict[str, Any]:
        """Size, ETag, time and checksum. Asks for the object itself to learn why a HEAD is refused."""
        try:
            answer: dict[str, Any] = client.head_object(**self._location.where(key), ChecksumMode="ENABLED")
            return answer
        except Exception as error:
            if not without_reason(error):
                raise
            refused = error
        try:
            client.get_object(**self._location.where(key), Range="bytes=0-0")["Body"].read()
        except Exception as error:
            if status_of(error) != 416:  # which an empty object answers
                raise
        what = f"looking at {self._location.name(key)}"
        if status_of(refused) == 404:
            raise Unavailable(f"{what}: it appeared just now") from refused
        raise Refused(
            f"{what}: {status_of(refused)} to HEAD, while GET is allowed: something between here and the "
            "server, or its policy, has to let HEAD pass"
        ) from refused

    def exists(self, client: Any, key: str) -> bool:
        """By one HEAD: False also where the bucket is missing."""
        try:
            client.head_object(**self._location.where(key))
        except Exception as error:
            if status_of(error) != 404:
                raise
            return False
        return True

    def list(self, client: Any, prefix: str) -> builtins.list[Entry]:
        found = []
        below = self._location.prefix
        for answer in self._pages(client, prefix):
            for row in answer.get("Contents", ()):
                key = row["Key"].removeprefix(below)
                if is_key(key) and row["Key"].startswith(below + prefix):
                    found.append(Entry(key, row["Size"]))
        return sorted(found, key=lambda entry: entry.key)

    def folders(self, client: Any, prefix: str) -> builtins.list[str]:
        below = self._location.prefix + prefix
        rows = [
            row["Prefix"]
            for answer in self._pages(client, prefix, Delimiter="/")
            for row in answer.get("CommonPrefixes", ())
        ]
        names = (row.removeprefix(below).removesuffix("/") for row in rows if row.startswith(below))
        return sorted(name for name in names if is_key(name))

    def _pages(self, client: Any, prefix: str, **more: str) -> Iterator[dict[str, Any]]:
        bucket, below = self._location.bucket, self._location.prefix
        while True:
            answer = client.list_objects_v2(Bucket=bucket, Prefix=below + prefix, MaxKeys=self._page, **more)
            if "IsTruncated" not in answer:
                raise Unavailable(f"listing {self._location}{prefix}: the answer is no listing")
            yield answer
            if not answer["IsTruncated"]:
                return
            more["ContinuationToken"] = answer["NextContinuationToken"]


def tag_of(answer: dict[str, Any], key: str) -> str:
    """The ETag with its quotes. Raises Unavailable where there is none."""
    etag = str(answer.get("ETag") or "").strip('"')
    if not etag:
        raise Unavailable(f"{key}: the server's answer has no ETag")
    return f'"{etag}"'


def stamp_in(answer: dict[str, Any]) -> Stamp | None:
    """When an object was written, and when the server answered; None where it does not say the former."""
    written = answer.get("LastModified")
    date = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
    now = None
    if date is not None:
        with contextlib.suppress(ValueError):
            now = parsedate_to_datetime(date).timestamp()
    return None if written is None else Stamp(written.timestamp(), now)
