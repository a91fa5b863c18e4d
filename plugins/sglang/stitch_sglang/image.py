"""A rank's weights in their final layout, in one flat piece of this process's memory.

Every storage of the live model that counts has one segment, so that tensors which share a storage share it in
the image too, and an activation is a copy of bytes into storages that stay where they are.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from stitch_core.parallel import in_order

ALIGN = 64
CHUNK_BYTES = 64 << 20

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


@dataclass(frozen=True)
class Segment:
    """``required``: a parameter or persistent buffer lies in it, so that a load must write all of it."""

    offset: int
    nbytes: int
    names: tuple[str, ...]
    required: bool
    live: torch.Tensor
    """The storage's bytes, where the engine reads them."""


@dataclass(frozen=True)
class Layout:
    """The segments of a model, in order. ``nbytes``: of an image."""

    segments: tuple[Segment, ...]
    nbytes: int

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, torch.Tensor, bool]]) -> Layout:
        """``tensors``: names, live tensors and whether they are required."""
        found: dict[tuple[Any, ...], tuple[list[str], list[bool], torch.Tensor]] = {}
        for name, tensor, required in tensors:
            key = storage_key(tensor)
            if key is not None:
                names, flags, _ = found.setdefault(key, ([], [], live_bytes(tensor)))
                names.append(name)
                flags.append(required)
        segments, offset = [], 0
        for names, flags, live in found.values():
            segments.append(Segment(offset, live.numel(), tuple(names), any(flags), live))
            offset += -(-live.numel() // ALIGN) * ALIGN
        return cls(tuple(segments), offset)

    def by_storage(self) -> dict[tuple[Any, ...], int]:
        """Numbers of segments by ``storage_key``."""
        keys = (storage_key(segment.live) for segment in self.segments)
        return {key: i for i, key in enumerate(keys) if key is not None}


def storage_key(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """What tells one storage from another; None for one without bytes."""
    if tensor.layout != torch.strided or tensor.is_meta:
        return None
    storage = tensor.untyped_storage()
    return (tensor.device, storage.data_ptr(), storage.nbytes()) if storage.nbytes() else None


def live_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of its storage, shared with it."""
    storage = tensor.untyped_storage()
    with torch.inference_mode(False):
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        return flat.set_(storage, 0, (storage.nbytes(),), (1,))


class Image:
    """Memory for one version. ``state``: of the checkpoint that it was loaded from; None: none, or half."""

    def __init__(self, layout: Layout, pin: bool) -> None:
        self.layout = layout
        self.state: str | None = None
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._memory = mmap.mmap(-1, max(layout.nbytes, 1), flags=flags)
        with contextlib.suppress(OSError, AttributeError):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        with torch.inference_mode(False):
            self.bytes = [
                torch.frombuffer(self._memory, dtype=torch.uint8, count=one.nbytes, offset=one.offset)
                for one in layout.segments
            ]
        self.pinned = pin and bool(self.bytes) and _pin(self.bytes[0].data_ptr(), layout.nbytes)

    def view(self, number: int, live: torch.Tensor) -> torch.Tensor:
        """What ``live`` shows of its storage, of segment ``number``."""
        with torch.inference_mode(False):
            view = torch.empty(0, dtype=live.dtype)
            storage = self.bytes[number].untyped_storage()
            return view.set_(storage, live.storage_offset(), live.size(), live.stride())

    def fill(self, number: int, of_live: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Write what ``of_live`` makes of the live bytes of a segment."""
        live = self.layout.segments[number].live
        for at in _chunks(live.numel()):
            self.bytes[number][at] = of_live(live[at].cpu())

    def equals_live(self, number: int) -> bool:
        """Whether the segment has the live bytes."""
        return self._same(number, self.layout.segments[number].live)

    def equals(self, number: int, other: Image) -> bool:
        """Whether the segment is the same in both."""
        return self._same(number, other.bytes[number])

    def is_complement(self, number: int) -> bool:
        """Whether no byte of the segment was written since it was filled with the complement of the live."""
        live, own = self.layout.segments[number].live, self.bytes[number]
        return all(_equal(own[at].bitwise_not(), live[at].cpu()) for at in _chunks(own.numel()))

    def first_difference(self, number: int) -> int:
        """Where in the segment the image differs from the live bytes."""
        live, own = self.layout.segments[number].live, self.bytes[number]
        for at in _chunks(own.numel()):
            differ = (own[at] != live[at].cpu()).nonzero()
            if differ.numel():
                return int(at.start + differ[0, 0])
        return -1

    def copy_to_live(self, numbers: Iterable[int], workers: int = 1) -> int:
        """Into the storages that the engine reads; the bytes copied. The device is not synchronized.

        Weights on the CPU are copied by ``workers`` threads.
        """
        total, moves = 0, list[tuple[int, int, int]]()
        with torch.inference_mode(False), torch.no_grad():
            for number in numbers:
                live, own = self.layout.segments[number].live, self.bytes[number]
                total += own.numel()
                if live.device.type == "cpu":
                    # In one piece: libc goes past the caches only where much is copied at once.
                    moves.append((live.data_ptr(), own.data_ptr(), own.numel()))
                    continue
                for at in _chunks(own.numel()):
                    live[at].copy_(own[at], non_blocking=self.pinned)
        # Not torch's copy: it waits for each of its threads, also for one that gets no core.
        for _ in in_order((functools.partial(ctypes.memmove, *move) for move in moves), workers):
            pass
        return total

    def _same(self, number: int, other: torch.Tensor) -> bool:
        own = self.bytes[number]
        return all(_equal(own[at], other[at].cpu()) for at in _chunks(own.numel()))


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Of bytes that lie in a row. torch compares them one by one, at a tenth of the speed."""
    return _memcmp(one.data_ptr(), other.data_ptr(), one.numel()) == 0


def _chunks(nbytes: int) -> Iterator[slice]:
    return (slice(at, min(at + CHUNK_BYTES, nbytes)) for at in range(0, nbytes, CHUNK_BYTES))


def _pin(pointer: int, nbytes: int) -> bool:
    """Whether the memory is page-locked now, for copies that the device does by itself."""
    if not torch.cuda.is_available():
        return False
    return int(torch.cuda.cudart().cudaHostRegister(pointer, nbytes, 0)) == 0
