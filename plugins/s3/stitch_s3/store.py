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
import functools
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from stitch_core.ports import (
    AlreadyExists,
    Blob,
    Buffer,
    Capabilities,
    Conflict,
    Entry,
    FileSource,
    Stamp,
    Unavailable,
)
from stitch_core.stores.keys import check_key, check_prefix, check_range
from stitch_core.stores.room import TRANSFER_BYTES, Room
from stitch_core.stores.sources import source_size
from stitch_core.threads import Threads

from .client import check_installed, connect
from .errors import translated
from .multipart import PART, PartsUpload, Sent
from .reading import Reader, stamp_in
from .url import Location, parse_url
from .writing import Writer

PARALLEL = 16
"""Requests at a time."""

KEPT_COMPOSITES = 4096
CLOSE_SECONDS = 10.0


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
        self._reader = Reader(location, page)
        self._writer = Writer(location, self._reader)
        self._single = single
        self._room = Room(TRANSFER_BYTES)
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
        what = f"reading {self.location.name(key)}"
        return await self._request(what, lambda client: self._reader.load(client, key))

    async def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        check_range(start, length)
        what = f"reading {self.location.name(key)}"
        return await self._request(what, lambda client: self._reader.read(client, key, start, length))

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
        what = f"listing {self.location}{prefix}"
        return await self._request(what, lambda client: self._reader.list(client, prefix))

    async def folders(self, prefix: str) -> builtins.list[str]:
        """As BrowsableStore.folders: a request for every thousand of them, whatever is in them."""
        check_prefix(prefix)
        what = f"listing {self.location}{prefix}"
        return await self._request(what, lambda client: self._reader.folders(client, prefix))

    async def stamp(self, key: str) -> Stamp:
        """As BrowsableStore.stamp, in whole seconds: the server dates its answer too.

        Unavailable for an answer without both dates, which is one that was cut: taken as it is, ages would be
        by this host's clock, or not known.
        """
        stamp = stamp_in(await self._head(key))
        if stamp is None or stamp.now is None:
            raise Unavailable(f"{self.location.name(key)}: the answer lacks Last-Modified or Date")
        return stamp

    async def _head(self, key: str) -> dict[str, Any]:
        what = f"looking at {self.location.name(key)}"
        return await self._request(what, lambda client: self._reader.head(client, key))

    # ----------------------------------------------------------------------------------------- writing

    async def create(self, key: str, source: Buffer | FileSource) -> None:
        check_key(key)
        size = source_size(source)
        what = f"writing {self.location.name(key)}"
        if size > self._single:
            await self._create_in_parts(key, source, size, what)
            return
        async with self._room.lent(size):
            await self._request(what, lambda client: self._writer.create(client, key, source))
        if isinstance(source, FileSource) and source.progress is not None:
            source.progress(size)

    async def _create_in_parts(self, key: str, source: Buffer | FileSource, size: int, what: str) -> None:
        # Servers that ignore a condition on completing an upload would replace what is there.
        if await self._request(what, lambda client: self._reader.exists(client, key)):
            raise AlreadyExists(f"{self.location.name(key)} exists")
        upload = PartsUpload(self._request, self.location.where(key), what, self._room)
        try:
            sent = await upload.send(source, size)
            answer = await upload.complete(sent)
        except BaseException as error:
            task = asyncio.ensure_future(upload.abort())
            self._aborting.add(task)
            task.add_done_callback(self._aborted)
            if isinstance(error, Conflict):
                raise AlreadyExists(f"{self.location.name(key)} exists") from None
            raise
        await self._check_parts(key, sent, answer)

    async def _check_parts(self, key: str, sent: Sent, answer: dict[str, Any]) -> None:
        """Two creators that meet at a server without conditions here: the one that lost is told so."""
        head = await self._head(key)
        etag, checksum = answer.get("ETag", "").strip('"'), head.get("ChecksumSHA256")
        if (etag and head["ETag"].strip('"') != etag) or (checksum and checksum != sent.composite):
            raise AlreadyExists(f"{self.location.name(key)} was created by another writer at the same time")
        self._composites[sent.composite] = sent.sha256
        while len(self._composites) > KEPT_COMPOSITES:
            self._composites.popitem(last=False)

    def _aborted(self, task: asyncio.Task[None]) -> None:
        self._aborting.discard(task)
        if not task.cancelled():
            task.exception()  # parts that cannot be dropped now are the bucket's lifecycle rule's

    async def swap(self, key: str, expected: str | None, data: bytes) -> str:
        what = f"swapping {self.location.name(key)}"
        return await self._request(what, lambda client: self._writer.swap(client, key, expected, bytes(data)))

    async def replace(self, key: str, data: bytes) -> None:
        what = f"writing {self.location.name(key)}"
        await self._request(what, lambda client: self._writer.put(client, key, bytes(data)))

    async def delete(self, key: str) -> None:
        what = f"deleting {self.location.name(key)}"
        await self._request(what, lambda client: client.delete_object(**self.location.where(key)))

    # ---------------------------------------------------------------------------------------- requests

    async def _request(self, what: str, call: Callable[[Any], Any]) -> Any:
        return await self._threads(self._blocking, what, call)

    def _blocking(self, what: str, call: Callable[[Any], Any]) -> Any:
        try:
            return call(self._connected())
        except Exception as error:
            told = translated(error, what)
            if told is error:
                raise
            raise told from error

    def _connected(self) -> Any:
        with self._connecting:
            if self._client is None:
                self._client = self._make_client()
            return self._client


def open_url(url: str) -> S3Store:
    """``s3://bucket/prefix?endpoint=...&region=...&profile=...``; docs/s3.md has them all. Raises BadUrl."""
    location = parse_url(url)
    check_installed()
    return S3Store(location)
