"""Writing an object in one request, under a condition. All of it is blocking; ``client`` is boto3's.

Each request is made once: a repeated conditional write would be told that it failed although the first had
landed.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from typing import Any

from stitch_core.ports import AlreadyExists, Buffer, Conflict, FileSource, StoreError
from stitch_core.stores.keys import BadKey
from stitch_core.stores.sources import plain_bytes, source_chunks, source_size

from .errors import Damaged, status_of, translated
from .multipart import b64
from .reading import Reader, tag_of
from .url import Location

_ETAG = re.compile(r'"[^"*\s]+"\Z')


class Writer:
    """Raises Conflict, AlreadyExists, BadKey, Damaged, and what boto3 does."""

    def __init__(self, location: Location, reader: Reader) -> None:
        self._location, self._reader = location, reader
        self._bare_tags: bool | None = None  # whether If-Match wants ETags without quotes; None: not known

    def create(self, client: Any, key: str, source: Buffer | FileSource) -> None:
        chunks = list(source_chunks(source, max(1, source_size(source))))
        data = plain_bytes(chunks[0]) if chunks else b""
        announced = source.sha256 if isinstance(source, FileSource) else None
        name = self._location.name(key)
        try:
            self.put(client, key, data, announced, IfNoneMatch="*")
        except Conflict:
            self._check_not_above(client, key)
            raise AlreadyExists(f"{name} exists") from None
        except Damaged:
            if announced is not None and "sha256:" + hashlib.sha256(data).hexdigest() != announced:
                raise StoreError(
                    f"{name}: the file is not what was announced: it changed since it was hashed"
                ) from None
            raise

    def put(self, client: Any, key: str, data: bytes, sha256: str | None = None, **condition: str) -> str:
        """One PUT, with its SHA-256; the object's tag. Conflict if the condition does not hold."""
        digest = bytes.fromhex(sha256.removeprefix("sha256:")) if sha256 else hashlib.sha256(data).digest()
        try:
            answer = client.put_object(
                **self._location.where(key), Body=data, ChecksumSHA256=b64(digest), **condition
            )
        except Exception as error:
            told = translated(error, f"writing {self._location.name(key)}", condition=bool(condition))
            if told is error:
                raise
            raise told from error
        return tag_of(answer, key)

    def swap(self, client: Any, key: str, expected: str | None, data: bytes) -> str:
        if expected is None:
            try:
                return self.put(client, key, data, IfNoneMatch="*")
            except Conflict:
                self._check_not_above(client, key)
                raise
        # An empty or a wild If-Match would be no condition at all.
        if not _ETAG.match(expected):
            raise Conflict(f"{self._location.name(key)}: {expected!r} is no tag of it")
        try:
            tag = self.put(client, key, data, IfMatch=self._spelt(expected))
        except Conflict:
            if not self._wants_bare_tags(client, key, expected):
                raise
            return self.put(client, key, data, IfMatch=self._spelt(expected))
        self._bare_tags = bool(self._bare_tags)
        return tag

    def _check_not_above(self, client: Any, key: str) -> None:
        """BadKey where nothing is under ``key`` and something below: servers with directories refuse that."""
        if self._reader.exists(client, key):
            return
        where = self._location.where(key + "/x")
        below = client.list_objects_v2(Bucket=where["Bucket"], Prefix=where["Key"][:-1], MaxKeys=1)
        if below.get("Contents"):
            name = self._location.name(key)
            raise BadKey(f"{name}: this server cannot hold it beside what is below it")

    def _spelt(self, tag: str) -> str:
        return tag.strip('"') if self._bare_tags else tag

    def _wants_bare_tags(self, client: Any, key: str, expected: str) -> bool:
        """Whether the conflict was about spelling: older Ceph compares If-Match with the ETag's bare text.

        Only proof counts, on an object of our own; an object that has the expected tag is what raises doubt.
        """
        if self._bare_tags is not None:
            return False
        try:
            if tag_of(client.head_object(**self._location.where(key)), key) != expected:
                return False
        except Exception as error:
            if status_of(error) == 404:
                return False
            raise
        where = {
            "Bucket": self._location.bucket,
            "Key": f"{self._location.prefix}.stitch/{secrets.token_hex(16)}",
        }
        tag = tag_of(client.put_object(**where, Body=b"probe"), "probe")
        works = {}
        try:
            for spelling in (tag, tag.strip('"')):
                try:
                    tag = tag_of(
                        client.put_object(**where, Body=spelling.encode(), IfMatch=spelling), "probe"
                    )
                    works[spelling] = True
                    break
                except Exception as error:
                    if status_of(error) != 412:
                        raise
        finally:
            client.delete_object(**where)
        self._bare_tags = not next(iter(works), '"').startswith('"')
        return self._bare_tags
