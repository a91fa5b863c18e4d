"""The host checkpoint's marker file: which version the data is, or between which two it stands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True)
class Marker:
    """``data`` is the directory's name. With ``target`` the data is being moved there from ``held``, by the
    journal's records of ``tag``.
    """

    data: str
    held: Holding
    target: Holding | None = None
    tag: str = ""

    def encode(self) -> bytes:
        return canonical_json({
            "format": FORMAT, "data": self.data, "held": self.held.to_json(),
            "target": self.target and self.target.to_json(), "tag": self.tag,
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
            held = Holding.from_json(value["held"])
            return cls(name, held, target and Holding.from_json(target), _text(value["tag"]))
        except (KeyError, TypeError, ValueError, VersionError) as error:
            raise CheckpointError(f"{where}: not a marker of this format ({error})") from None


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not text")
    return value
