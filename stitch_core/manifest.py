"""A version is its manifest: canonical JSON, written once, trusted only by its digest from the head.

docs/format.md describes every field. This module does no I/O.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .versions import PolicyVersion, VersionError, check_run_id, directory_name

MANIFEST_FORMAT = "stitch.manifest/1"
HISTORY_ROWS = 64

_SHA256 = re.compile(r"sha256:[0-9a-f]{64}\Z")
_XXH3 = re.compile(r"[0-9a-f]{32}\Z")
_FILE_NAME = re.compile(r"(?!\.)[A-Za-z0-9._-]{1,200}\Z")
_MANIFEST_KEY = re.compile(r"manifests/([0-9]{6,18})\.e([0-9]{4,18})\.json\Z")

_PAYLOAD_KEY = re.compile(r"e([0-9]{4,18})/weight_v([0-9]{6,18})/[^/]+\Z")


class FormatError(ValueError):
    """A head, channel or manifest that is not what it should be. Never means "no version"."""


def bytes_digest(data: bytes) -> str:
    """``sha256:<hex>`` of a file or object."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def canonical_json(value: Any) -> bytes:
    """The one byte form of a JSON document: sorted keys, no blanks, UTF-8, one newline at the end."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode() + b"\n"


# ------------------------------------------------------------------------------------------------ keys


def run_prefix(run: str) -> str:
    return f"runs/{check_run_id(run)}/"


def manifest_key(number: int, epoch: int) -> str:
    """Key of a manifest, relative to its run."""
    return f"manifests/{number:06d}.e{epoch:04d}.json"


def read_manifest_key(key: Any) -> tuple[int, int] | None:
    """(number, epoch) of a manifest's key; None for anything else."""
    match = _MANIFEST_KEY.match(key) if isinstance(key, str) else None
    found = (int(match[1]), int(match[2])) if match else None
    return found if found and manifest_key(*found) == key else None


def payload_prefix(number: int, epoch: int) -> str:
    """Key prefix of a version's files in its run. The epoch keeps a stalled writer's bytes apart."""
    return f"e{epoch:04d}/{directory_name(number)}/"


def read_payload_key(key: str) -> tuple[int, int] | None:
    """(number, epoch) of a payload file's key, relative to its run; None for anything else."""
    match = _PAYLOAD_KEY.match(key)
    found = (int(match[2]), int(match[1])) if match else None
    return found if found and key.startswith(payload_prefix(*found)) else None


# ------------------------------------------------------------------------------------------- manifests


@dataclass(frozen=True)
class Row:
    """A reference to a manifest: what is needed to fetch it, trust it and plan with it."""

    number: int
    key: str
    digest: str
    state: str
    bytes: int

    @property
    def epoch(self) -> int:
        """Of the writer that published it; rows are checked when they are read."""
        found = read_manifest_key(self.key)
        assert found is not None
        return found[1]

    def to_json(self) -> list[Any]:
        return [self.number, self.key, self.digest, self.state, self.bytes]

    @classmethod
    def from_json(cls, value: Any, where: str) -> Row:
        if not isinstance(value, list) or len(value) != 5:
            raise FormatError(f"{where}: expected [number, key, digest, state, bytes], got {value!r}")
        number, key, digest, state, size = value
        found = read_manifest_key(key)
        if found is None or read_count(number, where) != found[0]:
            raise FormatError(f"{where}: {key!r} is not the key of a manifest of version {number}")
        return cls(
            number, key, read_sha256(digest, where), read_sha256(state, where), read_count(size, where)
        )


@dataclass(frozen=True)
class PayloadFile:
    """One payload file. ``sha256`` is ``sha256:<hex>`` of its ``size`` bytes."""

    name: str
    size: int
    sha256: str

    def to_json(self) -> list[Any]:
        return [self.name, self.size, self.sha256]


@dataclass(frozen=True)
class Representation:
    """How the version's bytes are given: nothing (boot), a full checkpoint, or a delta from ``base``.

    ``changed`` maps each tensor in a delta to its old and new xxh3-128; ``encoding`` is "xor", "overwrite" or
    "sparse", whose files say themselves what changes; ``source`` says where the boot checkpoint comes from.
    """

    kind: Literal["boot", "full", "delta"]
    files: tuple[PayloadFile, ...] = ()
    base: str | None = None
    encoding: str | None = None
    changed: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    source: str | None = None

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)

    def to_json(self) -> dict[str, Any]:
        value: dict[str, Any] = {"kind": self.kind, "files": [f.to_json() for f in self.files]}
        if self.kind == "delta":
            value |= {
                "base": self.base,
                "encoding": self.encoding,
                "changed": {name: list(pair) for name, pair in self.changed.items()},
            }
        if self.kind == "boot":
            value["source"] = self.source
        return value


