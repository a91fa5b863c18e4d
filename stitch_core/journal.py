"""A redo journal: absolute values that are about to be written into files.

One record at a time. It is durable before the files it names are touched, and those are durable before the
next record replaces it; so after a crash at any point, writing the record again (any number of times) leaves
each of its ranges whole. A range is either all of its bytes, or the elements of it that change with their
new values: what a crash leaves of the others is right in either state.

Format: ``STJRNL2\\n``, u64 LE offset and u64 LE length of a JSON object, 16 bytes xxh3-128 of all from byte
40 to its end; the ranges' bodies from byte 40 on, one after another; the object {"tag", "note", "ranges":
[[file, offset, bytes, width, changes, stored bytes], ...]}. With width 0 a body is the range's bytes, else a
block as in a sparse file (docs/format.md), with new values in place of XOR values.
"""

from __future__ import annotations

import functools
import json
import struct
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from .delta.scan import scan
from .delta.sparse_block import decode_block, encode_block
from .delta.stream import PART_BYTES
from .parallel import in_order
from .ports import Buffer, Files
from .safetensors import ByteArray

MAGIC = b"STJRNL2\n"
COPY_BYTES = 16 << 20
"""Read and written at a time when a record is carried out."""

SPOOL_BYTES = 4 << 20
"""Of a record that is being made, in memory until they are written."""

_HEAD = struct.Struct("<8sQQ16s")  # magic, where the object is, its length, xxh3-128
_DENSE = 4
"""With more than one changed element in so many, all bytes take no more room than the changes."""

_PROBE = 1 << 14
"""Bytes at the start of a range that say whether most of it changes."""

_NOTHING = np.empty(0, np.uint8)
_local = threading.local()


@dataclass(frozen=True)
class Write:
    """Bytes for a range of ``file``, a name in the directory that the journal is for.

    With a ``width``, ``data`` is the block of the ``changes`` elements that change among ``nbytes`` bytes.
    """

    file: str
    offset: int
    data: Buffer
    width: int = 0
    nbytes: int = 0
    changes: int = 0

    @classmethod
    def difference(cls, file: str, offset: int, old: ByteArray, new: ByteArray, width: int) -> Write | None:
        """What turns ``old`` at ``offset`` into ``new``; None if they are equal."""
        most = new.size // width // _DENSE
        # Positions take many times the bytes where most change: there they are counted first.
        looks_dense = np.count_nonzero(old[:_PROBE] != new[:_PROBE]) > min(_PROBE, new.size) // (2 * _DENSE)
        if looks_dense and np.count_nonzero(old.view(f"<u{width}") != new.view(f"<u{width}")) > most:
            return cls(file, offset, new.tobytes())
        positions, _ = scan(old, new, width)
        if positions.size == 0:
            return None
        if positions.size > most:
            return cls(file, offset, new.tobytes())
        values = new.view(f"<u{width}").take(positions)
        return cls(file, offset, encode_block(positions, values), width, new.size, positions.size)


@dataclass(frozen=True)
class _Range:
    file: str
    offset: int
    nbytes: int
    width: int
    changes: int
    at: int
    stored: int


