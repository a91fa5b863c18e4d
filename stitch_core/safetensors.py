"""The safetensors file format: a header reader that checks everything, and a deterministic writer.

Format: u64 little-endian header length, a JSON object (``name -> {dtype, shape, data_offsets}``, and
``__metadata__``, text to text), then the tensors' bytes without gaps.
"""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .ports import Buffer, Files
from .state import ITEM_BITS

MAX_HEADER_BYTES = 100_000_000
WRITE_BYTES = 16 << 20

ByteArray = npt.NDArray[np.uint8]

_ORDER = {dtype: i for i, dtype in enumerate(ITEM_BITS)}


class CheckpointError(ValueError):
    """A checkpoint that is not what its files claim; the message names the file and the tensor."""


class Tensor(NamedTuple):
    """A tensor in memory: ``dtype`` in safetensors spelling, ``data`` its contiguous little-endian bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: Buffer


@dataclass(frozen=True)
class TensorRef:
    """A tensor in a file: ``nbytes`` bytes at ``offset`` from the start of ``file``."""

    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Header:
    """What a safetensors file says of itself. ``tensors`` is in the order of their bytes."""

    tensors: dict[str, TensorRef]
    metadata: dict[str, str]


def as_bytes(data: Buffer) -> ByteArray:
    """A flat view of any contiguous buffer."""
    return np.frombuffer(data, np.uint8)


def load_json_object(data: bytes, where: str) -> dict[str, Any]:
    """Parse a JSON object whose names differ and are UTF-8; CheckpointError."""
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: expected a JSON object, found {type(value).__name__}")
    return value


def tensor_nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor; ValueError for an unknown dtype or a size that is not whole bytes."""
    if dtype not in ITEM_BITS:
        raise ValueError(f"unknown dtype {dtype!r}")
    bits = _product(shape) * ITEM_BITS[dtype]
    if bits % 8:
        raise ValueError(f"shape {list(shape)} of {dtype} is not a whole number of bytes")
    return bits // 8


def _product(shape: tuple[int, ...]) -> int:
    """Not ``math.prod``: with a header's millions of large sizes that would not end."""
    if 0 in shape:
        return 0
    count = 1
    for size in shape:
        count *= size
        if count >= 1 << 63:
            raise ValueError(f"a shape of {len(shape)} dimensions has more than 2^63 elements")
    return count


# ------------------------------------------------------------------------------------------------ read


def read_header(path: Path, files: Files) -> Header:
    """Read and check a file's header against itself and against the file's size; CheckpointError."""
    size = files.size(path)
    start = files.read(path, 0, 8)
    if len(start) < 8:
        raise CheckpointError(f"{path}: cut short, no safetensors header in {size} bytes")
    (length,) = struct.unpack("<Q", start)
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(f"{path}: header of {length} bytes, more than {MAX_HEADER_BYTES}")
    raw = files.read(path, 8, length)
    if len(raw) < length:
        raise CheckpointError(f"{path}: cut short inside the header, {size} bytes of {8 + length}")
    if raw[:1] != b"{":
        raise CheckpointError(f"{path}: not a safetensors file, its header does not start with '{{'")
    items = load_json_object(raw, f"{path}: header")
    metadata = items.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise CheckpointError(f"{path}: __metadata__ must map text to text")
    spans = [(*_span(path, name, item), name) for name, item in items.items()]
    spans.sort(key=lambda span: span[:2])
    data, position, tensors = 8 + length, 0, {}
    for begin, end, dtype, shape, name in spans:
        if begin != position:
            word = "overlaps the one before it" if begin < position else "leaves a gap before it"
            raise CheckpointError(f"{path}: tensor {name} at bytes {begin} to {end} {word}")
        tensors[name] = TensorRef(dtype, shape, path, data + begin, end - begin)
        position = end
    if data + position != size:
        raise CheckpointError(f"{path}: {size} bytes, but the header describes {data + position}")
    return Header(tensors, metadata)


def _span(path: Path, name: str, item: Any) -> tuple[int, int, str, tuple[int, ...]]:
    where = f"{path}: tensor {name}"
    if not isinstance(item, dict):
        raise CheckpointError(f"{where}: expected an object with dtype, shape and data_offsets")
    dtype, shape, offsets = item.get("dtype"), item.get("shape"), item.get("data_offsets")
    if not isinstance(dtype, str):
        raise CheckpointError(f"{where}: dtype is missing")
    sizes, ends = _counts(shape), _counts(offsets)
    if sizes is None:
        raise CheckpointError(f"{where}: shape {shape!r} is not a list of sizes")
    if ends is None or len(ends) != 2 or ends[0] > ends[1]:
        raise CheckpointError(f"{where}: data_offsets {offsets!r} is not [begin, end]")
    begin, end = ends
    try:
        nbytes = tensor_nbytes(dtype, sizes)
    except ValueError as error:
        raise CheckpointError(f"{where}: {error}") from None
    if nbytes != end - begin:
        raise CheckpointError(f"{where}: {end - begin} bytes, but {dtype} {shape} takes {nbytes}")
    return begin, end, dtype, sizes


def _counts(value: Any) -> tuple[int, ...] | None:
    """``value`` as non-negative integers of 63 bits, None if it is anything else."""
    if not isinstance(value, list):
        return None
    fine = all(isinstance(v, int) and not isinstance(v, bool) and 0 <= v < 2**63 for v in value)
    return tuple(value) if fine else None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        name, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"the name {name!r} appears twice")
    for name in result:
        name.encode()  # a lone surrogate is a name that no file could hold as UTF-8
    return result


# ----------------------------------------------------------------------------------------------- write


def encode_header(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, int]]:
    """The bytes before the data, and each tensor's offset in the file in the order of the bytes.

    ``tensors`` maps names to (dtype, shape). Order and padding are the reference writer's (widest dtype
    first, then by name; blanks up to 8 bytes), so that every tensor is aligned to its item.
    """
    items: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    position, begins = 0, {}
    order = sorted(tensors.items(), key=lambda item: (-_ORDER.get(item[1][0], 0), item[0].encode()))
    for name, (dtype, shape) in order:
        if name == "__metadata__":
            raise CheckpointError("__metadata__ cannot be the name of a tensor")
        begins[name], end = position, position + tensor_nbytes(dtype, shape)
        items[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(items, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"a header of {len(text)} bytes is more than {MAX_HEADER_BYTES}: use more shards"
        )
    return struct.pack("<Q", len(text)) + text, {name: 8 + len(text) + at for name, at in begins.items()}


def write_file(
    path: Path, files: Files, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write or replace a safetensors file; a crash leaves the old one or the new one, whole.

    The caller syncs the directory. Equal tensors and metadata give equal bytes.
    """
    header, offsets = encode_header({name: (t.dtype, t.shape) for name, t in tensors.items()}, metadata)
    temporary = path.with_name(f".{path.name}.tmp")
    if files.exists(temporary):
        files.remove(temporary)
    files.write_new(temporary, header)
    for name, offset in offsets.items():
        data, tensor = as_bytes(tensors[name].data), tensors[name]
        if data.size != tensor_nbytes(tensor.dtype, tensor.shape):
            raise CheckpointError(
                f"{path}: tensor {name} has {data.size} bytes for {tensor.dtype} {tensor.shape}"
            )
        for at in range(0, data.size, WRITE_BYTES):
            files.write_at(temporary, offset + at, data[at : at + WRITE_BYTES].data)
    files.sync(temporary)
    files.rename(temporary, path)
