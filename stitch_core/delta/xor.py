"""The ``xor`` encoding: new XOR old over a tensor's bytes, whatever its dtype.

An involution: applied twice it undoes itself. So whoever applies it must know that it has not been.
"""

from __future__ import annotations

import numpy as np
import xxhash

from ..ports import Buffer
from ..safetensors import ByteArray, as_bytes
from . import wire


def encode(old: Buffer, new: Buffer) -> bytes:
    """The frame that turns ``old`` into ``new``, of equal length."""
    return wire.compress(np.bitwise_xor(as_bytes(old), as_bytes(new)).data)


def apply_hashed(data: ByteArray, frame: Buffer) -> str:
    """As ``apply``; the xxh3-128 of the new bytes, in hex, taken while each chunk is in the cache."""
    hasher = xxhash.xxh3_128()
    for at, chunk in wire.read_chunks(frame, data.size):
        region = data[at : at + chunk.size]
        np.bitwise_xor(region, chunk, out=region)
        hasher.update(region.data)
    return hasher.hexdigest()


def apply(data: ByteArray, frame: Buffer) -> None:
    """Apply in place; DeltaError, and then ``data`` may be partly changed."""
    for at, chunk in wire.read_chunks(frame, data.size):
        region = data[at : at + chunk.size]
        np.bitwise_xor(region, chunk, out=region)
