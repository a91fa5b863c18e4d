"""A run's pointer and the channels that name a run: small JSON objects, moved by compare-and-swap.

docs/format.md describes every field. This module does no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from .manifest import (
    FormatError,
    Manifest,
    canonical_json,
    read_count,
    read_document,
    read_manifest_key,
    read_run,
    read_sha256,
    run_prefix,
)
from .versions import check_run_id

HEAD_FORMAT = "stitch.head/1"
CHANNEL_FORMAT = "stitch.channel/1"
DEFAULT_CHANNEL = "latest"


def head_key(run: str) -> str:
    return run_prefix(run) + "head"


def channel_key(name: str) -> str:
    return f"channels/{check_run_id(name)}"


@dataclass(frozen=True)
class Head:
    """A run's pointer. ``writer`` is the random nonce of the claim that may move it."""

    number: int
    epoch: int
    key: str
    digest: str
    writer: str
    time: float = 0.0

    def encode(self) -> bytes:
        return canonical_json({
            "format": HEAD_FORMAT, "number": self.number, "epoch": self.epoch, "key": self.key,
            "digest": self.digest, "writer": self.writer, "time": self.time,
        })  # fmt: skip

    @classmethod
    def decode(cls, data: bytes, where: str = "head") -> Head:
        """Read and check a head; FormatError for a truncated one, trailing junk, or anything else."""
        value = read_document(data, HEAD_FORMAT, where)
        number = read_count(value.get("number"), f"{where}: number")
        epoch = read_count(value.get("epoch"), f"{where}: epoch")
        key: Any = value.get("key")
        found = read_manifest_key(key)
        if found is None or found[0] != number or found[1] > epoch:
            raise FormatError(f"{where}: {key!r} is not the key of version {number} up to epoch {epoch}")
        writer: Any = value.get("writer")
        time: Any = value.get("time")
        if not isinstance(writer, str) or not writer:
            raise FormatError(f"{where}: writer is missing")
        if not isinstance(time, int | float) or isinstance(time, bool):
            raise FormatError(f"{where}: time must be a number of seconds")
        return cls(number, epoch, key, read_sha256(value.get("digest"), f"{where}: digest"), writer, time)

    def claimed(self, writer: str, time: float) -> Head:
        """The head as a new claim writes it: same version, next epoch."""
        return replace(self, epoch=self.epoch + 1, writer=writer, time=time)

    def moved(self, manifest: Manifest, time: float) -> Head:
        """The head as the same writer moves it; only ever to a higher number."""
        if manifest.number <= self.number or manifest.epoch != self.epoch:
            raise ValueError(f"a head at {self.number}.e{self.epoch} cannot move to {manifest.key}")
        return replace(self, number=manifest.number, key=manifest.key, digest=manifest.digest(), time=time)


@dataclass(frozen=True)
class Channel:
    """What replicas follow: the newest version of ``run``, or one exact version of it."""

    run: str
    exact: int | None = None

    def encode(self) -> bytes:
        return canonical_json({"format": CHANNEL_FORMAT, "run": self.run, "exact": self.exact})

    @classmethod
    def decode(cls, data: bytes, where: str = "channel") -> Channel:
        """Read and check a channel; FormatError."""
        value = read_document(data, CHANNEL_FORMAT, where)
        exact = value.get("exact")
        return cls(read_run(value, where), None if exact is None else read_count(exact, f"{where}: exact"))
