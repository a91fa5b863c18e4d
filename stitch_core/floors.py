"""Raising the floor: which full beside the chain the next manifest may name as its floor.

Only the publisher does, in the manifest that it writes. So a collector that trusts a head's floor never
meets a version that needs what is below.
"""

from __future__ import annotations

from .chain import ChainReader
from .manifest import FormatError, Manifest, Row, floor_number
from .ports import Store, StoreError
from .records import is_whole, list_records, read_record


class FloorRaiser:
    """Finds floors for one run's publisher. ``note`` spares it reading what was published by itself."""

    def __init__(self, store: Store, chain: ChainReader) -> None:
        self._store, self._chain = store, chain
        self._bases: dict[str, str | None] = {}

    def note(self, manifest: Manifest) -> None:
        self._bases[manifest.digest()] = manifest.representation.base

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
            rows = {row.number: row for row in await self._chain.rows(parent)}
            for place in sorted(places, key=lambda place: -place.number):
                row = rows.get(place.number)
                if row is None:
                    continue
                try:
                    record = await read_record(self._store, place)
                except FormatError:
                    continue
                whole = record.state == row.state and is_whole(record, place)
                if whole and await self._leads(parent.run, rows, row, base):
                    return row
        except (StoreError, FormatError):
            pass
        return None

    async def _leads(self, run: str, rows: dict[int, Row], floor: Row, state: str) -> bool:
        """Whether ``state`` is reached from ``floor`` by deltas of versions above it."""
        above = [rows[number] for number in sorted(rows) if number > floor.number]
        while state != floor.state:
            # Each version's base is older than itself: what is above where we are is no use any more.
            while above and above[-1].state != state:
                above.pop()
            if not above:
                return False
            row = above.pop()
            if row.digest not in self._bases:
                self.note(await self._chain.manifest(run, row))
            base = self._bases[row.digest]
            if base is None:
                return False
            state = base
        return True
