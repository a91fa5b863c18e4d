"""From trusted sources of weights to the cheapest plan that turns the weights at hand into a version's.

Works on states, not on numbers: two versions may hold the same weights, and then nothing has to move. A
source is a manifest, a record that stands beside the chain (a full, or a span of merged deltas), or a sketch
of one that was not read yet. Pure; planner.py finds the sources.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from .manifest import Manifest, PayloadFile, Representation, Row
from .versions import PolicyVersion

REVERSIBLE = frozenset({"xor", "sparse"})
"""Encodings that lead from the new weights back to the old ones as well."""


class NoPlan(Exception):
    """No representation that may be used leads to the target."""


class Source(Protocol):
    """Weights that a store can give: where they lie, what they are, what they start from."""

    @property
    def version(self) -> PolicyVersion: ...
    @property
    def state(self) -> str: ...
    @property
    def representation(self) -> Representation: ...
    def digest(self) -> str: ...
    def file_key(self, name: str) -> str: ...


@dataclass(frozen=True)
class Sketch:
    """A source that was not read: what the row or the key that names it tells, and what it mostly is.

    ``of`` is the digest of what it stands for, and ``where`` the key to read that from.
    """

    version: PolicyVersion
    state: str
    representation: Representation
    of: str
    where: str

    @classmethod
    def full(cls, version: PolicyVersion, state: str, size: int, of: str, where: str) -> Sketch:
        """A full of ``size`` bytes."""
        return cls(version, state, Representation("full", _files(size)), of, where)

    @classmethod
    def delta(cls, version: PolicyVersion, base: str, state: str, size: int, of: str, where: str) -> Sketch:
        """A delta of ``size`` bytes that starts from the state ``base``; reversible, as most are."""
        return cls(version, state, Representation("delta", _files(size), base, "xor"), of, where)

    def digest(self) -> str:
        return self.of

    def file_key(self, name: str) -> str:
        raise ValueError(f"{self.where} was not read: nobody knows its files")


def _files(size: int) -> tuple[PayloadFile, ...]:
    return (PayloadFile("?", size, "?"),)


def sketches_of_deltas(run: str, rows: Iterable[Row]) -> list[Sketch]:
    """Versions as what they mostly are: each a delta from the one before it among ``rows``, in any order."""
    known = sorted(rows, key=lambda row: row.number)
    return [
        Sketch.delta(PolicyVersion(run, row.number), base.state, row.state, row.bytes, row.digest, row.key)
        for base, row in itertools.pairwise(known)
    ]


@dataclass(frozen=True)
class Undo:
    """A reversible delta, applied to the weights that it leads to: a delta from those to its base."""

    source: Source

    @property
    def version(self) -> PolicyVersion:
        return self.source.version

    @property
    def state(self) -> str:
        base = self.source.representation.base
        assert base is not None
        return base

    @functools.cached_property
    def representation(self) -> Representation:
        forward = self.source.representation
        changed = {name: (new, old) for name, (old, new) in forward.changed.items()}
        return replace(forward, base=self.source.state, changed=changed)

    def digest(self) -> str:
        return self.source.digest()

    def file_key(self, name: str) -> str:
        return self.source.file_key(name)


@dataclass(frozen=True)
class Plan:
    """Start from ``base`` (a state that the host holds, or None: from ``full``), then apply ``deltas``.

    ``target`` is the version that the result is shown as; its state is what the result must have.
    """

    target: Manifest
    base: str | None
    full: Source | None
    deltas: tuple[Source, ...]

    @property
    def sources(self) -> tuple[Source, ...]:
        """What the plan needs the files of, in the order of use."""
        return ((self.full,) if self.full else ()) + self.deltas

    @property
    def bytes(self) -> int:
        """Bytes to fetch."""
        return sum(source.representation.bytes for source in self.sources)


_Edge = tuple[str | None, Source | None, bool]  # (state before, how, backward)


def cheapest_plan(
    target: Manifest,
    sources: Iterable[Source],
    held: Collection[str],
    excluded: Collection[str] = (),
    piece_cost: int = 0,
) -> Plan:
    """The plan of the least cost; of equals the one with the fewest pieces.

    ``sources`` are trusted ones of the target's run, ``held`` the states that the host can start from at no
    cost, ``excluded`` digests of sources that must not be used. A source costs its bytes and
    ``piece_cost``: what one more piece takes, measured in bytes that could be fetched meanwhile. Reversible
    deltas are also taken backwards. Raises NoPlan.
    """
    steps: dict[str, list[tuple[Source, bool]]] = {}
    best: dict[str, tuple[int, int]] = {}
    came_from: dict[str, _Edge] = {}
    queue: list[tuple[int, int, str]] = []

    def offer(state: str, cost: tuple[int, int], edge: _Edge) -> None:
        if state not in best or cost < best[state]:
            best[state] = cost
            came_from[state] = edge
            heapq.heappush(queue, (*cost, state))

    for state in held:
        offer(state, (0, 0), (None, None, False))
    for source in sources:
        how = source.representation
        if source.digest() in excluded:
            continue
        if how.kind == "full":
            offer(source.state, (how.bytes + piece_cost, 1), (None, source, False))
        elif how.kind == "delta" and how.base is not None:
            steps.setdefault(how.base, []).append((source, False))
            if how.encoding in REVERSIBLE:
                steps.setdefault(source.state, []).append((source, True))

    while queue:
        cost, pieces, state = heapq.heappop(queue)
        if (cost, pieces) != best[state]:
            continue
        if state == target.state:
            return _trace(target, came_from)
        for source, backward in steps.get(state, ()):
            how = source.representation
            reached = how.base if backward and how.base is not None else source.state
            offer(reached, (cost + how.bytes + piece_cost, pieces + 1), (state, source, backward))
    raise NoPlan(
        f"{target.version} cannot be reached: no usable full, and no deltas from what this host holds"
    )


def _trace(target: Manifest, came_from: dict[str, _Edge]) -> Plan:
    deltas: list[Source] = []
    state = target.state
    while True:
        previous, source, backward = came_from[state]
        if source is None:
            return Plan(target, state, None, tuple(reversed(deltas)))
        if previous is None:
            return Plan(target, None, source, tuple(reversed(deltas)))
        deltas.append(Undo(source) if backward else source)
        state = previous
