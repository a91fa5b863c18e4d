"""A delta from a checkpoint on disk to its changed successor, which is never there as a whole.

Memory is that of a few groups of tensors, or a few times the largest tensor, whatever the model's size.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stitch_core.checkpoint import Checkpoint
from stitch_core.delta.directory import prepare_directory, write_index, write_shards
from stitch_core.delta.encoder import DeltaEncoder, EncodedDelta
from stitch_core.dialects import INDEX_NAME
from stitch_core.files import PosixFiles
from stitch_core.payload import Payload
from stitch_core.safetensors import Tensor
from stitch_core.state import TensorInfo, state_digest

from ..layout import spec
from .changes import Change

GROUP_BYTES = 256 << 20


@dataclass(frozen=True)
class Streamed:
    """A delta directory and what it stands for. ``encode``: seconds in the encoder, reading not included."""

    payload: Payload
    tensors: int
    bytes: int
    changed_elements: int
    elements: int
    delta_bytes: int
    encode: float

    @property
    def changed_fraction(self) -> float:
        return self.changed_elements / max(1, self.elements)

    @property
    def ratio(self) -> float:
        """Bytes of the delta over those of the checkpoint."""
        return self.delta_bytes / self.bytes


def stream_delta(
    base: Path,
    change: Change,
    directory: Path,
    *,
    encoding: str,
    base_number: int,
    group_bytes: int = GROUP_BYTES,
) -> Streamed:
    """Write the delta from the checkpoint in ``base`` to what ``change`` makes of it into ``directory``.

    Version ``base_number`` + 1, in ``encoding`` "xor" or "sparse". Raises CheckpointError, DeltaError,
    OSError.
    """
    files = PosixFiles()
    checkpoint = Checkpoint.open(base, files)
    prepare_directory(directory, files)
    writer = _Writer(directory, files, encoding)
    for names in _groups(checkpoint, group_bytes):
        old = {name: checkpoint.read(name) for name in names}
        writer.add(checkpoint, old, change)
    return writer.finish(base_number)


class _Writer:
    """One group of tensors after the other, each into files of its own."""

    def __init__(self, directory: Path, files: PosixFiles, encoding: str) -> None:
        self._directory, self._files, self._encoding = directory, files, encoding
        self._before: dict[str, TensorInfo] = {}
        self._after: dict[str, TensorInfo] = {}
        self._weight_map: dict[str, str] = {}
        self._done: list[EncodedDelta] = []
        self._seconds = 0.0

    def add(self, checkpoint: Checkpoint, old: dict[str, bytes], change: Change) -> None:
        refs = checkpoint.tensors
        encoder = DeltaEncoder(
            {name: Tensor(refs[name].dtype, refs[name].shape, data) for name, data in old.items()},
            self._encoding,
        )
        new = {}
        for name, data in old.items():
            ref = refs[name]
            after = change(spec.Tensor(name, ref.dtype, ref.shape), np.frombuffer(data, np.uint8))
            new[name] = Tensor(ref.dtype, ref.shape, after.data)
        self._before |= encoder.table
        began = time.perf_counter()
        self._done.append(self._encode(encoder, new, f"model-{len(self._done):05d}"))
        self._seconds += time.perf_counter() - began
        encoder.commit()
        self._after |= encoder.table

    def _encode(self, encoder: DeltaEncoder, new: dict[str, Tensor], stem: str) -> EncodedDelta:
        if self._encoding == "sparse":
            return encoder.write_sparse(new, self._directory, self._files, stem=stem)

        def write(payloads: dict[str, tuple[bytes, str]]) -> list[str]:
            found = write_shards(self._directory, self._files, payloads, stem=stem) if payloads else {}
            self._weight_map |= found
            return sorted(set(found.values()))

        return encoder.write(new, write)  # type: ignore[arg-type]

    def finish(self, base_number: int) -> Streamed:
        """Write the index, and say what it all is."""
        names = [name for one in self._done for name in one.files]
        write_index(
            self._directory, self._files, self._weight_map, number=base_number + 1, base_number=base_number,
            encoding=self._encoding, sparse_files=names if self._encoding == "sparse" else (),
        )  # fmt: skip
        names.append(INDEX_NAME)
        changed = {name: pair for one in self._done for name, pair in one.changed.items()}
        payload = Payload(
            "delta", state_digest(self._after), self._directory, tuple(names), state_digest(self._before),
            self._encoding, changed,
        )  # fmt: skip
        return Streamed(
            payload,
            tensors=len(self._before),
            bytes=sum(one.bytes for one in self._done),
            changed_elements=sum(one.changed_elements for one in self._done),
            elements=sum(one.elements for one in self._done),
            delta_bytes=sum(self._files.size(self._directory / name) for name in names),
            encode=self._seconds,
        )


def _groups(checkpoint: Checkpoint, bound: int) -> Iterator[list[str]]:
    """Names in the order of the files, of at most ``bound`` bytes together unless one alone has more."""
    refs = checkpoint.tensors
    group: list[str] = []
    size = 0
    for name in sorted(refs, key=lambda name: (refs[name].file, refs[name].offset)):
        if group and size + refs[name].nbytes > bound:
            yield group
            group, size = [], 0
        group.append(name)
        size += refs[name].nbytes
    if group:
        yield group
