"""The cheapest plan for a host, reading as little as it takes to find it.

A manifest's history tells of 64 versions what a plan needs to know of them, and a listing tells it of the
records beside the chain. So the plan is made from sketches, only what it would use is read, and it is made
again where a sketch was wrong.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable

from .chain import PARALLEL_READS, ChainReader
from .lineage import NoPlan, Plan, Sketch, Source, Undo, cheapest_plan, sketches_of_deltas
from .manifest import FormatError, Manifest, Row, floor_number
from .ports import NotFound, Store
from .records import list_records, read_record
from .versions import PolicyVersion

PIECE_COST = 3 << 20
"""Bytes that could be fetched in the time that one more piece takes, by benchmarks/join.py ("piece")."""

FEW = 3
"""A plan of so few pieces is good enough: what is beside the chain is not even listed."""


class Planner:
    """Plans for hosts that follow runs in ``store``. ``piece_cost``: see lineage.cheapest_plan."""

    def __init__(self, store: Store, chain: ChainReader, *, piece_cost: int = PIECE_COST) -> None:
        self._store, self._chain, self._piece_cost = store, chain, piece_cost

    async def plan(self, target: Manifest, held: Collection[str], excluded: Collection[str] = ()) -> Plan:
        """The cheapest way to ``target`` from one of the states ``held``, without the sources ``excluded``.

        What is below the target's floor is used where nothing else leads there, or from a version that is
        held, and may turn out to be gone. Raises NoPlan, NoHead, ChainBroken, Unavailable.
        """
        rows = await self._chain.rows(target, held)
        # What is below the floor may be gone; it is tried where a host that holds such a version lags behind.
        holds = [row.number for row in rows if row.number and row.state in held]
        lowest = min(floor_number(target), max(holds, default=target.number))
        rows = [row for row in rows if row.number >= lowest]
        sources = _sketches(target, rows)
        try:
            plan = cheapest_plan(target, sources.values(), held, excluded, self._piece_cost)
            if len(plan.sources) <= FEW:
                return await self.read(target, rows, sources, held, excluded)
        except NoPlan:
            # A delta may build on an older version than the one that is held, which may be above the target.
            rows += await self._chain.rows(target, number=lowest) + await self._above(target)
        sources = _sketches(target, rows) | sources | await self._beside(target, rows)
        try:
            return await self.read(target, rows, sources, held, excluded)
        except NoPlan:
            rows += await self._chain.rows(target, number=0)
            return await self.read(target, rows, _sketches(target, rows) | sources, held, excluded)

    async def _above(self, target: Manifest) -> list[Row]:
        """The rows of the versions after ``target``."""
        head, _ = await self._chain.head(target.run)
        newest = await self._chain.manifest(target.run, head)
        rows = await self._chain.rows(newest, {target.state})
        return [row for row in rows if row.number > target.number]

    async def _beside(self, target: Manifest, rows: Iterable[Row]) -> dict[str, Source]:
        """Sketches of the records that lead from and to versions that are known."""
        states = {row.number: row.state for row in rows}
        states[0] = target.boot.state if target.boot else target.state
        sketches = [place.sketch(states) for place in await list_records(self._store, target.run)]
        return {sketch.of: sketch for sketch in sketches if sketch is not None}

    async def read(
        self,
        target: Manifest,
        rows: Iterable[Row],
        sources: dict[str, Source],
        held: Collection[str],
        excluded: Collection[str],
    ) -> Plan:
        """The cheapest plan of sources that are read; ``sources``, by digest, become what is read.

        ``rows`` are those of the manifests among them. Raises NoPlan, ChainBroken, Unavailable.
        """
        by_digest = {row.digest: row for row in rows}
        while True:
            plan = cheapest_plan(target, sources.values(), held, excluded, self._piece_cost)
            used = (source.source if isinstance(source, Undo) else source for source in plan.sources)
            unread = [source for source in used if isinstance(source, Sketch)][:PARALLEL_READS]
            if not unread:
                return plan
            found = await asyncio.gather(
                *(self._source(target.run, sketch, by_digest.get(sketch.of)) for sketch in unread)
            )
            for sketch, source in zip(unread, found, strict=True):
                if source is None:
                    del sources[sketch.of]
                else:
                    sources[sketch.of] = source

    async def _source(self, run: str, sketch: Sketch, row: Row | None) -> Source | None:
        """What a sketch stands for; None for a record that is not what it should be, or has lost files."""
        if row is not None:
            return await self._chain.manifest(run, row)
        try:
            record = await read_record(self._store, sketch)
        except (NotFound, FormatError):
            return None
        how, listed = record.representation, sketch.representation
        same_way = (record.run, record.state, how.base) == (run, sketch.state, listed.base)
        return record if same_way and how.bytes == listed.bytes else None


def _sketches(target: Manifest, rows: Iterable[Row]) -> dict[str, Source]:
    """What the versions of ``rows`` mostly are: deltas from the one before, or the target's floor."""
    found: dict[str, Source] = {target.digest(): target}
    floor = floor_number(target)
    known = {row.number: row for row in rows}
    for row in known.values():
        if row.number == floor and row.number not in (0, target.number):
            version = PolicyVersion(target.run, row.number)
            found[row.digest] = Sketch.full(version, row.state, row.bytes, row.digest, row.key)
    for sketch in sketches_of_deltas(target.run, known.values()):
        found.setdefault(sketch.of, sketch)
    return found
