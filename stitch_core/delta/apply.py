"""Applies any number of deltas to one tensor in one pass."""

from __future__ import annotations

from collections.abc import Iterable

from ..ports import Buffer
from ..safetensors import ByteArray, as_bytes
from . import overwrite, xor
from .wire import DeltaError

APPLY = {"xor": xor.apply, "overwrite": overwrite.apply}


def apply_deltas(old: Buffer, deltas: Iterable[tuple[str, Buffer]]) -> ByteArray:
    """The tensor's bytes after ``deltas``, each (encoding, zstd frame), in order. ``old`` stays as it is.

    Raises DeltaError for a payload that does not fit. Verifies nothing: the caller compares digests.
    """
    new = as_bytes(old).copy()
    for encoding, frame in deltas:
        if encoding not in APPLY:
            raise DeltaError(f"unknown delta encoding {encoding!r}: known are {', '.join(APPLY)}")
        APPLY[encoding](new, frame)
    return new
