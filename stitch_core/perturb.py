"""Another version of a checkpoint, to try an engine with: about half of its numbers are a little different.

An engine that goes on computing with something it made of the old weights, whichever they are, then answers
otherwise than one that booted from the new ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from .checkpoint import CHUNK_BYTES, Checkpoint
from .host_data import side_files
from .safetensors import ByteArray, TensorRef, as_bytes


class _Digit(NamedTuple):
    """Which bit of an item changes. ``exponent``: the item's exponent; items with none or all of it stay."""

    width: int
    digit: int
    exponent: int


# About 1 % of a number, or the least that there is. Zeros, infinities and NaNs stay what they are.
_FLOATS = {
    "BF16": _Digit(2, 1, 0x7F80),
    "F16": _Digit(2, 1 << 3, 0x7C00),
    "F32": _Digit(4, 1 << 16, 0x7F80_0000),
    "F64": _Digit(8, 1 << 45, 0x7FF0_0000_0000_0000),
    "F8_E4M3": _Digit(1, 1, 0x78),
    "F8_E4M3FNUZ": _Digit(1, 1, 0x78),
    "F8_E5M2": _Digit(1, 1, 0x7C),
    "F8_E5M2FNUZ": _Digit(1, 1, 0x7C),
}

_PACKED = _Digit(1, 1, 0)
"""Of codes in bytes: a step of a quantized number."""

Bits = ByteArray
"""Zeros and ones, as many as a chunk can have items."""


def perturb(checkpoint: Checkpoint, directory: Path, rng: np.random.Generator) -> list[str]:
    """Write the other version, with all side files, into ``directory``, which is new; what stays as it is.

    What stays are the names of tensors that may be tables or sizes: integers, unless they are bytes in two
    dimensions and more. Raises CheckpointError, OSError.
    """
    files, bits = checkpoint.files, rng.integers(0, 2, CHUNK_BYTES, np.uint8)
    files.make_dirs(directory)
    for name in (*side_files(files, checkpoint.directory), *_indexes(checkpoint)):
        files.write_new(directory / name, files.read(checkpoint.directory / name))
    for name in checkpoint.weight_files:
        source = checkpoint.directory / name
        tensors = sorted(
            ((ref.offset, one) for one, ref in checkpoint.tensors.items() if ref.file == source),
        )
        begin = tensors[0][0] if tensors else files.size(source)
        files.write_new(directory / name, files.read(source, 0, begin))
        for offset, one in tensors:
            at = offset
            for chunk in checkpoint.chunks(one):
                files.write_at(directory / name, at, changed(chunk, checkpoint.tensors[one], bits).data)
                at += len(chunk)
        files.sync(directory / name)
    files.sync(directory)
    return [name for name, ref in checkpoint.tensors.items() if _digit_of(ref) is None]


def changed(chunk: bytes, tensor: TensorRef, bits: Bits) -> ByteArray:
    """The other version of a part of a tensor that begins with a whole item."""
    kind = _digit_of(tensor)
    if kind is None:
        return as_bytes(chunk)
    words = np.frombuffer(chunk, f"<u{kind.width}").copy()
    exponents = words & words.dtype.type(kind.exponent)
    fixed = (exponents == 0) | (exponents == kind.exponent) if kind.exponent else np.zeros(words.shape, bool)
    words ^= np.where(fixed, 0, bits[: words.size]).astype(words.dtype) * words.dtype.type(kind.digit)
    return words.view(np.uint8)


def _digit_of(tensor: TensorRef) -> _Digit | None:
    if tensor.dtype in ("U8", "I8", "F4") and len(tensor.shape) > 1:
        return _PACKED
    return _FLOATS.get(tensor.dtype)


def _indexes(checkpoint: Checkpoint) -> list[str]:
    return [name for name in checkpoint.files.list(checkpoint.directory) if name.endswith(".index.json")]
