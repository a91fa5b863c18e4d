"""Tensors before and after a step, or many: synthetic and real ones. Part of delta.py, which says how."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks import traces

Bytes = npt.NDArray[np.uint8]
WIDTHS = {"bf16": 2, "fp32": 4, "fp8": 1, "fp4": 1}


@dataclass(frozen=True)
class Case:
    """One tensor before and after."""

    name: str
    kind: str
    old: Bytes
    new: Bytes

    @property
    def width(self) -> int:
        return WIDTHS[self.kind]


def synthetic(kind: str, density: float, size: int, seed: int = 0) -> Case:
    """``density`` of the elements (nibbles of fp4) move by one code, up or down."""
    rng = np.random.default_rng(seed)
    name = f"{kind} {density:.1%}"
    if kind in ("fp8", "fp4"):
        old = rng.integers(0, 256, size, np.uint8)
        new = old.copy()
        places = 2 if kind == "fp4" else 1
        at = np.flatnonzero(rng.random(size * places, np.float32) < density)
        byte, shift = at // places, (at % places * 4).astype(np.uint8)
        mask = 7 if kind == "fp4" else 0x7E
        code = (old[byte] >> shift) & mask
        moved = np.where(code > 0, code - 1, code + 1) if kind == "fp4" else code ^ 1
        np.bitwise_xor.at(new, byte, ((code ^ moved) << shift).astype(np.uint8))
        return Case(name, kind, old, new)
    values = (rng.standard_normal(size // WIDTHS[kind], np.float32) * 0.02).view(np.uint32)
    words = (values >> 16).astype(np.uint16) if kind == "bf16" else values
    after = words.copy()
    at = np.flatnonzero(rng.random(words.size, np.float32) < density)
    after[at] += (rng.integers(0, 2, at.size) * 2 - 1).astype(words.dtype)
    return Case(name, kind, words.view(np.uint8), after.view(np.uint8))


def real(rate: str, size: int, skip: int = 64) -> Case:
    """Steps of a trace end to end, so that the gaps and values are a real step's."""
    trace = traces.load(rate)
    before: list[Bytes] = []
    after: list[Bytes] = []
    previous = None
    for number, words in enumerate(trace.versions()):
        if number >= skip and sum(map(len, after)) < size and previous is not None:
            before.append(previous.view(np.uint8))
            after.append(words.copy().view(np.uint8))
        previous = words.copy()
    old, new = (np.concatenate(part)[: size // 8 * 8] for part in (before, after))
    return Case(f"real lr {rate}", "bf16", old, new)


def entropy_bound(case: Case) -> float:
    """Bytes of the change if each element changed on its own: positions, and values by their frequencies."""
    words = (case.old ^ case.new).view(f"<u{case.width}")
    values = words[words != 0]
    p = values.size / words.size
    positions = words.size * (-p * math.log2(p) - (1 - p) * math.log2(1 - p))
    counts = np.unique(values, return_counts=True)[1] / values.size
    return float(positions - values.size * (counts * np.log2(counts)).sum()) / 8


def chains(count: int, size: int, quick: bool) -> Iterator[tuple[str, list[Bytes]]]:
    """Versions of one tensor, ``count`` steps."""
    for density in (0.003, 0.01)[: 1 if quick else 2]:
        first = synthetic("bf16", density, size).old
        rng = np.random.default_rng(1)
        versions = [first]
        for _ in range(count):
            words = versions[-1].view("<u2").copy()
            at = rng.integers(0, words.size, int(words.size * density))
            words[at] += np.uint16(1)
            versions.append(words.view(np.uint8))
        yield f"bf16 {density:.1%}", versions
    for rate in traces.RATES:
        trace = traces.load(rate)
        times = max(1, size // trace.base.nbytes)
        taken = [words.copy() for _, words in zip(range(64 + count + 1), trace.versions(), strict=False)][64:]
        yield f"real lr {rate}", [np.tile(words, times).view(np.uint8) for words in taken]
