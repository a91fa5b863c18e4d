"""A checkpoint's tensors for a loader, one at a time, and the proof of which checkpoint it was."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import xxhash

from stitch_core.checkpoint import Checkpoint, CheckpointError
from stitch_core.files import PosixFiles
from stitch_core.safetensors import TensorRef
from stitch_core.state import TensorInfo, state_digest

from .shadow import Unfit

CHUNK_BYTES = 4 << 20

DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "I16": torch.int16, "U16": torch.uint16, "F16": torch.float16,
    "BF16": torch.bfloat16, "I32": torch.int32, "U32": torch.uint32, "F32": torch.float32,
    "C64": torch.complex64, "F64": torch.float64, "I64": torch.int64, "U64": torch.uint64,
}  # fmt: skip


class Reader:
    """Reads ``directory`` once. ``go_on`` is called between pieces, and raises to end it.

    Files are read, not mapped: one that is cut under a mapping would end the process.
    """

    def __init__(self, directory: Path, go_on: Callable[[], None]) -> None:
        self._checkpoint = Checkpoint.open(directory, PosixFiles())
        self._go_on = go_on
        self._table: dict[str, TensorInfo] = {}
        self.bytes = 0

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors in the order of the files. Raises CheckpointError, OSError, Unfit."""
        refs = self._checkpoint.tensors
        for name in sorted(refs, key=lambda name: (refs[name].file, refs[name].offset)):
            yield name, self._read(name, refs[name])

    def state(self) -> str:
        """Of what was read, which must be everything."""
        missed = self._checkpoint.tensors.keys() - self._table.keys()
        if missed:
            raise Unfit(f"the model's loader stopped before tensor {min(missed)}")
        return state_digest(self._table)

    def _read(self, name: str, ref: TensorRef) -> torch.Tensor:
        dtype = DTYPES.get(ref.dtype)
        if dtype is None:
            raise Unfit(f"tensor {name} has dtype {ref.dtype}")
        data = torch.empty(ref.nbytes, dtype=torch.uint8)
        digest = xxhash.xxh3_128()
        view = memoryview(data.numpy())
        with open(ref.file, "rb", buffering=0) as file:
            for at in range(0, ref.nbytes, CHUNK_BYTES):
                self._go_on()
                piece = view[at : at + CHUNK_BYTES]
                if os.preadv(file.fileno(), [piece], ref.offset + at) != len(piece):
                    raise CheckpointError(f"{ref.file}: tensor {name} is cut short")
                digest.update(piece)
        self.bytes += ref.nbytes
        self._table[name] = TensorInfo(ref.dtype, ref.shape, digest.hexdigest())
        return data.view(dtype).reshape(ref.shape)
