"""The deltas of one plan as one step: checked against the table they start from, applied tensor by tensor.

Two kinds of failure are kept apart, because they are answered differently: a delta that is not what its
manifest says is never used again, a damaged copy is rebuilt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..lineage import Source, Undo
from ..ports import Buffer, Files
from ..safetensors import ByteArray, CheckpointError, as_bytes
from ..state import TensorInfo, TensorTable, state_digest, tensor_digest
from .directory import DeltaDirectory
from .one_pass import apply_in_place
from .stream import stream
from .wire import DeltaError


class RepresentationInvalid(Exception):
    """What a manifest names is not what it says it is. ``manifest_digest`` is the one to use no more."""

    def __init__(self, manifest_digest: str, message: str) -> None:
        super().__init__(message)
        self.manifest_digest = manifest_digest


class CopyDamaged(Exception):
    """The bytes that a plan starts from are not what the copy holds them to be."""


@dataclass(frozen=True)
class _Step:
    """What one delta does to one tensor."""

    delta: Source
    directory: DeltaDirectory
    old: str
    new: str


class PlanDeltas:
    """Checks, before any byte is applied, that ``deltas`` in order lead from ``base`` to their states.

    ``final`` is the table that results. Raises RepresentationInvalid.
    """

    def __init__(
        self,
        base: TensorTable,
        deltas: Sequence[Source],
        directory_of: Callable[[Source], Path],
        files: Files,
    ) -> None:
        self.final = dict(base)
        self._steps: dict[str, list[_Step]] = {}
        for delta in deltas:
            directory = open_delta(delta, directory_of(delta), files)
            for name, (old, new) in changes_of(delta, directory).items():
                info = self.final.get(name)
                if info is None:
                    raise _invalid(delta, f"tensor {name} is extra, its base has none of that name")
                if info.digest != old:
                    raise _invalid(delta, f"tensor {name} must be {old} before it, but is {info.digest}")
                self.final[name] = TensorInfo(info.dtype, info.shape, new)
                self._steps.setdefault(name, []).append(_Step(delta, directory, old, new))
            state = state_digest(self.final)
            if state != delta.state:
                raise _invalid(delta, f"its tensors lead to {state}, not to {delta.state}")

    @property
    def names(self) -> frozenset[str]:
        """Tensors in at least one of the deltas."""
        return frozenset(self._steps)

    def compute(self, name: str, old: Buffer, digest: str) -> ByteArray:
        """The final bytes of a tensor, verified; ``old`` are its bytes now, and ``digest`` theirs.

        ``digest`` may be that of any point on the way, as an interrupted apply leaves it. Raises
        RepresentationInvalid, and CopyDamaged when ``old`` does not have that digest.
        """
        steps = self._left(name, digest)
        new = as_bytes(old).copy()
        try:
            digest = apply_in_place(new, name, [step.directory for step in steps])
        except DeltaError:
            digest = ""
        if digest != steps[-1].new:
            _find_fault(name, old, steps)
            raise CopyDamaged(f"tensor {name} was read twice with different bytes")
        return new

    def parts(
        self, name: str, size: int, read: Callable[[int, ByteArray], None], digest: str
    ) -> Iterator[tuple[int, ByteArray, ByteArray]]:
        """As ``compute``, part by part: (start, old bytes, new bytes), valid until the next.

        They are verified when the last part is given; whoever took some before must forget them if this
        raises. ``read`` fills an array with old bytes from an offset on.
        """

        def whole() -> ByteArray:
            old = np.empty(size, np.uint8)
            read(0, old)
            return old

        steps = self._left(name, digest)
        if size == 0 or any(step.directory.index.encoding == "overwrite" for step in steps):
            old = whole()
            new = self.compute(name, old.data, digest)
            if size:
                yield 0, old, new
            return
        try:
            for start, old, new, final in stream(name, size, read, [step.directory for step in steps]):
                if final and final != steps[-1].new:
                    raise DeltaError("another digest")
                yield start, old, new
        except DeltaError:
            self.compute(name, whole().data, digest)  # which finds whose fault it is
            raise CopyDamaged(f"tensor {name} was read twice with different bytes") from None

    def _left(self, name: str, digest: str) -> list[_Step]:
        """The steps that tensor ``name`` of that digest has before it."""
        steps = self._steps[name]
        starts = [i for i, step in enumerate(steps) if step.old == digest]
        if not starts:
            raise CopyDamaged(f"tensor {name} is {digest}, which no step of the plan starts from")
        return steps[starts[-1] :]


def changes_of(delta: Source, directory: DeltaDirectory) -> Mapping[str, tuple[str, str]]:
    """Old and new digest of each tensor in ``delta``, by its manifest, or by its sparse files."""
    if directory.index.encoding != "sparse":
        return delta.representation.changed
    if not isinstance(delta, Undo):
        return directory.changed
    return {name: (new, old) for name, (old, new) in directory.changed.items()}


def reconstruct_base(
    table: TensorTable,
    deltas: Sequence[Source],
    directory_of: Callable[[Source], Path],
    files: Files,
) -> dict[str, TensorInfo]:
    """The table that ``deltas`` start from, given one in which any of them may have been applied already."""
    first: dict[str, str] = {}
    for delta in deltas:
        for name, (old, _) in changes_of(delta, open_delta(delta, directory_of(delta), files)).items():
            first.setdefault(name, old)
    return {name: TensorInfo(t.dtype, t.shape, first.get(name, t.digest)) for name, t in table.items()}


def open_delta(delta: Source, path: Path, files: Files) -> DeltaDirectory:
    """The files of ``delta`` in ``path``, which say what it says. Raises RepresentationInvalid."""
    try:
        directory = DeltaDirectory.open(path, files)
    except (CheckpointError, DeltaError) as error:
        raise _invalid(delta, str(error)) from error
    representation = delta.representation
    if directory.index.encoding != representation.encoding:
        raise _invalid(
            delta, f"its index says {directory.index.encoding}, its manifest {representation.encoding}"
        )
    if representation.encoding == "sparse":
        return directory
    # What a shard says of the new bytes holds for the way forward.
    forward = delta.source if isinstance(delta, Undo) else delta
    changed: Mapping[str, tuple[str, str]] = forward.representation.changed
    for name in sorted(directory.payloads.keys() | changed.keys()):
        if name not in changed:
            raise _invalid(
                delta, f"tensor {name} has a payload, but the manifest does not say that it changes"
            )
        if name not in directory.payloads:
            raise _invalid(delta, f"tensor {name} has no payload, but the manifest says that it changes")
        checksum = directory.payloads[name].checksum
        if directory.index.checksum == "xxh3-128" and checksum != changed[name][1]:
            raise _invalid(
                delta, f"tensor {name} becomes {checksum} by its shard, {changed[name][1]} by the manifest"
            )
    return directory


def _find_fault(name: str, old: Buffer, steps: Sequence[_Step]) -> None:
    """Raise for the step that goes wrong, or for the bytes it starts from."""
    digest = tensor_digest(as_bytes(old).data)
    if digest != steps[0].old:
        raise CopyDamaged(
            f"tensor {name} is {digest}, it was {steps[0].old} when it was last written or read"
        )
    data = as_bytes(old).copy()
    for step in steps:
        where = f"tensor {name} in {step.directory.path}"
        try:
            digest = apply_in_place(data, name, [step.directory])
        except DeltaError as error:
            raise _invalid(step.delta, f"{where}: {error}") from error
        if digest != step.new:
            raise _invalid(step.delta, f"{where} becomes {digest}, the manifest says {step.new}")


def _invalid(source: Source, message: str) -> RepresentationInvalid:
    return RepresentationInvalid(source.digest(), f"{source.version}: {message}")
