"""What a plan does to a copy's tensors: one pass over each, verified, as writes for the journal."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

from .checkpoint import Checkpoint
from .delta.fold import PlanDeltas
from .delta.sparse_file import SMALL_BYTES, order, width_of
from .journal import Write
from .parallel import in_order
from .safetensors import ByteArray, CheckpointError
from .state import TensorTable

BATCH_BYTES = 16 << 20


@dataclass
class Wish:
    """Whether the writes are wanted still, or the rest is only to be verified."""

    writes: bool = True


@dataclass(frozen=True)
class Applying:
    """A plan on its way to ``deltas.final``; ``table`` says how far each tensor has come.

    Raises what PlanDeltas raises, CheckpointError, OSError.
    """

    checkpoint: Checkpoint
    deltas: PlanDeltas
    table: TensorTable
    workers: int = 1
    wish: Wish = field(default_factory=Wish)

    def todo(self) -> list[str]:
        """The tensors that are not final, in the order in which their bytes lie."""
        refs, final = self.checkpoint.tensors, self.deltas.final
        names = (name for name in self.deltas.names if self.table[name].digest != final[name].digest)
        return sorted(names, key=lambda name: (refs[name].file.name, refs[name].offset))

    def writes(self, names: Sequence[str]) -> Generator[tuple[str, list[Write]], None, None]:
        """Each of ``names``, verified to its last byte, with what changes in it.

        While ``wish.writes`` is off they are only verified. The bytes must not change meanwhile.
        """
        calls = [functools.partial(self._writes_of, group) for group in self._groups(names)]
        for found in in_order(calls, self.workers):
            yield from found

    def rewrite(self) -> None:
        """Write the new bytes of every tensor where the old ones lie, without a journal."""
        for _ in in_order([functools.partial(self._rewrite, name) for name in self.todo()], self.workers):
            pass

    def _groups(self, names: Sequence[str]) -> list[list[str]]:
        """Large tensors one by one; small ones together, in the order in which sparse files have them.

        A block of many small tensors is decoded once if one thread takes them in turn.
        """
        refs, groups, small = self.checkpoint.tensors, [], []
        for name in names:
            if refs[name].nbytes < SMALL_BYTES:
                small.append(name)
            else:
                groups.append([name])
        small.sort(key=lambda name: order(name, refs[name].nbytes, width_of(refs[name].dtype)))
        return [*groups, small] if small else groups

    def _writes_of(self, names: Sequence[str]) -> list[tuple[str, list[Write]]]:
        return [(name, self._writes_of_one(name)) for name in names]

    def _writes_of_one(self, name: str) -> list[Write]:
        ref = self.checkpoint.tensors[name]
        found, width = [], width_of(ref.dtype)
        for start, old, new in self.deltas.parts(
            name, ref.nbytes, self._reader(name), self.table[name].digest
        ):
            if self.wish.writes:
                write = Write.difference(ref.file.name, ref.offset + start, old, new, width)
                found += [write] if write else []
        return found

    def _rewrite(self, name: str) -> None:
        ref, files = self.checkpoint.tensors[name], self.checkpoint.files
        for start, _, new in self.deltas.parts(name, ref.nbytes, self._reader(name), self.table[name].digest):
            files.write_at(ref.file, ref.offset + start, new.data)

    def _reader(self, name: str) -> Callable[[int, ByteArray], None]:
        ref, files = self.checkpoint.tensors[name], self.checkpoint.files

        def read(offset: int, out: ByteArray) -> None:
            count = files.read_into(ref.file, ref.offset + offset, out.data)
            if count != out.size:
                raise CheckpointError(f"{ref.file}: tensor {name} is cut short at byte {offset + count}")

        return read
