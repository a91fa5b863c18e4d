"""What a plan does to a copy's tensors: one pass over each, verified, as writes for the journal."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from .checkpoint import Checkpoint
from .delta.fold import PlanDeltas, Zones
from .delta.segments import Segments
from .delta.sparse_layout import SMALL_BYTES, order, width_of
from .delta.stream import PART_BYTES, Read
from .delta.wire import DeltaError
from .host_marker import Partials
from .journal import Write
from .parallel import in_order
from .safetensors import ByteArray, CheckpointError
from .state import TensorTable

AHEAD_BYTES = 64 << 20
"""Writes that wait for their turn in memory, about, of all threads together."""


class Piece(NamedTuple):
    """Bytes of a tensor up to ``end``: what changes in them, None for nothing. ``last`` of the tensor.

    ``before`` is what the tensor's bytes were before its first piece.
    """

    name: str
    end: int
    write: Write | None
    last: bool
    before: Zones


Part = tuple[int, ByteArray, ByteArray]
"""Its start, old bytes and new bytes."""

Found = tuple[list[Piece], Iterator[Piece]]
"""The first pieces of a call, in memory, and those that are left to be computed."""


@dataclass
class Wish:
    """Whether the writes are wanted still, or the rest is only to be verified."""

    writes: bool = True


@dataclass(frozen=True)
class Applying:
    """A plan on its way to ``deltas.final``; ``table`` says how far each tensor has come.

    ``partials`` are the tensors of which only a part was written.
    Raises what PlanDeltas raises, CheckpointError, OSError.
    """

    checkpoint: Checkpoint
    deltas: PlanDeltas
    table: TensorTable
    workers: int = 1
    partials: Partials = field(default_factory=dict)
    part_bytes: int = PART_BYTES
    wish: Wish = field(default_factory=Wish)

    def todo(self) -> list[str]:
        """The tensors that are not final, in the order in which their bytes lie."""
        refs, final = self.checkpoint.tensors, self.deltas.final
        names = (name for name in self.deltas.names if self.table[name].digest != final[name].digest)
        return sorted(names, key=lambda name: (refs[name].file.name, refs[name].offset))

    def writes(self, names: Sequence[str]) -> Generator[Piece, None, None]:
        """The pieces of ``names``, one tensor after the other, each in order.

        Before its last piece comes, a tensor is not verified. While ``wish.writes`` is off they are only
        verified. What was taken may be written meanwhile; other bytes must not change.
        """
        with contextlib.closing(in_order(self._calls(names), self.workers)) as results:
            for found, rest in results:
                yield from found
                yield from rest

    def rewrite(self, original: Path) -> None:
        """Write the new bytes of every tensor where the old ones lie, without a journal.

        ``original`` is a directory with the files as they were before.
        """

        def calls() -> Iterator[Callable[[], None]]:
            for name in self.todo():
                size = self.checkpoint.tensors[name].nbytes
                segments = self.deltas.segments(name, size, self.zones(name))
                if segments is None:
                    yield functools.partial(self._rewrite, name, original)
                else:
                    for number in range(len(segments)):
                        yield functools.partial(self._rewrite_segment, name, segments, number, original)

        for _ in in_order(calls(), self.workers):
            pass

    def zones(self, name: str) -> Zones:
        """What the bytes of a tensor are now."""
        digest, size = self.table[name].digest, self.checkpoint.tensors[name].nbytes
        partial = self.partials.get(name)
        # Bytes that have a digest of the plan are whole, whatever was noted earlier.
        if partial is None or partial[-1][0] != size or self.deltas.knows(name, digest):
            return [(size, digest)]
        return partial

    def _calls(self, names: Sequence[str]) -> Iterator[Callable[[], Found]]:
        """Large tensors one by one or in segments; small ones together, as sparse files have them.

        A block of many small tensors is decoded once if one thread takes them in turn.
        """
        refs, small = self.checkpoint.tensors, []
        for name in names:
            if refs[name].nbytes < SMALL_BYTES:
                small.append(name)
                continue
            zones = self.zones(name)
            segments = self.deltas.segments(name, refs[name].nbytes, zones)
            if segments is None:
                yield functools.partial(self._begun, [name])
            else:
                for number in range(len(segments)):
                    yield functools.partial(self._segment, name, zones, segments, number)
        if small:
            small.sort(key=lambda name: order(name, refs[name].nbytes, width_of(refs[name].dtype)))
            yield functools.partial(self._begun, small)

    def _begun(self, names: Sequence[str]) -> Found:
        """As much as may wait in memory; the caller goes on with the rest."""
        rest = self._pieces(names)
        found, held = [], 0
        for piece in rest:
            found.append(piece)
            held += len(memoryview(piece.write.data)) if piece.write else 0
            if held > AHEAD_BYTES // (2 * self.workers):
                break
        return found, rest

    def _pieces(self, names: Sequence[str]) -> Iterator[Piece]:
        for name in names:
            zones = self.zones(name)
            for part in self._parts(name, zones):
                yield self._piece(name, zones, *part)
            if self.checkpoint.tensors[name].nbytes == 0:
                yield Piece(name, 0, None, True, zones)

    def _segment(self, name: str, zones: Zones, segments: Segments, number: int) -> Found:
        with self._segment_parts(name, zones, segments, number) as parts:
            return [self._piece(name, zones, *part) for part in parts], iter(())

    def _piece(self, name: str, zones: Zones, start: int, old: ByteArray, new: ByteArray) -> Piece:
        ref, end = self.checkpoint.tensors[name], start + new.size
        write = None
        if self.wish.writes:
            write = Write.difference(ref.file.name, ref.offset + start, old, new, width_of(ref.dtype))
        return Piece(name, end, write, end == ref.nbytes, zones)

    def _rewrite(self, name: str, original: Path) -> None:
        for start, _, new in self._parts(name, self.zones(name), original):
            self._write(name, start, new)

    def _rewrite_segment(self, name: str, segments: Segments, number: int, original: Path) -> None:
        with self._segment_parts(name, self.zones(name), segments, number, original) as parts:
            for start, _, new in parts:
                self._write(name, start, new)

    def _write(self, name: str, start: int, new: ByteArray) -> None:
        ref = self.checkpoint.tensors[name]
        self.checkpoint.files.write_at(ref.file, ref.offset + start, new.data)

    def _parts(self, name: str, zones: Zones, original: Path | None = None) -> Iterator[Part]:
        return self.deltas.parts(
            name, self.checkpoint.tensors[name].nbytes, self._reader(name), zones,
            original=self._reader(name, original), part_bytes=self.part_bytes,
        )  # fmt: skip

    @contextlib.contextmanager
    def _segment_parts(
        self, name: str, zones: Zones, segments: Segments, number: int, original: Path | None = None
    ) -> Iterator[Iterator[Part]]:
        try:
            # Closed at once, whatever happens: others wait for it.
            with contextlib.closing(segments.parts(number, self._reader(name), self.part_bytes)) as parts:
                yield parts
        except DeltaError as error:
            size = self.checkpoint.tensors[name].nbytes
            raise self.deltas.fault(name, size, self._reader(name, original), zones) from error

    def _reader(self, name: str, directory: Path | None = None) -> Read:
        ref, files = self.checkpoint.tensors[name], self.checkpoint.files
        path = ref.file if directory is None else directory / ref.file.name

        def read(offset: int, out: ByteArray) -> None:
            count = files.read_into(path, ref.offset + offset, out.data)
            if count != out.size:
                raise CheckpointError(f"{path}: tensor {name} is cut short at byte {offset + count}")

        return read
