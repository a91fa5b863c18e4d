"""Floors: what is reached without what is below one, and which full the next manifest may raise it to.

Only the publisher does, in the manifest that it writes. So a collector that trusts a head's floor never
meets a version that needs what is below.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from .chain import PARALLEL_READS, ChainReader
from .manifest import FormatError, Manifest, Row, floor_number
from .ports import Store, StoreError
from .records import is_whole, list_records, read_record


class Bases:
    """Which versions of one run are reached from which; a version's base is read once, or noted."""

    def __init__(self, chain: ChainReader) -> None:
        self._chain = chain
        self._known: dict[str, str | None] = {}

    def note(self, manifest: Manifest) -> None:
        self._known[manifest.digest()] = manifest.representation.base

    async def lead(self, run: str, rows: Iterable[Row], floor: Row, state: str) -> bool:
        """Whether deltas of versions above ``floor``, which ``rows`` list, lead from its state to ``state``.

        Raises ChainBroken, Unavailable.
        """
        above = sorted((row for row in rows if row.number > floor.number), key=lambda row: -row.number)
        places: dict[str, list[int]] = {}
        for i, row in enumerate(above):
            places.setdefault(row.state, []).append(i)
        todo, seen = [state], {state}
        while todo:
            at = todo.pop()
            if at == floor.state:
                return True
            for i in places.get(at, ()):
                if above[i].digest not in self._known:
                    # Most versions build on the one before: what is read next is what comes next.
                    await asyncio.gather(*(self._read(run, row) for row in above[i : i + PARALLEL_READS]))
                base = self._known[above[i].digest]
                if base is not None and base not in seen:
                    seen.add(base)
                    todo.append(base)
        return False

    async def _read(self, run: str, row: Row) -> None:
        if row.digest not in self._known:
            self.note(await self._chain.manifest(run, row))


class FloorRaiser:
    """Finds floors for one run's publisher."""

    def __init__(self, store: Store, chain: ChainReader, bases: Bases) -> None:
        self._store, self._chain, self._bases = store, chain, bases

    async def find(self, parent: Manifest, base: str) -> Row | None:
        """The floor for a delta from ``base`` that follows ``parent``, if it can be higher than the parent's.

        The newest version that has a full record with all its files, and from which ``base`` is reached by
        deltas of later versions only. A store that does not answer raises no floor.
        """
        floor = floor_number(parent)
        if parent.number == floor:
            return None
        try:
            places = await list_records(self._store, parent.run, ("fulls",))
            places = [place for place in places if place.key is not None and place.number > floor]
            if not places:
                return None
            above = await self._chain.rows(parent)
            rows = {row.number: row for row in above}
            for place in sorted(places, key=lambda place: -place.number):
                row = rows.get(place.number)
                if row is None:
                    continue
                try:
                    record = await read_record(self._store, place)
                except FormatError:
                    continue
                whole = record.state == row.state and is_whole(record, place)
                if whole and await self._bases.lead(parent.run, above, row, base):
                    return row
        except (StoreError, FormatError):
            pass
        return None
