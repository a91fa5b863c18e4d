"""Applies the deltas of a plan to one tensor in place, whatever their encodings, and says what came out."""

from __future__ import annotations

from collections.abc import Sequence

from ..safetensors import ByteArray
from ..state import tensor_digest
from . import overwrite, xor
from .directory import DeltaDirectory
from .sparse_apply import apply_sparse


def apply_in_place(data: ByteArray, name: str, deltas: Sequence[DeltaDirectory]) -> str:
    """Apply what ``deltas`` do to tensor ``name``, in order; the xxh3-128 of ``data`` then, in hex.

    ``data`` is writable, in memory or a view of a file; nothing of its size is allocated. XOR deltas commute:
    a run of sparse ones takes one pass over ``data``. Raises DeltaError, and then ``data`` may be partly
    changed: a caller that needs the old bytes keeps them.
    """
    digest: str | None = None
    i = 0
    while i < len(deltas):
        if deltas[i].index.encoding == "overwrite":
            overwrite.apply(data, deltas[i].read(name))
            digest, i = None, i + 1
            continue
        start = i
        while i < len(deltas) and deltas[i].index.encoding != "overwrite":
            i += 1
        run = deltas[start:i]
        sparse = [delta.sparse[name] for delta in run if name in delta.sparse]
        whole = [delta for delta in run if name not in delta.sparse]
        for delta in whole if sparse else whole[:-1]:
            xor.apply(data, delta.read(name))
        digest = apply_sparse(data, name, sparse) if sparse else xor.apply_hashed(data, whole[-1].read(name))
    return digest or tensor_digest(data.data)
