"""Deltas: encodings of one tensor's change, their directories, encoding and applying."""

from .directory import DeltaDirectory, write_delta
from .encoder import DeltaEncoder, EncodedDelta
from .fold import CopyDamaged, PlanDeltas, RepresentationInvalid
from .wire import DeltaError

__all__ = [
    "CopyDamaged",
    "DeltaDirectory",
    "DeltaEncoder",
    "DeltaError",
    "EncodedDelta",
    "PlanDeltas",
    "RepresentationInvalid",
    "write_delta",
]
