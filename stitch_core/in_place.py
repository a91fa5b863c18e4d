"""Carries a plan out in a copy's own files, by records of a redo journal that are bounded."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace

from .applying import Applying, Piece
from .delta.fold import Zones
from .host_marker import Partials, partials_to_json
from .journal import Journal, Record

BATCH_BYTES = 64 << 20
BATCH_SHARE = 110
"""The journal's bound: below 1 % of the model with what else is in it, and ``BATCH_BYTES`` for small ones."""


def record_bound(model_bytes: int) -> int:
    """Bytes of one record of the journal, about, for a model of that size."""
    return max(BATCH_BYTES, model_bytes // BATCH_SHARE)


def journal_room(sizes: Sequence[int], bound: int, part_bytes: int) -> int:
    """Bytes, at most, that the journal takes while tensors of these ``sizes`` in bytes are written.

    ``bound`` and ``part_bytes`` are those of ``records``. Beside the tensors' bytes a record has what it says
    of each.
    """
    total = sum(sizes)
    # A record ends after the part with which it passes the bound.
    return min(total, bound + part_bytes) + 200 * len(sizes) + total // 10_000


@dataclass
class Sealed:
    """What a record leads to: tensors that are final once it is carried out, and those that are partial."""

    done: list[str] = field(default_factory=list)
    partials: dict[str, Zones] = field(default_factory=dict)


def records(applying: Applying, journal: Journal, tag: str, bound: int) -> Generator[Sealed, None, None]:
    """Records of about ``bound`` bytes, durable, one by one; a large tensor may take several.

    All that is left of the plan is verified before the first is given; what does not fit it is computed
    again, as the records come. The caller carries one out, notes in ``applying.table`` what is final and that
    what is partial has no digest, and makes the latter durable before it asks for the next. Raises what
    ``applying`` raises.
    """
    filling = _Filling(journal.record(tag), applying.partials)
    applying.wish.writes = True
    with contextlib.closing(applying.writes(applying.todo())) as pieces:
        for piece in pieces:
            if applying.wish.writes:
                filling.add(piece, applying.deltas.final[piece.name].digest)
                applying.wish.writes = filling.record.size < bound
    sealed = filling.seal()
    yield sealed
    applying = replace(applying, partials=sealed.partials)
    applying.wish.writes = True
    filling = _Filling(journal.record(tag), sealed.partials)
    with contextlib.closing(applying.writes(applying.todo())) as pieces:
        for piece in pieces:
            filling.add(piece, applying.deltas.final[piece.name].digest)
            if filling.record.size >= bound:
                sealed = filling.seal()
                yield sealed
                filling = _Filling(journal.record(tag), sealed.partials)
    if filling.begun:
        yield filling.seal()


class _Filling:
    """A record that is being made, where ``partials`` is what there is already."""

    def __init__(self, record: Record, partials: Partials) -> None:
        self.record = record
        self.begun = False
        self._sealed = Sealed(partials=dict(partials))

    def add(self, piece: Piece, final: str) -> None:
        self.begun = True
        if piece.write is not None:
            self.record.add([piece.write])
        if piece.last:
            self._sealed.done.append(piece.name)
            self._sealed.partials.pop(piece.name, None)
        else:
            left = [zone for zone in piece.before if zone[0] > piece.end]
            self._sealed.partials[piece.name] = [(piece.end, final), *left]

    def seal(self) -> Sealed:
        self.record.seal({"partials": partials_to_json(self._sealed.partials)})
        return self._sealed