class _Sealed(NamedTuple):
    ranges: list[_Range]
    note: dict[str, Any]


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

    def record(self, tag: str) -> Record:
        """A new record, in the place of the last one, which must have been carried out."""
        return Record(self._path, self._files, tag)

    def redo(self, tag: str, directory: Path, *, workers: int = 1) -> dict[str, Any] | None:
        """Do the record of ``tag`` and make it durable; its note, None if there is no such record.

        Raises OSError if a file is lost, ValueError if one ends before what is to be written into it.
        """
        record = self._read(tag)
        if record is None:
            return None
        ranges = record.ranges
        for _ in in_order((functools.partial(self._write, directory, one) for one in ranges), workers):
            pass
        for file in sorted({one.file for one in ranges}):
            self._files.sync(directory / file)
        return record.note

    def _write(self, directory: Path, one: _Range) -> None:
        path = directory / one.file
        if one.width == 0:
            for done in range(0, one.stored, COPY_BYTES):
                data = self._files.read(self._path, one.at + done, min(COPY_BYTES, one.stored - done))
                self._files.write_at(path, one.offset + done, data)
            return
        block = self._files.read(self._path, one.at, one.stored)
        positions, values = decode_block(block, one.width, one.changes, one.nbytes // one.width)
        first = int(positions[0]) * one.width
        length = (int(positions[-1]) + 1) * one.width - first
        if first + length > one.nbytes:
            raise ValueError(f"{self._path}: a block reaches beyond its range")
        if getattr(_local, "there", _NOTHING).size < length:
            _local.there = np.empty(max(length, PART_BYTES), np.uint8)
        there = _local.there[:length]
        count = self._files.read_into(path, one.offset + first, there.data)
        if count != length:
            raise ValueError(f"{path} ends at {one.offset + first + count}, before what changes in it")
        positions -= int(positions[0])
        there.view(values.dtype)[positions] = values
        self._files.write_at(path, one.offset + first, there.data)

    def _read(self, tag: str) -> _Sealed | None:
        """The valid record."""
        size = self.size()
        head = self._files.read(self._path, 0, _HEAD.size) if size >= _HEAD.size else b""
        if head[:8] != MAGIC or len(head) < _HEAD.size:
            return None
        _, end, length, expected = _HEAD.unpack(head)
        if end < _HEAD.size or end + length > size:
            return None
        digest = xxhash.xxh3_128()
        for done in range(_HEAD.size, end + length, COPY_BYTES):
            digest.update(self._files.read(self._path, done, min(COPY_BYTES, end + length - done)))
        if digest.digest() != expected:
            return None
        record = json.loads(self._files.read(self._path, end, length))
        if record["tag"] != tag:
            return None
        ranges, at = [], _HEAD.size
        for file, offset, nbytes, width, changes, stored in record["ranges"]:
            ranges.append(_Range(file, offset, nbytes, width, changes, at, stored))
            at += stored
        return _Sealed(ranges, record.get("note", {}))


class Record:
    """A record that is being made; none, for whoever reads the journal, until it is sealed."""

    def __init__(self, path: Path, files: Files, tag: str) -> None:
        self._spooled = 0
        self._path, self._files, self._tag = path, files, tag
        self._ranges: list[list[object]] = []
        self._digest = xxhash.xxh3_128()
        self._waiting: list[Buffer] = []
        self._waiting_bytes = 0

    @property
    def size(self) -> int:
        """Bytes of what was added."""
        return self._spooled + self._waiting_bytes

    def add(self, writes: Iterable[Write]) -> None:
        """Their ranges must overlap neither each other nor what was added before, and extend no file."""
        for write in writes:
            data = memoryview(write.data)
            count = write.nbytes if write.width else len(data)
            self._ranges.append([write.file, write.offset, count, write.width, write.changes, len(data)])
            self._digest.update(data)
            self._waiting.append(data)
            self._waiting_bytes += len(data)
            if self._waiting_bytes >= SPOOL_BYTES:
                self._spool()

    def _spool(self) -> None:
        data = b"".join(self._waiting)
        at = _HEAD.size + self._spooled
        if at == _HEAD.size:
            data = bytes(_HEAD.size) + data
            at = 0
        self._files.write_at(self._path, at, data)
        self._spooled += self._waiting_bytes
        self._waiting, self._waiting_bytes = [], 0

    def seal(self, note: Mapping[str, Any] | None = None) -> None:
        """Durable from here on, with a ``note`` for whoever carries it out: a JSON object."""
        text = json.dumps({"tag": self._tag, "note": note or {}, "ranges": self._ranges}).encode()
        end = self.size + _HEAD.size
        self._digest.update(text)
        self._waiting.append(text)
        self._waiting_bytes += len(text)
        self._spool()
        self._files.write_at(self._path, 0, _HEAD.pack(MAGIC, end, len(text), self._digest.digest()))
        self._files.sync(self._path)
