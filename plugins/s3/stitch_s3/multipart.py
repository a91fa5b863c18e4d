"""Uploads in parts: parallel, in bounded memory, visible only when complete, aborted when they fail.

What a process that dies leaves of an upload is invisible but stored; a lifecycle rule of the bucket
(AbortIncompleteMultipartUpload) removes it.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from stitch_core.ports import Buffer, FileSource, StoreError, Unavailable
from stitch_core.retry import Retry, retrying
from stitch_core.stores.room import Room
from stitch_core.stores.sources import plain_bytes, source_chunks

PART = 16 * 2**20
"""Bytes of a part, and of the largest object that is sent in one request."""

MAX_PARTS = 10_000
"""https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html"""

_PART_RETRY = Retry(attempts=5)


class Request(Protocol):
    """Runs ``call(client)`` in a thread of the store's, with its errors as the store's."""

    async def __call__(self, what: str, call: Callable[[Any], Any], /) -> Any: ...


def part_size(size: int) -> int:
    """Bytes of each part but the last, a multiple of 1 MiB."""
    least = -(-size // MAX_PARTS)
    return max(PART, -(-least // 2**20) * 2**20)


def b64(digest: bytes) -> str:
    return base64.b64encode(digest).decode()


@dataclass
class Sent:
    """Parts that the server has. ``composite``: how S3 names their digests' digest; ``sha256`` of it all."""

    parts: list[dict[str, Any]]
    composite: str
    sha256: str


@dataclass
class PartsUpload:
    """One upload. ``where`` names bucket and key; ``what`` says it for errors."""

    request: Request
    where: dict[str, str]
    what: str
    room: Room
    rng: random.Random = field(default_factory=random.Random)

    def __post_init__(self) -> None:
        self._id = ""
        self._sending: list[asyncio.Task[tuple[dict[str, Any], bytes]]] = []
        self._stopped = False

    async def send(self, source: Buffer | FileSource, size: int) -> Sent:
        """All parts, read in order and sent side by side; memory is what the room lends."""
        start = await self.request(
            self.what, lambda client: client.create_multipart_upload(**self.where, ChecksumAlgorithm="SHA256")
        )
        self._id = start["UploadId"]
        part = part_size(size)
        chunks, whole = source_chunks(source, part), hashlib.sha256()

        def following(_: Any) -> memoryview | None:
            data = next(chunks, None)
            if data is not None:
                whole.update(data)
            return data

        while not any(task.done() and task.exception() for task in self._sending):
            held = await self.room.acquire(part)
            try:
                data = await self.request(self.what, following)
            except BaseException:
                self.room.release(held)
                raise
            if data is None:
                self.room.release(held)
                break
            self._sending.append(asyncio.ensure_future(self._send_part(data, held, source)))
        sent = await asyncio.gather(*self._sending)
        digest = "sha256:" + whole.hexdigest()
        if isinstance(source, FileSource) and source.sha256 not in (None, digest):
            raise StoreError(f"{source.path} is not what was announced: it changed since it was hashed")
        composite = b64(hashlib.sha256(b"".join(found for _, found in sent)).digest())
        return Sent([part for part, _ in sent], f"{composite}-{len(sent)}", digest)

    async def _send_part(
        self, data: memoryview, held: int, source: Buffer | FileSource
    ) -> tuple[dict[str, Any], bytes]:
        number = len(self._sending) + 1

        def put(client: Any) -> tuple[dict[str, Any], bytes]:
            if self._stopped:
                raise StoreError(f"{self.what}: given up")
            digest = hashlib.sha256(data).digest()
            checksum = b64(digest)
            answer = client.upload_part(
                **self.where,
                UploadId=self._id,
                PartNumber=number,
                Body=plain_bytes(data),
                ChecksumSHA256=checksum,
            )
            return {"ETag": answer["ETag"], "PartNumber": number, "ChecksumSHA256": checksum}, digest

        try:
            result: tuple[dict[str, Any], bytes] = await retrying(
                lambda: self.request(f"{self.what}, part {number}", put), _PART_RETRY, self.rng
            )
        finally:
            self.room.release(held)
        if isinstance(source, FileSource) and source.progress is not None:
            source.progress(len(data))
        return result

    async def complete(self, sent: Sent) -> Any:
        """Make it an object unless there is one; the server's answer. Tried once: see ``abort``."""
        return await self.request(self.what, lambda client: client.complete_multipart_upload(
            **self.where, UploadId=self._id, MultipartUpload={"Parts": sent.parts}, IfNoneMatch="*",
        ))  # fmt: skip

    async def abort(self) -> None:
        """Drop the parts, once none is on its way; after an unclear ``complete`` it cannot land any more."""
        self._stopped = True
        if not self._id:
            return
        await asyncio.gather(*self._sending, return_exceptions=True)

        def drop(client: Any) -> None:
            client.abort_multipart_upload(**self.where, UploadId=self._id)

        try:
            await retrying(lambda: self.request(self.what, drop), Retry(attempts=3), self.rng)
        except StoreError as error:
            if not isinstance(error, Unavailable):
                return  # gone already
            raise
