"""A checkpoint's tensors for a loader, one at a time, and the proof of which checkpoint it was."""

from __future__ import annotations

import functools
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import torch
import xxhash

from stitch_core.checkpoint import Checkpoint, CheckpointError
from stitch_core.files import PosixFiles
from stitch_core.parallel import in_order
from stitch_core.safetensors import TensorRef
from stitch_core.state import TensorInfo, state_digest

from .survey import Unfit

CHUNK_BYTES = 4 << 20
"""Hashed at a time."""

DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "I16": torch.int16, "U16": torch.uint16, "F16": torch.float16,
    "BF16": torch.bfloat16, "I32": torch.int32, "U32": torch.uint32, "F32": torch.float32,
    "C64": torch.complex64, "F64": torch.float64, "I64": torch.int64, "U64": torch.uint64,
}  # fmt: skip


class Reader:
    """Reads ``directory`` once. ``go_on`` is called between pieces, and raises to end it.

    Files are mapped, so that a rank copies what it takes of a tensor and no more. Nobody makes them shorter;
    one that was cut before is told. What is written to them between hashing and copying shows in their times,
    when ``state`` is asked for. ``workers``: threads that hash.
    """

    def __init__(self, directory: Path, go_on: Callable[[], None], workers: int = 1) -> None:
        self._checkpoint = Checkpoint.open(directory, PosixFiles())
        self._go_on, self._workers = go_on, workers
        self._table: dict[str, TensorInfo] = {}
        self._mapped: tuple[Path | None, torch.Tensor] = None, torch.empty(0, dtype=torch.uint8)
        files = {ref.file for ref in self._checkpoint.tensors.values()}
        self._stamps = {file: _stamp(file) for file in files}
        self.bytes = 0

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors in the order of the files, hashed. Raises CheckpointError, OSError, Unfit."""
        refs = self._checkpoint.tensors
        names = sorted(refs, key=lambda name: (refs[name].file, refs[name].offset))
        calls = (functools.partial(self._digest, self._read(name, refs[name])) for name in names)
        with closing(in_order(calls, self._workers)) as results:
            for name, (tensor, digest) in zip(names, results, strict=True):
                ref = refs[name]
                self.bytes += ref.nbytes
                self._table[name] = TensorInfo(ref.dtype, ref.shape, digest)
                self._go_on()
                yield name, tensor

    def state(self) -> str:
        """Of what was read, which must be everything. Raises Unfit, CheckpointError, OSError."""
        for file, stamp in self._stamps.items():
            if _stamp(file) != stamp:
                raise CheckpointError(f"{file} was changed while it was loaded")
        missed = self._checkpoint.tensors.keys() - self._table.keys()
        if missed:
            raise Unfit(f"the model's loader stopped before tensor {min(missed)}")
        return state_digest(self._table)

    def _read(self, name: str, ref: TensorRef) -> torch.Tensor:
        """A tensor over the file's pages. What is written to it is not written to the file."""
        dtype = DTYPES.get(ref.dtype)
        if dtype is None:
            raise Unfit(f"tensor {name} has dtype {ref.dtype}")
        if ref.file != self._mapped[0]:
            self._mapped = ref.file, _map(ref.file)
        data = self._mapped[1][ref.offset : ref.offset + ref.nbytes]
        if data.numel() != ref.nbytes or os.stat(ref.file).st_size < ref.offset + ref.nbytes:
            raise CheckpointError(f"{ref.file}: tensor {name} is cut short")
        if ref.offset % dtype.itemsize:
            data = data.clone()
        return data.view(dtype).reshape(ref.shape)

    def _digest(self, tensor: torch.Tensor) -> tuple[torch.Tensor, str]:
        digest = xxhash.xxh3_128()
        view = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
        for at in range(0, len(view), CHUNK_BYTES):
            self._go_on()
            digest.update(view[at : at + CHUNK_BYTES])
        return tensor, digest.hexdigest()


def _stamp(path: Path) -> tuple[int, ...]:
    """Another one after a write, if that is some milliseconds after the one before."""
    status = os.stat(path)
    return status.st_ino, status.st_size, status.st_mtime_ns


def _map(path: Path) -> torch.Tensor:
    """A file's bytes, as they are when they are looked at."""
    with open(path, "rb") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)
