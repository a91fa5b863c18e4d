"""The tables at the end of a sparse file: written from rows, and read back with all that must hold of them.

Names, sizes, digests and block offsets are binary columns, so that 60,000 tensors cost 2 MB and no JSON.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from ..ports import Files
from ..safetensors import ByteArray
from .sparse_block import MAX_BLOCK_BYTES, WIDTHS, inflate
from .sparse_layout import END_MAGIC, FOOT, HEAD, MAGIC, VERSION, Changed, order
from .wire import DeltaError

MAX_TABLE_BYTES = 256 << 20


BlockRow = tuple[int, int, int, int, int]
"""A block's columns: bytes that it covers, changes, stored bytes, width, xxh3-64 of the stored bytes."""


@dataclass(frozen=True)
class Tables:
    """Per tensor and per block, in order. ``starts`` and ``block_starts`` are bytes of the byte space, and
    ``offsets`` bytes of the file: each has one more, the end.

    ``old`` and ``new`` are all tensors' xxh3-128 in hex, one after the other. ``checks`` are xxh3-64.
    """

    names: list[str]
    starts: npt.NDArray[np.int64]
    old: str
    new: str
    block_starts: npt.NDArray[np.int64]
    changes: npt.NDArray[np.int64]
    widths: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    checks: npt.NDArray[np.uint64]


def encode_tables(tensors: Mapping[str, Changed], blocks: Sequence[BlockRow]) -> bytes:
    """The tables, not compressed, of tensors in ``order`` and of the blocks that cover them."""
    names = [name.encode() for name in tensors]
    rows = list(tensors.values())
    parts = [
        np.array([len(name) for name in names], "<u4").tobytes(),
        b"".join(names),
        np.array([row.nbytes for row in rows], "<u8").tobytes(),
        bytes.fromhex("".join(row.old for row in rows)),
        bytes.fromhex("".join(row.new for row in rows)),
    ]
    for column, dtype in enumerate(("<u4", "<u4", "<u4", "u1", "<u8")):
        parts.append(np.array([block[column] for block in blocks], dtype).tobytes())
    return b"".join(parts)


def read_tables(path: Path, files: Files) -> Tables:
    """Read and check all of a file but its blocks' bytes. DeltaError, which does not name the file."""
    size = files.size(path)
    if size < HEAD.size + FOOT.size:
        raise DeltaError(f"cut short at {size} bytes")
    if files.read(path, 0, HEAD.size) != HEAD.pack(MAGIC, VERSION, 0):
        raise DeltaError(f"not a sparse delta of format {VERSION}")
    foot = files.read(path, size - FOOT.size, FOOT.size)
    if len(foot) != FOOT.size:
        raise DeltaError("cut short while it was read")
    at, stored, raw, tensors, blocks, changes, check, magic = FOOT.unpack(foot)
    if magic != END_MAGIC:
        raise DeltaError(f"cut short, or damaged at its end: {size} bytes")
    if at + stored + FOOT.size != size or at < HEAD.size:
        raise DeltaError(f"{size} bytes, but its tables are said to lie at {at} to {at + stored}")
    if raw > MAX_TABLE_BYTES or raw < tensors * (4 + 8 + 32) + blocks * 21:
        raise DeltaError(f"tables of {raw} bytes for {tensors} tensors and {blocks} blocks")
    data = files.read(path, at, stored)
    if xxhash.xxh3_64_intdigest(data + foot[:48]) != check:
        raise DeltaError("its tables are damaged")
    return _parse_tables(inflate(data, raw), tensors, blocks, at, changes)


def _parse_tables(raw: ByteArray, tensors: int, blocks: int, data_end: int, changes: int) -> Tables:
    position = 0

    def take(count: int, dtype: str) -> npt.NDArray[Any]:
        nonlocal position
        length = count * np.dtype(dtype).itemsize
        if position + length > raw.size:
            raise DeltaError("its tables end early")
        position += length
        return np.frombuffer(raw.data, dtype, count, position - length)

    lengths = take(tensors, "<u4").astype(np.int64)
    text = take(int(lengths.sum()), "u1").tobytes()
    sizes = take(tensors, "<u8")
    old, new = (take(16 * tensors, "u1").tobytes().hex() for _ in range(2))
    covered, counts, stored = (take(blocks, "<u4").astype(np.int64) for _ in range(3))
    widths, checks = take(blocks, "u1").astype(np.int64), take(blocks, "<u8")
    if position != raw.size:
        raise DeltaError(f"its tables have {raw.size} bytes, {position} were expected")
    if tensors and (not sizes.all() or int(sizes.max()) >= 1 << 62 or float(sizes.sum(dtype=float)) >= 2**62):
        raise DeltaError("a tensor without bytes, or with too many")
    starts, block_starts, offsets = _sums(sizes.astype(np.int64)), _sums(covered), _sums(stored, HEAD.size)
    if blocks and (int(covered.max()) > MAX_BLOCK_BYTES or not covered.all()):
        raise DeltaError(f"a block that covers nothing, or more than {MAX_BLOCK_BYTES} bytes")
    if block_starts[-1] != starts[-1] or offsets[-1] != data_end:
        raise DeltaError("its blocks do not cover its tensors, or not its bytes")
    if not np.isin(widths, WIDTHS).all() or (covered % widths).any() or (counts > covered // widths).any():
        raise DeltaError("a block's width or count does not fit the bytes that it covers")
    if int(counts.sum()) != changes:
        raise DeltaError(f"its blocks change {int(counts.sum())} elements, its footer says {changes}")
    names = _names(text, _sums(lengths))
    _check_order(names, starts, block_starts, widths)
    return Tables(names, starts, old, new, block_starts, counts, widths, offsets, checks)


def _names(text: bytes, ends: npt.NDArray[np.int64]) -> list[str]:
    bounds = ends.tolist()
    try:
        return [text[a:b].decode() for a, b in itertools.pairwise(bounds)]
    except UnicodeDecodeError as error:
        raise DeltaError(f"a tensor's name is not UTF-8 ({error})") from None


def _check_order(
    names: list[str],
    starts: npt.NDArray[np.int64],
    block_starts: npt.NDArray[np.int64],
    widths: npt.NDArray[np.int64],
) -> None:
    """Each tensor lies in blocks of one width, on whole elements, and all are in ``order``."""
    if not names:
        return
    first = np.searchsorted(block_starts, starts[:-1], "right") - 1
    last = np.searchsorted(block_starts, starts[1:], "left") - 1
    own = widths[first]
    # In order, widths only go down: equal at both ends means equal in between.
    if (np.diff(widths) > 0).any() or (widths[last] != own).any():
        raise DeltaError("blocks are not in the order of their widths, or a tensor lies in two widths")
    if ((starts[:-1] - block_starts[first]) % own).any() or (np.diff(starts) % own).any():
        raise DeltaError("a tensor does not start on an element of its block")
    sizes, ranks = np.diff(starts).tolist(), own.tolist()
    keys = [order(*row) for row in zip(names, sizes, ranks, strict=True)]
    for i, (before, after) in enumerate(itertools.pairwise(keys)):
        if before >= after:
            raise DeltaError(f"tensor {names[i + 1]} is there twice, or not in its place")


def _sums(lengths: npt.NDArray[np.int64], first: int = 0) -> npt.NDArray[np.int64]:
    ends = np.empty(lengths.size + 1, np.int64)
    ends[0] = first
    np.cumsum(lengths, out=ends[1:])
    ends[1:] += first
    return ends
