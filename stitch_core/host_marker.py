"""The host checkpoint's marker file: which version the data is, or between which two it stands."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .delta.fold import Zones
from .lineage import Plan
from .manifest import Manifest, canonical_json
from .safetensors import CheckpointError, load_json_object
from .versions import PolicyVersion, VersionError

FORMAT = "stitch.host/1"


@dataclass(frozen=True)
class Holding:
    """A version that the copy holds."""

    version: PolicyVersion
    manifest_digest: str
    state: str

    @classmethod
    def of(cls, manifest: Manifest) -> Holding:
        return cls(manifest.version, manifest.digest(), manifest.state)

    def to_json(self) -> dict[str, Any]:
        version = self.version
        return {
            "run": version.run,
            "number": version.number,
            "manifest": self.manifest_digest,
            "state": self.state,
        }

    @classmethod
    def from_json(cls, value: Any) -> Holding:
        version = PolicyVersion(value["run"], value["number"])
        return cls(version, _text(value["manifest"]), _text(value["state"]))


@dataclass(frozen=True)
class Interrupted:
    """An apply that did not end: some tensors are the base's, the others the target's."""

    base: Holding
    target: Holding

    @property
    def base_state(self) -> str:
        return self.base.state

    def fits(self, plan: Plan) -> bool:
        """Whether the plan may go on from here: one with a full always, deltas only from the same base."""
        return plan.full is not None or (plan.base == self.base.state and bool(plan.deltas))


Partials = Mapping[str, Zones]
"""Tensors of which only a part was written."""


def partials_to_json(partials: Partials) -> dict[str, Any]:
    return {name: [list(zone) for zone in zones] for name, zones in partials.items()}


def partials_from_json(value: Any) -> Partials:
    """ValueError, TypeError or AttributeError if it is no such thing."""
    partials = {}
    for name, rows in value.items():
        zones = [(int(end), _text(digest)) for end, digest in rows]
        if not zones or any(a >= b for (a, _), (b, _) in itertools.pairwise([(0, ""), *zones])):
            raise ValueError(f"the parts of tensor {name} do not ascend")
        partials[name] = zones
    return partials


@dataclass(frozen=True)
class Marker:
    """``data`` is the directory's name. With ``target`` the data is being moved there from ``held``, by the
    journal's records of ``tag``; ``partials`` is what they had come to before the present one.
    """

    data: str
    held: Holding
    target: Holding | None = None
    tag: str = ""
    partials: Partials = field(default_factory=dict)

    def encode(self) -> bytes:
        return canonical_json({
            "format": FORMAT, "data": self.data, "held": self.held.to_json(),
            "target": self.target and self.target.to_json(), "tag": self.tag,
            "partials": partials_to_json(self.partials),
        })  # fmt: skip

    @classmethod
    def decode(cls, data: bytes, where: str) -> Marker:
        """Read a marker; CheckpointError."""
        value = load_json_object(data, where)
        try:
            if value["format"] != FORMAT:
                raise ValueError(f"format {value['format']!r}")
            name, target = _text(value["data"]), value["target"]
            if "/" in name or not name.startswith("data-"):
                raise ValueError(f"{name!r} is not a data directory")
            held, partials = Holding.from_json(value["held"]), partials_from_json(value.get("partials", {}))
            return cls(
                name, held, target and Holding.from_json(target), _text(value["tag"]),
                partials,
            )  # fmt: skip
        except (AttributeError, KeyError, TypeError, ValueError, VersionError) as error:
            raise CheckpointError(f"{where}: not a marker of this format ({error})") from None


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not text")
    return value
