"""A redo journal: absolute bytes that are about to be written into files.

One record at a time. It is durable before the files it names are touched, and those are durable before the
next record replaces it; so after a crash at any point, writing the record again (any number of times) leaves
each of its ranges whole.

Format: ``STJRNL1\\n``, u64 LE length of a JSON object, 16 bytes xxh3-128 of object and body, the object
{"tag", "ranges": [[file, offset, bytes], ...]}, the body: the ranges' bytes one after another.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from .ports import Buffer, Files

MAGIC = b"STJRNL1\n"
COPY_BYTES = 16 << 20
_HEAD = struct.Struct("<8sQ16s")


@dataclass(frozen=True)
class Write:
    """Bytes for a range of ``file``, a name in the directory that the journal is for."""

    file: str
    offset: int
    data: Buffer


class Journal:
    """The journal at ``path``. A record that is torn, or of another ``tag``, counts as none."""

    def __init__(self, path: Path, files: Files) -> None:
        self._path = path
        self._files = files

    def create(self) -> None:
        """Make the file, if there is none; the caller syncs its directory before the first record."""
        if not self._files.exists(self._path):
            self._files.write_new(self._path, b"")

    def size(self) -> int:
        """Bytes that the file takes now."""
        return self._files.size(self._path) if self._files.exists(self._path) else 0

    def carry_out(self, tag: str, directory: Path, writes: Sequence[Write]) -> None:
        """Record ``writes``, do them, and make them durable. They extend no file."""
        self._record(tag, writes)
        for write in writes:
            self._files.write_at(directory / write.file, write.offset, write.data)
        for file in sorted({write.file for write in writes}):
            self._files.sync(directory / file)

    def redo(self, tag: str, directory: Path) -> bool:
        """Do the record of ``tag`` again; False if there is none. Raises OSError if a file of it is lost."""
        ranges = self._ranges(tag)
        if ranges is None:
            return False
        for file, offset, at, length in ranges:
            for done in range(0, length, COPY_BYTES):
                data = self._files.read(self._path, at + done, min(COPY_BYTES, length - done))
                self._files.write_at(directory / file, offset + done, data)
        for file in sorted({file for file, *_ in ranges}):
            self._files.sync(directory / file)
        return True

    def _record(self, tag: str, writes: Sequence[Write]) -> None:
        ranges = [[write.file, write.offset, len(write.data)] for write in writes]
        text = json.dumps({"tag": tag, "ranges": ranges}).encode()
        digest = xxhash.xxh3_128(text)
        for write in writes:
            digest.update(write.data)
        head = _HEAD.pack(MAGIC, len(text), digest.digest())
        self._files.write_at(self._path, 0, head + text)
        at = len(head) + len(text)
        for write in writes:
            self._files.write_at(self._path, at, write.data)
            at += len(write.data)
        self._files.sync(self._path)

    def _ranges(self, tag: str) -> list[tuple[str, int, int, int]] | None:
        """The valid record's (file, offset there, position here, bytes)."""
        size = self.size()
        head = self._files.read(self._path, 0, _HEAD.size) if size >= _HEAD.size else b""
        if head[:8] != MAGIC or len(head) < _HEAD.size:
            return None
        _, length, expected = _HEAD.unpack(head)
        if length > size - _HEAD.size:
            return None
        text = self._files.read(self._path, _HEAD.size, length)
        digest = xxhash.xxh3_128(text)
        try:
            record = json.loads(text)
            at, ranges = _HEAD.size + length, []
            for file, offset, count in record["ranges"]:
                ranges.append((str(file), int(offset), at, int(count)))
                at += count
        except (ValueError, KeyError, TypeError):
            return None
        if record.get("tag") != tag or at > size:
            return None
        for done in range(_HEAD.size + length, at, COPY_BYTES):
            digest.update(self._files.read(self._path, done, min(COPY_BYTES, at - done)))
        return ranges if digest.digest() == expected else None
