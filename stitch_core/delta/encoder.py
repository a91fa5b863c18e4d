"""Stitch's own encoder: keeps what the trainer last published and writes what has changed since."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..checkpoint import Checkpoint
from ..ports import Files
from ..safetensors import ByteArray, Tensor, as_bytes, tensor_nbytes
from ..state import ITEM_BITS, TensorInfo, layout_difference, state_digest, tensor_digest
from . import wire, xor
from .directory import write_delta
from .wire import DeltaError

Writer = Callable[[Mapping[str, tuple[bytes, str]]], Sequence[str]]


@dataclass(frozen=True)
class EncodedDelta:
    """A delta directory that was written, and all that a manifest says of it.

    ``changed`` maps each tensor in it to its old and new xxh3-128. ``files`` are names in the directory,
    the index last. Elements are counted in the width of the tensor's dtype.
    """

    base: str
    state: str
    encoding: str
    changed: Mapping[str, tuple[str, str]]
    files: tuple[str, ...]
    changed_elements: int
    elements: int
    changed_bytes: int
    bytes: int
    payload_bytes: int

    @property
    def changed_fraction(self) -> float:
        """Changed elements of all elements, 0 to 1."""
        return self.changed_elements / max(1, self.elements)


@dataclass(frozen=True)
class _Undo:
    """Takes the base back over one encode: the frames are XOR, so they also undo."""

    frames: Mapping[str, bytes]
    table: dict[str, TensorInfo]
    state: str


class DeltaEncoder:
    """Holds a host copy of every tensor as last encoded: ``bytes`` of RAM. Not thread-safe.

    ``encode`` moves the base at once, so that the next step can be encoded while this one is published;
    ``commit`` and ``undo`` say how the publishing ended. The layout never changes.
    """

    def __init__(self, base: Mapping[str, Tensor]) -> None:
        self._base: dict[str, ByteArray] = {}
        self.table: dict[str, TensorInfo] = {}
        for name, tensor in base.items():
            self._add(name, tensor, as_bytes(tensor.data).copy())
        self.state = state_digest(self.table)
        self._outstanding: deque[_Undo] = deque()

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> DeltaEncoder:
        """An encoder whose base is a checkpoint on disk."""
        encoder = cls({})
        for name, ref in checkpoint.tensors.items():
            encoder._add(name, Tensor(ref.dtype, ref.shape, b""), as_bytes(bytearray(checkpoint.read(name))))
        encoder.state = state_digest(encoder.table)
        return encoder

    @property
    def outstanding(self) -> int:
        """Encodes that are neither committed nor undone."""
        return len(self._outstanding)

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(data.size for data in self._base.values())

    def encode(
        self, tensors: Mapping[str, Tensor], directory: Path, files: Files, *, number: int, base_number: int
    ) -> EncodedDelta:
        """Write what turns the base into ``tensors`` as a stock delta directory, and move the base there.

        Raises DeltaError, naming the tensor, when the layout differs from the base's; after any error the
        base is as it was. ``number`` and ``base_number`` are only what the index says.
        """
        return self.write(
            tensors,
            lambda payloads: write_delta(directory, files, payloads, number=number, base_number=base_number),
        )

    def write(self, tensors: Mapping[str, Tensor], writer: Writer) -> EncodedDelta:
        """As ``encode``, through ``writer``: it gets each changed tensor's frame and the xxh3-128 of its new
        bytes, and returns the names of the files that it wrote."""
        table = self._new_table(tensors)
        frames: dict[str, bytes] = {}
        changed: dict[str, tuple[str, str]] = {}
        changed_elements = changed_bytes = 0
        for name, info in table.items():
            if info.digest == self.table[name].digest:
                continue
            diff = np.bitwise_xor(self._base[name], as_bytes(tensors[name].data))
            frames[name] = wire.compress(diff.data)
            changed[name] = self.table[name].digest, info.digest
            changed_elements += _count_changed(diff, info.dtype)
            changed_bytes += int(np.count_nonzero(diff))
        names = writer({name: (frame, changed[name][1]) for name, frame in frames.items()})
        encoded = EncodedDelta(
            self.state, state_digest(table), "xor", changed, tuple(names),
            changed_elements, self._elements(),
            changed_bytes, self.bytes, sum(len(frame) for frame in frames.values()),
        )  # fmt: skip
        self._outstanding.append(_Undo(frames, self.table, self.state))
        for name in frames:
            self._base[name][:] = as_bytes(tensors[name].data)
        self.table, self.state = table, encoded.state
        return encoded

    def commit(self) -> None:
        """The oldest outstanding encode was published: it will not be undone."""
        if not self._outstanding:
            raise DeltaError("nothing to commit: no encode is outstanding")
        self._outstanding.popleft()

    def undo(self) -> None:
        """Take the base back over every outstanding encode, to the state committed last."""
        while self._outstanding:
            step = self._outstanding.pop()
            for name, frame in step.frames.items():
                xor.apply(self._base[name], frame)
            self.table, self.state = step.table, step.state

    def _elements(self) -> int:
        return sum(self._base[name].size * 8 // ITEM_BITS[info.dtype] for name, info in self.table.items())

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The base, tensor by tensor; views that the next encode or undo changes."""
        for name, info in self.table.items():
            yield name, Tensor(info.dtype, info.shape, self._base[name].data)

    def _add(self, name: str, tensor: Tensor, data: ByteArray) -> None:
        _check_size(name, tensor, data)
        self._base[name] = data
        self.table[name] = TensorInfo(tensor.dtype, tuple(tensor.shape), tensor_digest(data.data))

    def _new_table(self, tensors: Mapping[str, Tensor]) -> dict[str, TensorInfo]:
        layout = {name: TensorInfo(t.dtype, tuple(t.shape), "") for name, t in tensors.items()}
        difference = layout_difference(self.table, layout)
        if difference is not None:
            raise DeltaError(f"a delta needs the layout of its base: {difference}")
        table = {}
        for name, info in self.table.items():
            data = as_bytes(tensors[name].data)
            _check_size(name, tensors[name], data)
            table[name] = TensorInfo(info.dtype, info.shape, tensor_digest(data.data))
        return table


def _check_size(name: str, tensor: Tensor, data: ByteArray) -> None:
    try:
        expected = tensor_nbytes(tensor.dtype, tuple(tensor.shape))
    except ValueError as error:
        raise DeltaError(f"tensor {name}: {error}") from None
    if data.size != expected:
        raise DeltaError(
            f"tensor {name} has {data.size} bytes, {tensor.dtype} {list(tensor.shape)} takes {expected}"
        )


def _count_changed(diff: ByteArray, dtype: str) -> int:
    bits = ITEM_BITS[dtype]
    if bits >= 8:
        return int(np.count_nonzero(diff.view(f"<u{bits // 8}")))
    return int(np.unpackbits(diff, bitorder="little").reshape(-1, bits).any(axis=1).sum())
