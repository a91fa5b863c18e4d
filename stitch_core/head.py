"""A run's pointer and the channels that name a run: small JSON objects, moved by compare-and-swap.

docs/format.md describes every field. This module does no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
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
    read_time,
    run_prefix,
)
from .versions import PolicyVersion, check_run_id

HEAD_FORMAT = "stitch.head/1"
CHANNEL_FORMAT = "stitch.channel/1"
DEFAULT_CHANNEL = "latest"
ABANDONED_RANGES = 64


def head_key(run: str) -> str:
    return run_prefix(run) + "head"


def channel_key(name: str) -> str:
    return f"channels/{check_run_id(name)}"


@dataclass(frozen=True)
class Head:
    """A run's pointer. ``writer`` is the random nonce of the claim that may move it.

    ``abandoned`` are the ranges of versions (first and last, ascending, apart) that rollbacks gave up: no
    trainer goes on from one of them unless it is told to.
    """

    number: int
    epoch: int
    key: str
    digest: str
    writer: str
    time: float = 0.0
    abandoned: tuple[tuple[int, int], ...] = ()

    def encode(self) -> bytes:
        return canonical_json({
            "format": HEAD_FORMAT, "number": self.number, "epoch": self.epoch, "key": self.key,
            "digest": self.digest, "writer": self.writer, "time": self.time,
            "abandoned": [list(pair) for pair in self.abandoned],
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
        if not isinstance(writer, str) or not writer:
            raise FormatError(f"{where}: writer is missing")
        time = read_time(value.get("time"), where)
        digest = read_sha256(value.get("digest"), f"{where}: digest")
        return cls(number, epoch, key, digest, writer, time, _ranges(value.get("abandoned", []), where))

    def claimed(self, writer: str, time: float) -> Head:
        """The head as a new claim writes it: same version, next epoch."""
        return replace(self, epoch=self.epoch + 1, writer=writer, time=time)

    def abandoned_range(self, number: int) -> tuple[int, int] | None:
        """The range of given up versions that ``number`` is in."""
        return next((pair for pair in self.abandoned if pair[0] <= number <= pair[1]), None)

    def going_on_from(self, number: int) -> Head:
        """The head with ``number``, and no other version, no longer given up.

        For a rollback to it, or a trainer that was told to resume at it all the same. What lies around it
        need not be what led to it, so the rest of a range that it is in stays given up.
        """
        parts: list[tuple[int, int]] = []
        for first, last in self.abandoned:
            inside = first <= number <= last
            parts += [(first, number - 1), (number + 1, last)] if inside else [(first, last)]
        return replace(self, abandoned=_joined([pair for pair in parts if pair[0] <= pair[1]]))

    def taken_back(self, to: int) -> Head:
        """The head with every version above ``to`` given up, as a rollback to it records before it starts."""
        here = self.going_on_from(to)
        return replace(here, abandoned=_joined([*here.abandoned, (to + 1, self.number)]))

    def moved(self, manifest: Manifest, time: float) -> Head:
        """The head as the same writer moves it; only ever to a higher number."""
        if manifest.number <= self.number or manifest.epoch != self.epoch:
            raise ValueError(f"a head at {self.number}.e{self.epoch} cannot move to {manifest.key}")
        return replace(self, number=manifest.number, key=manifest.key, digest=manifest.digest(), time=time)


def _joined(ranges: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Ascending and apart. Of more than ABANDONED_RANGES the oldest are joined over the versions between."""
    apart: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if apart and first <= apart[-1][1] + 1:
            apart[-1] = apart[-1][0], max(last, apart[-1][1])
        else:
            apart.append((first, last))
    over = len(apart) - ABANDONED_RANGES
    if over > 0:
        apart[: over + 1] = [(apart[0][0], apart[over][1])]
    return tuple(apart)


def _ranges(value: Any, where: str) -> tuple[tuple[int, int], ...]:
    where = f"{where}: abandoned"
    if not isinstance(value, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        raise FormatError(f"{where} must be a list of [first, last], is {value!r}")
    ranges = [(read_count(first, where), read_count(last, where)) for first, last in value]
    if any(first > last for first, last in ranges) or _joined(ranges) != tuple(ranges):
        raise FormatError(f"{where} must be up to {ABANDONED_RANGES} ascending ranges, is {value!r}")
    return tuple(ranges)


@dataclass(frozen=True)
class Channel:
    """What replicas follow: the newest version of ``run``, or one exact version of it.

    ``mover`` is a fresh nonce of the move: without it a move whose outcome is unknown could land after the
    channel went elsewhere and back. It is no part of what the channel says.
    """

    run: str
    exact: int | None = None
    mover: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"the newest of {self.run}" if self.exact is None else str(PolicyVersion(self.run, self.exact))

    def encode(self) -> bytes:
        return canonical_json(
            {"format": CHANNEL_FORMAT, "run": self.run, "exact": self.exact, "mover": self.mover}
        )

    @classmethod
    def decode(cls, data: bytes, where: str = "channel") -> Channel:
        """Read and check a channel; FormatError."""
        value = read_document(data, CHANNEL_FORMAT, where)
        exact: Any = value.get("exact")
        mover: Any = value.get("mover", "")
        if not isinstance(mover, str):
            raise FormatError(f"{where}: mover must be text, is {mover!r}")
        exact = None if exact is None else read_count(exact, f"{where}: exact")
        return cls(read_run(value, where), exact, mover)
