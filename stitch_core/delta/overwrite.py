"""The ``overwrite`` encoding: u4 LE count, count u4 LE byte positions (ascending), count new bytes.

Idempotent, but goes forward only. Positions have 32 bits, so a tensor over 4 GiB cannot be expressed.
"""

from __future__ import annotations

import struct

import numpy as np

from ..ports import Buffer
from ..safetensors import ByteArray, as_bytes
from . import wire
from .wire import DeltaError

MAX_BYTES = 1 << 32


def encode(old: Buffer, new: Buffer) -> bytes:
    """The frame that turns ``old`` into ``new``, of equal length."""
    before, after = as_bytes(old), as_bytes(new)
    check_size(after.size)
    positions = np.flatnonzero(before != after)
    parts = struct.pack("<I", positions.size), positions.astype("<u4").tobytes(), after[positions].tobytes()
    return wire.compress(b"".join(parts))


def apply(data: ByteArray, frame: Buffer) -> None:
    """Apply in place; DeltaError, and then nothing was changed."""
    reader = wire.FrameReader(frame)
    head = np.empty(4, np.uint8)
    reader.read_into(head)
    count = int(head.view("<u4")[0])
    if count > data.size:
        raise DeltaError(f"overwrite of {count} bytes in a tensor of {data.size}")
    body = np.empty(count * 5, np.uint8)
    reader.read_into(body)
    reader.finish()
    positions, values = body[: 4 * count].view("<u4"), body[4 * count :]
    if count and (int(positions[-1]) >= data.size or not (positions[1:] > positions[:-1]).all()):
        raise DeltaError(f"overwrite positions are not ascending within a tensor of {data.size} bytes")
    data[positions] = values


def check_size(size: int) -> None:
    """DeltaError for a tensor of more bytes than positions can name."""
    if size > MAX_BYTES:
        raise DeltaError(f"overwrite cannot express a tensor of {size} bytes: use xor")
