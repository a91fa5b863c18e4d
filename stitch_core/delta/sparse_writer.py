"""Writes a sparse file, block by block; it gets its name when it is whole and durable."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

import xxhash

from ..ports import Files
from .sparse_layout import END_MAGIC, FOOT, HEAD, MAGIC, VERSION, Block, Changed
from .sparse_tables import MAX_TABLE_BYTES, BlockRow, encode_tables
from .wire import DeltaError, compress


class SparseWriter:
    """Writes one file. ``add_block`` in the order of the byte space, then ``finish``, or ``discard``.

    ``size`` is how many bytes it has so far.
    """

    def __init__(self, path: Path, files: Files) -> None:
        self.path, self._files = path, files
        self._temporary = path.with_name(f".{path.name}.tmp")
        if files.exists(self._temporary):
            files.remove(self._temporary)
        files.write_new(self._temporary, HEAD.pack(MAGIC, VERSION, 0))
        self._blocks: list[BlockRow] = []
        self.size = HEAD.size
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0

    def add_block(self, block: Block) -> None:
        self._blocks.append(
            (block.nbytes, block.changes, len(block.data), block.width, xxhash.xxh3_64_intdigest(block.data))
        )
        self._waiting.append(block.data)
        self._waiting_bytes += len(block.data)
        self.size += len(block.data)
        if self._waiting_bytes > 4 << 20:
            self._flush()

    def finish(self, tensors: Mapping[str, Changed]) -> None:
        """Write the tables for ``tensors``, which are in ``order``; the caller syncs the directory.

        DeltaError for so many tensors that a reader would refuse the tables.
        """
        self._flush()
        raw = encode_tables(tensors, self._blocks)
        if len(raw) > MAX_TABLE_BYTES:
            raise DeltaError(f"{self.path}: tables of {len(raw)} bytes: write more files")
        stored = compress(raw)
        changes = sum(block[1] for block in self._blocks)
        foot = (self.size, len(stored), len(raw), len(tensors), len(self._blocks), changes)
        check = xxhash.xxh3_64_intdigest(stored + struct.pack("<6Q", *foot))
        self._files.write_at(self._temporary, self.size, stored + FOOT.pack(*foot, check, END_MAGIC))
        self._files.sync(self._temporary)
        self._files.rename(self._temporary, self.path)
        self.size += len(stored) + FOOT.size

    def discard(self) -> None:
        """Remove what was written."""
        if self._files.exists(self._temporary):
            self._files.remove(self._temporary)

    def _flush(self) -> None:
        if self._waiting:
            at = self.size - self._waiting_bytes
            self._files.write_at(self._temporary, at, b"".join(self._waiting))
        self._waiting, self._waiting_bytes = [], 0
