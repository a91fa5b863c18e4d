"""The two sides that are compared, REF and sparse files, and their times. Part of delta.py.

What REF is stands there.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import xxhash
import zstandard

from benchmarks.delta_cases import Bytes, Case
from stitch_core.delta.sparse_encode import Source, encode_sparse
from stitch_core.delta.sparse_file import SparseFile
from stitch_core.files import PosixFiles

FILES = PosixFiles()
READ = 2 << 20


class Ref:
    """The public pattern."""

    def __init__(self) -> None:
        self._compressor = zstandard.ZstdCompressor(level=1)
        self._decompressor = zstandard.ZstdDecompressor()

    def encode(self, old: Bytes, new: Bytes) -> tuple[bytes, str]:
        difference = np.bitwise_xor(old, new)
        np.count_nonzero(difference)
        frame: bytes = self._compressor.compress(difference.data)
        return frame, xxhash.xxh3_128_hexdigest(new.data)

    def receive(self, data: Bytes, frame: bytes) -> str:
        hasher = xxhash.xxh3_128()
        for region in self._xor(data, frame):
            hasher.update(region.data)
        return hasher.hexdigest()

    def fold(self, data: Bytes, frames: list[bytes]) -> str:
        for frame in frames:
            for _ in self._xor(data, frame):
                pass
        return xxhash.xxh3_128_hexdigest(data.data)

    def _xor(self, data: Bytes, frame: bytes) -> Iterator[Bytes]:
        reader, at = self._decompressor.stream_reader(frame), 0
        while chunk := reader.read(READ):
            region = data[at : at + len(chunk)]
            np.bitwise_xor(region, np.frombuffer(chunk, np.uint8), out=region)
            at += len(chunk)
            yield region


def best(sides: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Least thread CPU seconds of each side, taken in turns."""
    least = dict.fromkeys(sides, math.inf)
    for number in range(rounds):
        for name in list(sides) if number % 2 == 0 else reversed(list(sides)):
            start = time.thread_time()
            sides[name]()
            least[name] = min(least[name], time.thread_time() - start)
    return least


def sparse_of(case: Case, path: Path) -> SparseFile:
    encode_sparse([source_of(case)], lambda _: path, FILES, workers=1)
    return SparseFile(path, FILES)


def source_of(case: Case) -> Source:
    return Source("weight", case.old, case.new, case.width, "0" * 32, case.kind == "fp4")
