"""The memory that encoding and applying take beside the weights. Part of delta.py.

Measured in a process of its own: ``python -m benchmarks.delta_memory DIRECTORY BYTES`` prints both.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.delta_cases import synthetic
from benchmarks.delta_sides import FILES
from benchmarks.harness import Row, at_most, say
from stitch_core.delta.sparse_apply import apply_sparse
from stitch_core.delta.sparse_encode import Source, encode_sparse
from stitch_core.delta.sparse_file import SparseFile


def rows(work: Path, gigabytes: float) -> Iterator[Row]:
    """D9: what encode and apply take beside the weights, which are files that are mapped."""
    size = int(gigabytes * (1 << 30)) // (1 << 24) * (1 << 24)
    arguments = [sys.executable, "-m", "benchmarks.delta_memory", str(work), str(size)]
    lines = subprocess.run(arguments, capture_output=True, text=True, check=True).stdout.split()
    encode, apply = (int(line) / (1 << 20) for line in lines)
    say(f"{size / 2**30:.1f} GiB of weights: encode takes {encode:.0f} MiB more, apply {apply:.0f} MiB")
    yield at_most(
        "D9", f"MiB beside {size / 2**30:.1f} GiB of mapped weights, the larger of encode and apply",
        max(encode, apply), 256, "pages of the mapped files; the encoder's own copy of the base",
    )  # fmt: skip


def grow(work: Path, size: int) -> None:
    """In a process of its own: the growth of anonymous memory at its peak, in bytes, encode then apply."""
    tensors = {"embed": size // 2, **{f"layer.{i}": 16 << 20 for i in range(size // 2 // (16 << 20))}}
    paths = [work / "old.bin", work / "new.bin"]
    part = synthetic("bf16", 0.01, 16 << 20)
    for path, data in zip(paths, (part.old, part.new), strict=True):
        with path.open("wb") as file:
            for _ in range(0, size, data.size):
                file.write(data.data)
    old, new = (np.memmap(path, np.uint8, "r+") for path in paths)
    sources, views, at = [], {}, 0
    for name, nbytes in tensors.items():
        sources.append(
            Source(name, np.asarray(old[at : at + nbytes]), np.asarray(new[at : at + nbytes]), 2, "0" * 32)
        )
        views[name] = old[at : at + nbytes]
        at += nbytes
    del part

    def growth(call: Callable[[], Any]) -> int:
        before = anonymous()
        peak = Peak()
        call()
        return peak.stop() - before

    found: dict[str, Any] = {}

    def encode() -> None:
        found["paths"] = encode_sparse(sources, lambda i: work / f"{i}.sparse", FILES)[0]

    def apply() -> None:
        for path in found["paths"]:
            file = SparseFile(path, FILES)
            for name in file.names:
                apply_sparse(np.asarray(views[name]), name, [file])

    print(growth(encode), growth(apply))
    assert np.array_equal(old[: 1 << 20], new[: 1 << 20])


def anonymous() -> int:
    """Anonymous memory of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) << 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


class Peak:
    """Samples ``anonymous`` each millisecond in a thread of its own."""

    def __init__(self) -> None:
        self._most, self._end = 0, threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()

    def _sample(self) -> None:
        while not self._end.wait(0.001):
            self._most = max(self._most, anonymous())

    def stop(self) -> int:
        self._end.set()
        self._thread.join()
        return max(self._most, anonymous())


if __name__ == "__main__":
    grow(Path(sys.argv[1]), int(sys.argv[2]))
