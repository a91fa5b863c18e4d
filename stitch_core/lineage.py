"""From trusted manifests to the cheapest plan that turns the weights at hand into a version's.

Works on states, not on numbers: two versions may hold the same weights, and then nothing has to move.
Pure; the reader of the chain is in chain.py.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from .manifest import Manifest


class NoPlan(Exception):
    """No representation that may be used leads to the target."""


@dataclass(frozen=True)
class Plan:
    """Start from ``base`` (a state that the host holds, or None: from ``full``), then apply ``deltas``.

    ``target`` is the version that the result is shown as; its state is what the result must have.
    """

    target: Manifest
    base: str | None
    full: Manifest | None
    deltas: tuple[Manifest, ...]

    @property
    def sources(self) -> tuple[Manifest, ...]:
        """The manifests whose files the plan needs, in the order of use."""
        return ((self.full,) if self.full else ()) + self.deltas

    @property
    def bytes(self) -> int:
        """Bytes to fetch."""
        return sum(source.representation.bytes for source in self.sources)


def cheapest_plan(
    target: Manifest,
    chain: Iterable[Manifest],
    held: Collection[str],
    excluded: Collection[str] = (),
) -> Plan:
    """The plan that fetches the fewest bytes; of equals the one with the fewest pieces.

    ``chain`` are trusted manifests of the target's run (the target's own among them), ``held`` the states
    that the host can start from at no cost, ``excluded`` digests of manifests whose representation must
    not be used. Raises NoPlan.
    """
    usable = [m for m in chain if m.digest() not in excluded]
    deltas_from: dict[str, list[Manifest]] = {}
    best: dict[str, tuple[int, int]] = {}
    came_from: dict[str, tuple[str | None, Manifest | None]] = {}
    queue: list[tuple[int, int, str]] = []

    def offer(state: str, cost: tuple[int, int], previous: str | None, source: Manifest | None) -> None:
        if state not in best or cost < best[state]:
            best[state] = cost
            came_from[state] = (previous, source)
            heapq.heappush(queue, (*cost, state))

    for manifest in usable:
        if manifest.representation.kind == "delta" and manifest.representation.base is not None:
            deltas_from.setdefault(manifest.representation.base, []).append(manifest)
    for state in held:
        offer(state, (0, 0), None, None)
    for manifest in usable:
        if manifest.representation.kind == "full":
            offer(manifest.state, (manifest.representation.bytes, 1), None, manifest)

    while queue:
        size, pieces, state = heapq.heappop(queue)
        if (size, pieces) != best[state]:
            continue
        if state == target.state:
            return _trace(target, came_from)
        for delta in deltas_from.get(state, ()):
            offer(delta.state, (size + delta.representation.bytes, pieces + 1), state, delta)
    raise NoPlan(
        f"{target.version} cannot be reached: no usable full, and no deltas from what this host holds"
    )


def _trace(target: Manifest, came_from: dict[str, tuple[str | None, Manifest | None]]) -> Plan:
    deltas: list[Manifest] = []
    state = target.state
    while True:
        previous, source = came_from[state]
        if source is None:
            return Plan(target, state, None, tuple(reversed(deltas)))
        if previous is None:
            return Plan(target, None, source, tuple(reversed(deltas)))
        deltas.append(source)
        state = previous
