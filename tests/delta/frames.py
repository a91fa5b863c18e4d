"""What the tests of frames share."""

from collections.abc import Iterable

import numpy as np

from stitch_core.delta import overwrite, xor
from stitch_core.delta.wire import FrameReader
from stitch_core.ports import Buffer
from stitch_core.safetensors import ByteArray, as_bytes

APPLY = {"xor": xor.apply, "overwrite": overwrite.apply}


def apply_deltas(old: Buffer, deltas: Iterable[tuple[str, Buffer]]) -> ByteArray:
    """A tensor's bytes after ``deltas``, each (encoding, frame), in order; ``old`` stays as it is."""
    new = as_bytes(old).copy()
    for encoding, frame in deltas:
        APPLY[encoding](new, frame)
    return new


def decompress(frame: Buffer, size: int) -> ByteArray:
    """The ``size`` bytes in a frame; DeltaError if it holds fewer or more."""
    out = np.empty(size, np.uint8)
    reader = FrameReader(frame)
    reader.read_into(out)
    reader.finish()
    return out
