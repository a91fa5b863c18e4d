"""A bucket of S3, or of what speaks its protocol, as a store: ``s3://bucket/prefix?endpoint=...``.

Creating is a PUT with ``If-None-Match: *`` and its SHA-256, which the server checks and keeps; swapping is a
PUT with ``If-Match`` and the ETag that was read. Each request is made once: a repeated conditional write
would be told that it failed although the first had landed. Memory: 256 MiB for what is being uploaded, or
one part where parts must be larger than that (objects over 2.5 TB).
"""

from __future__ import annotations

import asyncio
import base64
import builtins
import contextlib
import functools
import hashlib
import re
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

from stitch_core.ports import (
    AlreadyExists,
    Blob,
    Buffer,
    Capabilities,
    Conflict,
    Entry,
    FileSource,
    NotFound,
    StoreError,
    Unavailable,
)
from stitch_core.stores.keys import BadKey, check_key, check_prefix, check_range, is_key
from stitch_core.stores.room import TRANSFER_BYTES, Room
from stitch_core.stores.sources import plain_bytes, source_chunks, source_size
from stitch_core.threads import Threads

from .client import check_installed, connect
from .errors import Damaged, code_of, status_of, translate
from .multipart import PART, PartsUpload, Sent, b64
from .url import Location, parse_url

PARALLEL = 16
"""Requests at a time."""

KEPT_COMPOSITES = 4096
CLOSE_SECONDS = 10.0
_ETAG = re.compile(r'"[^"*\s]+"\Z')


