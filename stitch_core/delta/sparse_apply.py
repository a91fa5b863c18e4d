"""Applies any number of sparse deltas to a tensor in place, in one pass over its bytes, and hashes it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import xxhash

from ..safetensors import ByteArray
from ..state import tensor_digest
from .sparse_block import WIDTHS, Values
from .sparse_file import SparseFile
from .wire import DeltaError

CHUNK_BYTES = 4 << 20
_DTYPES = {width: np.dtype(f"<u{width}") for width in WIDTHS}


def apply_sparse(data: ByteArray, name: str, deltas: Sequence[SparseFile]) -> str:
    """XOR the changes of tensor ``name`` in ``deltas`` into ``data``; the xxh3-128 that results, in hex.

    ``data`` may be a view of a file. Deltas commute, so each part of it is visited once, with all of them.
    Raises DeltaError, and then ``data`` may be partly changed.
    """
    under_way = []
    for delta in deltas:
        row = delta.tensors[name]
        if row.nbytes != data.size:
            raise DeltaError(f"{delta.path}: tensor {name} has {row.nbytes} bytes there, {data.size} here")
        under_way.append(_apply(data.view(_DTYPES[row.width]), delta, name))
    if data.size <= CHUNK_BYTES:
        for steps in under_way:
            for _ in steps:
                pass
        return tensor_digest(data.data)
    hasher = xxhash.xxh3_128()
    done = [0] * len(under_way)
    for start in range(0, data.size, CHUNK_BYTES):
        end = min(start + CHUNK_BYTES, data.size)
        for i, steps in enumerate(under_way):
            while done[i] < end:
                done[i] = next(steps)
        hasher.update(data[start:end].data)
    return hasher.hexdigest()


def _apply(words: Values, delta: SparseFile, name: str) -> Iterator[int]:
    """Applies one piece at each step; how many bytes are done then."""
    for _, end, positions, values in delta.pieces(name):
        if positions.size:
            changed = words.take(positions)
            changed ^= values
            words[positions] = changed
        yield end
