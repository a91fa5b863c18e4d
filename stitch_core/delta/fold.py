"""The deltas of one plan as one step: checked against the table they start from, applied tensor by tensor.

Two kinds of failure are kept apart, because they are answered differently: a delta that is not what its
manifest says is never used again, a damaged copy is rebuilt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..lineage import Source, Undo
from ..ports import Files
from ..safetensors import ByteArray, CheckpointError
from ..state import TensorInfo, TensorTable, state_digest, tensor_digest
from .directory import DeltaDirectory
from .segments import SEGMENT_BYTES, Segments
from .stream import PART_BYTES, Read, digest_after, stream
from .wire import DeltaError

LARGE_BYTES = 4 * SEGMENT_BYTES

Zones = Sequence[tuple[int, str]]
"""What a tensor's bytes are: up to each ascending end, the last one its size, those of the version of it with
that digest."""

_EMPTY = tensor_digest(b"")


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

    def parts(
        self,
        name: str,
        size: int,
        read: Read,
        zones: Zones,
        *,
        original: Read | None = None,
        part_bytes: int = PART_BYTES,
    ) -> Iterator[tuple[int, ByteArray, ByteArray]]:
        """The final bytes of a tensor of ``size`` bytes: (start, old bytes, new bytes), valid until the next.

        They are verified when the last part is given; whoever took some before must forget them if this
        raises: RepresentationInvalid, or CopyDamaged when the old bytes are not what ``zones`` says.
        Whoever writes the new bytes over the old ones gives ``original``, which reads the old ones still.
        """
        low, firsts = self._left(name, zones)
        steps = self._steps[name][low:]
        directories = [step.directory for step in steps]
        try:
            found = stream(name, size, read, directories, zones=firsts, part_bytes=part_bytes)
            for start, old, new, digest in found:
                if digest and digest != steps[-1].new:
                    raise DeltaError("another digest")
                yield start, old, new
            if size == 0 and steps[-1].new != _EMPTY:
                raise DeltaError("another digest")
        except DeltaError as error:
            raise self.fault(name, size, original or read, zones) from error

    def knows(self, name: str, digest: str) -> bool:
        """Whether a step of the plan begins or ends where tensor ``name`` has that digest."""
        return any(digest in (step.old, step.new) for step in self._steps[name])

    def segments(self, name: str, size: int, zones: Zones) -> Segments | None:
        """A large tensor in segments, where all that is left of its deltas is sparse; None if it is not.

        Their DeltaError is one for ``fault``.
        """
        if size < LARGE_BYTES or len(zones) > 1:
            return None
        low, _ = self._left(name, zones)
        steps = self._steps[name][low:]
        if not all(name in step.directory.sparse for step in steps):
            return None
        return Segments(name, size, [step.directory.sparse[name] for step in steps], steps[-1].new)

    def fault(self, name: str, size: int, read: Read, zones: Zones) -> Exception:
        """Why a tensor does not become what it should: RepresentationInvalid, or CopyDamaged."""
        if len(zones) > 1:
            return CopyDamaged(f"tensor {name}, of which a part was written, does not become what it should")
        low, _ = self._left(name, zones)
        return _find_fault(name, size, read, self._steps[name][low:])

    def _left(self, name: str, zones: Zones) -> tuple[int, list[tuple[int, int]]]:
        """The first step that is left for any byte, and for each zone its end and first step, from there."""
        steps, firsts = self._steps[name], []
        for end, digest in zones:
            starts = [i for i, step in enumerate(steps) if step.old == digest]
            if digest == steps[-1].new:
                starts = [len(steps)]
            if not starts:
                raise CopyDamaged(f"tensor {name} is {digest}, which no step of the plan starts from")
            firsts.append((end, starts[-1]))
        low = min(min(first for _, first in firsts), len(steps) - 1)
        return low, [(end, first - low) for end, first in firsts]


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
    representation = delta.representation
    try:
        directory = DeltaDirectory.open(path, files, {file.name for file in representation.files})
    except (CheckpointError, DeltaError) as error:
        raise _invalid(delta, str(error)) from error
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


def _find_fault(name: str, size: int, read: Read, steps: Sequence[_Step]) -> Exception:
    """The first step that goes wrong, or the bytes that they start from."""
    digest = digest_after(name, size, read, [])
    if digest != steps[0].old:
        return CopyDamaged(
            f"tensor {name} is {digest}, it was {steps[0].old} when it was last written or read"
        )
    for i, step in enumerate(steps):
        where = f"tensor {name} in {step.directory.path}"
        try:
            digest = digest_after(name, size, read, [each.directory for each in steps[: i + 1]])
        except DeltaError as error:
            return _invalid(step.delta, f"{where}: {error}")
        if digest != step.new:
            return _invalid(step.delta, f"{where} becomes {digest}, the manifest says {step.new}")
    return CopyDamaged(f"tensor {name} was read twice with different bytes")


def _invalid(source: Source, message: str) -> RepresentationInvalid:
    return RepresentationInvalid(source.digest(), f"{source.version}: {message}")