@dataclass(frozen=True)
class Manifest:
    """One version. ``history`` holds the up to 64 versions before it, newest first: row 0 is the parent.

    ``boot`` is version 0 and ``floor`` the newest full (or version 0) from which this version can be
    reached; each is None where the version is that one itself.
    """

    run: str
    number: int
    epoch: int
    state: str
    representation: Representation
    history: tuple[Row, ...] = ()
    boot: Row | None = None
    floor: Row | None = None
    step: int | None = None
    time: float = 0.0
    producer: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def version(self) -> PolicyVersion:
        return PolicyVersion(self.run, self.number)

    @property
    def key(self) -> str:
        """Relative to the run."""
        return manifest_key(self.number, self.epoch)

    @property
    def parent(self) -> Row | None:
        return self.history[0] if self.history else None

    def file_key(self, name: str) -> str:
        """Full key of one of the version's files."""
        return run_prefix(self.run) + payload_prefix(self.number, self.epoch) + name

    def row(self) -> Row:
        """The reference that later manifests and the head make to this one."""
        return Row(self.number, self.key, self.digest(), self.state, self.representation.bytes)

    def digest(self) -> str:
        return self._digest

    @functools.cached_property
    def _digest(self) -> str:
        return bytes_digest(self.encode())

    def encode(self) -> bytes:
        """The manifest's bytes; equal manifests have equal bytes."""
        return canonical_json({
            "format": MANIFEST_FORMAT, "run": self.run, "number": self.number, "epoch": self.epoch,
            "state": self.state, "representation": self.representation.to_json(),
            "history": [row.to_json() for row in self.history],
            "boot": self.boot and self.boot.to_json(), "floor": self.floor and self.floor.to_json(),
            "step": self.step, "time": self.time, "producer": dict(self.producer),
            "metadata": dict(self.metadata),
        })  # fmt: skip

    @classmethod
    def decode(cls, data: bytes, where: str = "manifest") -> Manifest:
        """Read and check a manifest; FormatError names ``where`` and the field."""
        value = read_document(data, MANIFEST_FORMAT, where)
        run = read_run(value, where)
        number, epoch = (
            read_count(value.get("number"), f"{where}: number"),
            read_count(value.get("epoch"), f"{where}: epoch"),
        )
        history = value.get("history")
        if not isinstance(history, list) or len(history) > HISTORY_ROWS:
            raise FormatError(f"{where}: history must be a list of at most {HISTORY_ROWS} rows")
        rows = tuple(Row.from_json(row, f"{where}: history[{i}]") for i, row in enumerate(history))
        numbers = [number, *(row.number for row in rows)]
        if any(later <= earlier for later, earlier in itertools.pairwise(numbers)):
            raise FormatError(f"{where}: history must go down from version {number}, it goes {numbers}")
        representation = read_representation(value.get("representation"), where)
        if (representation.kind == "boot") != (number == 0) or (number == 0) != (not rows):
            raise FormatError(f"{where}: version 0, and only it, is the boot version without a history")
        boot, floor = (
            None if value.get(k) is None else Row.from_json(value[k], f"{where}: {k}")
            for k in ("boot", "floor")
        )
        if (boot is None) != (number == 0) or (boot and boot.number != 0):
            raise FormatError(f"{where}: boot must name version 0, and is null in version 0 alone")
        if (floor is None) != (representation.kind != "delta"):
            raise FormatError(f"{where}: a delta names its floor, a full and version 0 have none")
        if floor and floor.number >= number:
            raise FormatError(f"{where}: floor {floor.number} is not below version {number}")
        step, time = value.get("step"), read_time(value.get("time"), where)
        if step is not None:
            read_count(step, f"{where}: step")
        producer, metadata = value.get("producer"), value.get("metadata")
        if not isinstance(producer, dict) or not isinstance(metadata, dict):
            raise FormatError(f"{where}: producer and metadata must be objects")
        state = read_sha256(value.get("state"), f"{where}: state")
        manifest = cls(
            run, number, epoch, state, representation, rows, boot, floor, step, time, producer, metadata
        )
        if manifest.encode() != data:
            raise FormatError(f"{where}: has fields that {MANIFEST_FORMAT} does not have")
        return manifest