class S3Store:
    """The objects below ``location``. Has threads of its own, which ``close`` ends.

    Tags are ETags: content digests for objects as small as a head. ``client`` makes the boto3 client, at the
    first call; ``single`` is the largest object, in bytes, that is sent in one request, ``page`` the rows of
    one request of a listing.
    """

    def __init__(
        self,
        location: Location,
        *,
        client: Callable[[], Any] | None = None,
        single: int = PART,
        page: int = 1000,
    ) -> None:
        self.location = location
        self._make_client = client or functools.partial(connect, location, PARALLEL)
        self._client: Any = None
        self._connecting = threading.Lock()
        self._threads = Threads(PARALLEL, "stitch-s3")
        self._single, self._page = single, page
        self._room = Room(TRANSFER_BYTES)
        self._bare_tags: bool | None = None  # whether If-Match wants ETags without quotes; None: not known
        self._composites: OrderedDict[str, str] = OrderedDict()
        self._aborting: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"S3Store({self.location})"

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(digests=True)

    async def close(self) -> None:
        if self._aborting:
            await asyncio.wait(self._aborting, timeout=CLOSE_SECONDS)
        self._threads.close()
        if self._client is not None:
            self._client.close()

    # ----------------------------------------------------------------------------------------- reading

    async def load(self, key: str) -> Blob:
        return await self._request(f"reading {self._name(key)}", lambda client: self._load(client, key))

    async def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        check_range(start, length)
        what = f"reading {self._name(key)}"
        return await self._request(what, lambda client: self._read(client, key, start, length))

    async def size(self, key: str) -> int:
        return int((await self._head(key))["ContentLength"])

    async def digest(self, key: str) -> tuple[int, str | None]:
        """As DigestingStore.digest: what the server found at the upload, or this process part by part."""
        head = await self._head(key)
        checksum = str(head.get("ChecksumSHA256") or "")
        if self.location.readback == "bytes" or not checksum:
            return int(head["ContentLength"]), None
        if "-" in checksum:
            return int(head["ContentLength"]), self._composites.get(checksum)
        return int(head["ContentLength"]), "sha256:" + base64.b64decode(checksum).hex()

    async def list(self, prefix: str) -> builtins.list[Entry]:
        check_prefix(prefix)
        return await self._request(
            f"listing {self.location}{prefix}", lambda client: self._list(client, prefix)
        )

    async def folders(self, prefix: str) -> builtins.list[str]:
        """As BrowsableStore.folders: a request for every thousand of them, whatever is in them."""
        check_prefix(prefix)
        return await self._request(
            f"listing {self.location}{prefix}", lambda client: self._folders(client, prefix)
        )

    async def modified(self, key: str) -> float:
        """As BrowsableStore.modified, in whole seconds."""
        return float((await self._head(key))["LastModified"].timestamp())

    async def _head(self, key: str) -> dict[str, Any]:
        return await self._request(
            f"looking at {self._name(key)}",
            lambda client: client.head_object(**self._where(key), ChecksumMode="ENABLED"),
        )

    def _load(self, client: Any, key: str) -> Blob:
        answer = client.get_object(**self._where(key))
        data = answer["Body"].read()
        return Blob(data, _tag(answer, key))

    def _read(self, client: Any, key: str, start: int, length: int | None) -> bytes:
        if length == 0:
            client.head_object(**self._where(key))
            return b""
        wanted = {}
        if start or length is not None:
            wanted["Range"] = f"bytes={start}-" + ("" if length is None else str(start + length - 1))
        try:
            answer = client.get_object(**self._where(key), **wanted)
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
            raise Unavailable(f"reading {self._name(key)}: asked for bytes from {start} on, got {found}")
        return data

    def _list(self, client: Any, prefix: str) -> builtins.list[Entry]:
        found = []
        below = self.location.prefix
        for answer in self._pages(client, prefix):
            for row in answer.get("Contents", ()):
                key = row["Key"].removeprefix(below)
                if is_key(key) and row["Key"].startswith(below + prefix):
                    found.append(Entry(key, row["Size"]))
        return sorted(found, key=lambda entry: entry.key)

    def _folders(self, client: Any, prefix: str) -> builtins.list[str]:
        below = self.location.prefix + prefix
        rows = [
            row["Prefix"]
            for answer in self._pages(client, prefix, Delimiter="/")
            for row in answer.get("CommonPrefixes", ())
        ]
        names = (row.removeprefix(below).removesuffix("/") for row in rows if row.startswith(below))
        return sorted(name for name in names if is_key(name))

    def _pages(self, client: Any, prefix: str, **more: str) -> Iterator[dict[str, Any]]:
        while True:
            answer = client.list_objects_v2(
                Bucket=self.location.bucket, Prefix=self.location.prefix + prefix, MaxKeys=self._page, **more
            )
            if "IsTruncated" not in answer:
                raise Unavailable(f"listing {self.location}{prefix}: the answer is no listing")
            yield answer
            if not answer["IsTruncated"]:
                return
            more["ContinuationToken"] = answer["NextContinuationToken"]

    # ----------------------------------------------------------------------------------------- writing

    async def create(self, key: str, source: Buffer | FileSource) -> None:
        check_key(key)
        size = source_size(source)
        what = f"writing {self._name(key)}"
        if size > self._single:
            await self._create_in_parts(key, source, size, what)
            return
        async with self._room.lent(size):
            await self._request(what, lambda client: self._create(client, key, source))
        if isinstance(source, FileSource) and source.progress is not None:
            source.progress(size)

    def _create(self, client: Any, key: str, source: Buffer | FileSource) -> None:
        chunks = list(source_chunks(source, max(1, source_size(source))))
        data = plain_bytes(chunks[0]) if chunks else b""
        announced = source.sha256 if isinstance(source, FileSource) else None
        try:
            self._put(client, key, data, announced, IfNoneMatch="*")
        except Conflict:
            self._check_not_above(client, key)
            raise AlreadyExists(f"{self._name(key)} exists") from None
        except Damaged:
            if announced is not None and "sha256:" + hashlib.sha256(data).hexdigest() != announced:
                raise StoreError(
                    f"{self._name(key)}: the file is not what was announced: it changed since it was hashed"
                ) from None
            raise

    async def _create_in_parts(self, key: str, source: Buffer | FileSource, size: int, what: str) -> None:
        # Servers that ignore a condition on completing an upload would replace what is there.
        with contextlib.suppress(NotFound):
            await self._head(key)
            raise AlreadyExists(f"{self._name(key)} exists")
        upload = PartsUpload(self._request, self._where(key), what, self._room)
        try:
            sent = await upload.send(source, size)
            answer = await upload.complete(sent)
        except BaseException as error:
            task = asyncio.ensure_future(upload.abort())
            self._aborting.add(task)
            task.add_done_callback(self._aborted)
            if isinstance(error, Conflict):
                raise AlreadyExists(f"{self._name(key)} exists") from None
            raise
        await self._check_parts(key, sent, answer)

    async def _check_parts(self, key: str, sent: Sent, answer: dict[str, Any]) -> None:
        """Two creators that meet at a server without conditions here: the one that lost is told so."""
        head = await self._head(key)
        etag, checksum = answer.get("ETag", "").strip('"'), head.get("ChecksumSHA256")
        if (etag and head["ETag"].strip('"') != etag) or (checksum and checksum != sent.composite):
            raise AlreadyExists(f"{self._name(key)} was created by another writer at the same time")
        self._composites[sent.composite] = sent.sha256
        while len(self._composites) > KEPT_COMPOSITES:
            self._composites.popitem(last=False)

    def _aborted(self, task: asyncio.Task[None]) -> None:
        self._aborting.discard(task)
        if not task.cancelled():
            task.exception()  # parts that cannot be dropped now are the bucket's lifecycle rule's

    async def swap(self, key: str, expected: str | None, data: bytes) -> str:
        return await self._request(
            f"swapping {self._name(key)}", lambda client: self._swap(client, key, expected, bytes(data))
        )

    def _swap(self, client: Any, key: str, expected: str | None, data: bytes) -> str:
        if expected is None:
            try:
                return self._put(client, key, data, IfNoneMatch="*")
            except Conflict:
                self._check_not_above(client, key)
                raise
        # An empty or a wild If-Match would be no condition at all.
        if not _ETAG.match(expected):
            raise Conflict(f"{self._name(key)}: {expected!r} is no tag of it")
        try:
            tag = self._put(client, key, data, IfMatch=self._spelt(expected))
        except Conflict:
            if not self._wants_bare_tags(client, key, expected):
                raise
            return self._put(client, key, data, IfMatch=self._spelt(expected))
        self._bare_tags = bool(self._bare_tags)
        return tag

    def _check_not_above(self, client: Any, key: str) -> None:
        """BadKey where nothing is under ``key`` and something below: servers with directories refuse that."""
        try:
            client.head_object(**self._where(key))
        except Exception as error:
            if status_of(error) != 404:
                raise
            where = self._where(key + "/x")
            below = client.list_objects_v2(Bucket=where["Bucket"], Prefix=where["Key"][:-1], MaxKeys=1)
            if below.get("Contents"):
                raise BadKey(
                    f"{self._name(key)}: this server cannot hold it beside what is below it"
                ) from None

    def _spelt(self, tag: str) -> str:
        return tag.strip('"') if self._bare_tags else tag

    def _wants_bare_tags(self, client: Any, key: str, expected: str) -> bool:
        """Whether the conflict was about spelling: older Ceph compares If-Match with the ETag's bare text.

        Only proof counts, on an object of our own; an object that has the expected tag is what raises doubt.
        """
        if self._bare_tags is not None:
            return False
        try:
            if _tag(client.head_object(**self._where(key)), key) != expected:
                return False
        except Exception as error:
            if status_of(error) == 404:
                return False
            raise
        where = {
            "Bucket": self.location.bucket,
            "Key": f"{self.location.prefix}.stitch/{secrets.token_hex(16)}",
        }
        tag = _tag(client.put_object(**where, Body=b"probe"), "probe")
        works = {}
        try:
            for spelling in (tag, tag.strip('"')):
                try:
                    tag = _tag(client.put_object(**where, Body=spelling.encode(), IfMatch=spelling), "probe")
                    works[spelling] = True
                    break
                except Exception as error:
                    if status_of(error) != 412:
                        raise
        finally:
            client.delete_object(**where)
        self._bare_tags = not next(iter(works), '"').startswith('"')
        return self._bare_tags

    async def replace(self, key: str, data: bytes) -> None:
        await self._request(f"writing {self._name(key)}", lambda client: self._put(client, key, bytes(data)))

    async def delete(self, key: str) -> None:
        await self._request(
            f"deleting {self._name(key)}", lambda client: client.delete_object(**self._where(key))
        )

    def _put(self, client: Any, key: str, data: bytes, sha256: str | None = None, **condition: str) -> str:
        """One PUT; Conflict if its condition does not hold."""
        digest = bytes.fromhex(sha256.removeprefix("sha256:")) if sha256 else hashlib.sha256(data).digest()
        try:
            answer = client.put_object(**self._where(key), Body=data, ChecksumSHA256=b64(digest), **condition)
        except Exception as error:
            translated = self._translated(error, f"writing {self._name(key)}", condition=bool(condition))
            if translated is error:
                raise
            raise translated from error
        return _tag(answer, key)

    # ------------------------------------------------------------------------------------------- parts

    def _name(self, key: str) -> str:
        return f"{self.location}{check_key(key)}"

    def _where(self, key: str) -> dict[str, str]:
        return {"Bucket": self.location.bucket, "Key": self.location.prefix + check_key(key)}

    async def _request(self, what: str, call: Callable[[Any], Any]) -> Any:
        return await self._threads(self._blocking, what, call)

    def _blocking(self, what: str, call: Callable[[Any], Any]) -> Any:
        try:
            return call(self._connected())
        except Exception as error:
            translated = self._translated(error, what, condition=False)
            if translated is error:
                raise
            raise translated from error

    def _translated(self, error: Exception, what: str, *, condition: bool) -> Exception:
        if isinstance(error, StoreError):
            return error
        # 404: what AWS answers to If-Match where there is nothing.
        if status_of(error) == 412 or (
            condition and status_of(error) == 404 and code_of(error) != "NoSuchBucket"
        ):
            return Conflict(f"{what}: it is not as it was read")
        return translate(error, what) or error

    def _connected(self) -> Any:
        with self._connecting:
            if self._client is None:
                self._client = self._make_client()
            return self._client


def _tag(answer: dict[str, Any], key: str) -> str:
    etag = str(answer.get("ETag") or "").strip('"')
    if not etag:
        raise Unavailable(f"{key}: the server's answer has no ETag")
    return f'"{etag}"'


def open_url(url: str) -> S3Store:
    """``s3://bucket/prefix?endpoint=...&region=...&profile=...``; docs/s3.md has them all. Raises BadUrl."""
    location = parse_url(url)
    check_installed()
    return S3Store(location)
