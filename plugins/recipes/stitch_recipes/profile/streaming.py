"""A delta from a checkpoint on disk to its changed successor, which is never there as a whole.

Memory is that of a few groups of tensors for each thread, or of the largest ones, whatever the model's size.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from stitch_core.checkpoint import Checkpoint
from stitch_core.delta import streamed
from stitch_core.files import PosixFiles
from stitch_core.payload import Payload
from stitch_core.ports import Buffer
from stitch_core.safetensors import ByteArray, TensorRef

from ..layout import spec
from .changes import Change

GROUP_BYTES = 256 << 20


@dataclass(frozen=True)
class Streamed:
    """A delta directory and what it stands for. ``encode``: seconds in encoders, of all threads together."""

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
    workers: int | None = None,
) -> Streamed:
    """Write the delta from the checkpoint in ``base`` to what ``change`` makes of it into ``directory``.

    Version ``base_number`` + 1, in ``encoding`` "xor" or "sparse"; see ``stitch_core.delta.streamed``. Raises
    CheckpointError, DeltaError, OSError.
    """

    def new(name: str, ref: TensorRef, old: ByteArray) -> Buffer:
        return change(spec.Tensor(name, ref.dtype, ref.shape), old).data

    done = streamed.stream_delta(
        Checkpoint.open(base, PosixFiles()), new, directory, encoding=encoding, number=base_number + 1,
        base_number=base_number, group_bytes=group_bytes, workers=workers,
    )  # fmt: skip
    delta = done.delta
    payload = Payload("delta", delta.state, directory, delta.files, delta.base, encoding, delta.changed)
    return Streamed(
        payload,
        tensors=done.tensors,
        bytes=delta.bytes,
        changed_elements=delta.changed_elements,
        elements=delta.elements,
        delta_bytes=sum((directory / name).stat().st_size for name in delta.files),
        encode=done.seconds,
    )