def floor_number(manifest: Manifest) -> int:
    """The number of a version's floor, which may be itself."""
    return manifest.floor.number if manifest.floor else manifest.number


def extend_history(parent: Manifest) -> tuple[Row, ...]:
    """The history of a version whose parent is ``parent``."""
    return (parent.row(), *parent.history)[:HISTORY_ROWS]


# ---------------------------------------------------------------------------------------------- checks


def read_document(data: bytes, format: str, where: str) -> dict[str, Any]:
    """Parse a document of one format. Only its canonical bytes are taken, so a digest names one document."""
    try:
        value = json.loads(data.decode("utf-8"))
        canonical = canonical_json(value)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where}: not JSON ({error})") from None
    if not isinstance(value, dict) or value.get("format") != format:
        found = value.get("format") if isinstance(value, dict) else type(value).__name__
        raise FormatError(f"{where}: expected format {format!r}, found {found!r}")
    if canonical != data:
        raise FormatError(f"{where}: not in canonical form: cut short, or written by something else")
    return value


def read_representation(value: Any, where: str) -> Representation:
    """Check a representation in its JSON form; FormatError names ``where`` and the field."""
    where = f"{where}: representation"
    if not isinstance(value, dict) or value.get("kind") not in ("boot", "full", "delta"):
        raise FormatError(f"{where}: kind must be boot, full or delta")
    kind, listed = value["kind"], value.get("files")
    if not isinstance(listed, list):
        raise FormatError(f"{where}: files must be a list")
    files = []
    for item in listed:
        if not isinstance(item, list) or len(item) != 3:
            raise FormatError(f"{where}: a file must be [name, size, sha256], got {item!r}")
        name, size, sha256 = item
        if not isinstance(name, str) or not _FILE_NAME.match(name):
            raise FormatError(f"{where}: {name!r} is not a file name")
        files.append(
            PayloadFile(name, read_count(size, f"{where}: {name}"), read_sha256(sha256, f"{where}: {name}"))
        )
    if len({file.name for file in files}) != len(files) or (kind == "full") > bool(files):
        raise FormatError(f"{where}: file names must differ, and a full has some")
    if kind == "boot":
        if files or not isinstance(value.get("source"), str):
            raise FormatError(f"{where}: the boot version has a source and no files")
        return Representation("boot", source=value["source"])
    if kind == "full":
        return Representation("full", tuple(files))
    base, encoding, changed = (
        read_sha256(value.get("base"), f"{where}: base"),
        value.get("encoding"),
        value.get("changed"),
    )
    if encoding not in ("xor", "overwrite", "sparse"):
        raise FormatError(f"{where}: unknown delta encoding {encoding!r}")
    if not isinstance(changed, dict):
        raise FormatError(f"{where}: changed must map tensor names to digests")
    if changed and encoding == "sparse":
        raise FormatError(f"{where}: changed is empty where the encoding is sparse")
    for name, pair in changed.items():
        if not (
            isinstance(pair, list)
            and len(pair) == 2
            and all(isinstance(d, str) and _XXH3.match(d) for d in pair)
        ):
            raise FormatError(f"{where}: tensor {name} must have [old, new] xxh3-128 digests, has {pair!r}")
    return Representation(
        "delta", tuple(files), base, encoding, {n: (p[0], p[1]) for n, p in changed.items()}
    )


def read_run(value: dict[str, Any], where: str) -> str:
    try:
        return check_run_id(value.get("run"))
    except VersionError as error:
        raise FormatError(f"{where}: {error}") from None


LONGEST_TIME = 1e11
"""Seconds, 3,000 years: what one can reckon with and write as a date."""


def read_count(value: Any, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
        raise FormatError(f"{where}: expected a non-negative integer, got {value!r}")
    return value


def read_time(value: Any, where: str) -> float:
    """A wall time in a document, in seconds, such that one can reckon with it; FormatError."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= LONGEST_TIME:
        raise FormatError(f"{where}: time must be a number of seconds")
    return value


def read_sha256(value: Any, where: str) -> str:
    if not isinstance(value, str) or not _SHA256.match(value):
        raise FormatError(f"{where}: expected sha256:<64 hex digits>, got {value!r}")
    return value
