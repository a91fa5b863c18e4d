"""The compactor: merges the deltas of one run into spans, so that joining does not grow with the run.

It needs no weights. It looks what is missing, has it made (span_maker.py), and retires what newer spans have
replaced. Which spans there ought to be follows from what the store has (spans.py), so any number of
compactors may run, die and start again: spans are create-only, and named by what is in them. A lease, which
is a hint, keeps two from doing the same work. Replaced aggregates go after a grace, counted from when this
process first saw what replaced them, and not while a replica's record says that it fetches them.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from .anchors import Lease
from .chain import ChainReader
from .delta.fold import RepresentationInvalid
from .delta.wire import DeltaError
from .head import head_key
from .hints import fetched
from .lineage import NoPlan, Plan, Sketch, Source
from .manifest import Manifest, Row, floor_number
from .ports import AlreadyExists, Clock, Files, NotFound, RunBlocking, Store, time_of
from .records import Place, Record, list_records
from .retry import Retry, retrying
from .span_maker import EncodingChanges, SpanMaker
from .spans import SHAPE, Range, Shape, newest_aggregate, replaced, wanted
from .stores.transfer import DigestMismatch
from .versions import PolicyVersion

T = TypeVar("T")

GRACE = 3600.0
"""Seconds between a replaced aggregate's replacement and its end."""


@dataclass(frozen=True)
class Made:
    """A span that was made: the bytes of the ``pieces`` that it was merged from, its own, and seconds."""

    record: Record
    pieces: int
    read: int
    seconds: float

    @property
    def bytes(self) -> int:
        return self.record.representation.bytes


@dataclass(frozen=True)
class Pass:
    """One look at a run. ``left``: spans that ought to be there and are not; ``busy``: another makes them."""

    head: int
    root: int
    aggregate: int
    spans: int
    left: tuple[Range, ...]
    busy: bool = False
    made: tuple[Made, ...] = ()
    deleted: tuple[str, ...] = ()
    problems: Mapping[Range, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _View:
    newest: Manifest
    rows: list[Row]
    places: dict[Range, list[Place]]
    low: int
    left: list[Range]

    @functools.cached_property
    def states(self) -> dict[int, str]:
        states = {row.number: row.state for row in self.rows}
        states[0] = self.newest.boot.state if self.newest.boot else self.newest.state
        return states


class Compactor:
    """Compacts one run, with scratch space of its own below ``work``.

    ``widths`` are the element widths of the run's tensors, by name: with them, spans of XOR deltas become
    sparse ones, about half as large, and a run that changed its encoding is merged across the change.
    """

    def __init__(
        self,
        store: Store,
        run: str,
        work: Path,
        name: str,
        *,
        files: Files,
        clock: Clock,
        rng: random.Random,
        run_blocking: RunBlocking,
        grace: float = GRACE,
        policy: Retry | None = None,
        widths: Mapping[str, int] | None = None,
        shape: Shape = SHAPE,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """``name`` tells this process from others; ``say`` is told what is going on."""
        self.root, self._root_state = 0, ""
        self._store, self._run, self._name, self._clock, self._rng = store, run, name, clock, rng
        self._grace, self._policy, self._say = grace, policy or Retry(), say
        self._shape = shape
        self._chain = ChainReader(store)
        self._maker = SpanMaker(
            store, run, work, self._chain, files=files, clock=clock, rng=rng,
            run_blocking=run_blocking, policy=self._policy, widths=widths,
        )  # fmt: skip
        self._failed: dict[Range, str] = {}
        self._needless: set[Range] = set()  # one piece leads over these: the other steps changed nothing
        self._replaced_since: dict[str, float] = {}

    # ------------------------------------------------------------------------------------------- passes

    async def compact(self, stop: Callable[[], bool] = lambda: False) -> Pass:
        """Make what is missing, one span after the other, and delete what was replaced long enough ago.

        A span that cannot be made is noted, and not tried again by this process. Raises NoHead, FormatError,
        StoreError, OSError.
        """
        made: list[Made] = []
        while True:
            view = await self._view()
            if not view.left or stop():
                break
            lease = Lease(self._store, self._run, self._name, self._clock, kind="spans")
            if not await lease.take():
                return self._report(view, made, busy=True)
            async with lease.kept():
                one = await self._make(view, view.left[0])
            if one is not None:
                made.append(one)
                self._say(_told(one))
        deleted = await self._retire(view)
        await self._maker.forget((self.root, view.low))
        return self._report(view, made, deleted=tuple(deleted))

    def _report(
        self, view: _View, made: list[Made], *, busy: bool = False, deleted: tuple[str, ...] = ()
    ) -> Pass:
        spans = sum(len(places) for places in view.places.values())
        return Pass(
            view.newest.number, self.root, view.low, spans, tuple(view.left), busy, tuple(made), deleted,
            dict(self._failed),
        )  # fmt: skip

    async def _view(self) -> _View:
        """What there is and what is missing, by one listing and the rows above the newest aggregate."""
        head, _ = await self._call(lambda: self._chain.head(self._run))
        newest = await self._call(lambda: self._chain.manifest(self._run, head))
        places: dict[Range, list[Place]] = {}
        unfit = self._maker.excluded | self._maker.doubts.damaged()
        for place in await self._call(lambda: list_records(self._store, self._run, ("spans",))):
            if place.since is not None and place.key is not None and place.digest not in unfit:
                places.setdefault((place.since, place.number), []).append(place)
        ends = sorted((b for a, b in places if a == self.root and b <= newest.number), reverse=True)
        for end in [*ends, self.root]:
            rows = await self._call(lambda end=end: self._chain.rows(newest, number=end))  # type: ignore[misc]
            view = _View(newest, rows, places, end, [])
            numbers = sorted(number for number in view.states if number >= end)
            there = {range for range in places if self._sketches_of(view, range)}
            if end == self.root or newest_aggregate(numbers, there, self.root, self._shape) == end:
                break
        left = [
            (a, b)
            for a, b in wanted(numbers, self.root, self._shape)
            if (a, b) not in there | self._failed.keys() | self._needless
            and view.states.get(a) != view.states[b]
        ]
        return replace(view, left=left)

    def _sketches_of(self, view: _View, range: Range) -> list[Sketch]:
        states = view.states
        if self.root and range[0] == self.root and self.root not in states:
            # Its base is below the rows that were read; what is read of it is checked all the same.
            states = {**states, self.root: self._root_state}
        found = (place.sketch(states) for place in view.places.get(range, ()))
        return [sketch for sketch in found if sketch is not None]

    # ------------------------------------------------------------------------------------------ merging

    async def _make(self, view: _View, range: Range) -> Made | None:
        """Merge one span and upload it; None if it cannot be made, which is then remembered."""
        began = self._clock.monotonic()
        try:
            plan = await self._plan(view, range)
            if len(plan.deltas) == 1:
                self._needless.add(range)
                return None
            record, directory = await self._maker.merge(range, plan)
        except NoPlan as error:
            self._give_up(view, range, str(error), error.at if isinstance(error, EncodingChanges) else 0)
            return None
        except (NotFound, DigestMismatch, RepresentationInvalid, DeltaError) as error:
            # The piece comes last from now on, or not again; then there is another way, or none.
            if isinstance(error, DeltaError):
                self._failed[range] = str(error)
            self._say(f"span {range[0]}-{range[1]}: {error}")
            return None
        try:
            await self._maker.upload(record, directory)
        except (AlreadyExists, DigestMismatch) as error:
            self._failed[range] = f"what is there under its name is something else: {error}"
            return None
        return Made(record, len(plan.deltas), plan.bytes, self._clock.monotonic() - began)

    async def _plan(self, view: _View, range: Range) -> Plan:
        """What the span is made of. Raises NoPlan."""
        a, b = range
        by_number = {row.number: row for row in view.rows}
        target = await self._call(lambda: self._chain.manifest(self._run, by_number[b]))
        start = view.states.get(a) or self._root_state
        sources: dict[str, Source] = {}
        for since, number in view.places:
            if since >= a and number <= b:
                sources |= {sketch.of: sketch for sketch in self._sketches_of(view, (since, number))}
        numbers = sorted(n for n in by_number if max(a, view.low) <= n <= b)
        for before, number in itertools.pairwise(numbers):
            row, version = by_number[number], PolicyVersion(self._run, number)
            sources[row.digest] = Sketch.delta(
                version, by_number[before].state, row.state, row.bytes, row.digest, row.key
            )
        return await self._maker.plan(target, by_number.values(), sources, start)

    def _give_up(self, view: _View, range: Range, why: str, at: int) -> None:
        """A block that cannot be merged ends what can: the root is above what stands in the way."""
        a, b = range
        self._failed[range] = why
        by_number = {row.number: row for row in view.rows}
        unfit = [n for n in by_number if a < n <= b and by_number[n].digest in self._maker.excluded]
        floor = floor_number(view.newest)
        root = max([*unfit, floor if b <= floor else 0, at])
        if root > self.root and root in view.states:
            self.root, self._root_state = root, view.states[root]
            self._say(f"no span leads over version {root}: {why}")

    # --------------------------------------------------------------------------------------- what goes

    async def _retire(self, view: _View) -> list[str]:
        """Delete aggregates that were replaced long enough ago and that nobody fetches; their keys."""
        here, old = self._clock.monotonic(), replaced(view.places, self.root, self._shape)
        digests = {place.digest: place for range in old for place in view.places[range]}
        self._replaced_since = {digest: self._replaced_since.get(digest, here) for digest in digests}
        due = [digest for digest, since in self._replaced_since.items() if here - since > self._grace]
        if not due:
            return []
        now = await self._call(lambda: time_of(self._store, head_key(self._run), self._clock))
        needed = await fetched(
            self._store, self._run, now=now, grace=self._grace, policy=self._policy, rng=self._rng
        )
        deleted = []
        for place in (digests[digest] for digest in due if digest not in needed):
            assert place.key is not None
            # The document before the files: nobody is to find a span that has lost them.
            stem = place.key.rpartition("/")[0]
            for key in (place.key, *(f"{stem}/{name}" for name in place.sizes)):
                await self._call(lambda key=key: self._store.delete(key))  # type: ignore[misc]
            deleted.append(stem)
            self._say(f"deleted {stem}: newer aggregates have replaced it")
        return deleted

    async def _call(self, call: Callable[[], Awaitable[T]]) -> T:
        return await retrying(call, self._policy, self._rng)


def _told(made: Made) -> str:
    record = made.record
    return (
        f"span {record.since}-{record.number}: {made.pieces} pieces of {made.read} bytes are one of "
        f"{made.bytes}, {made.seconds:.1f} s"
    )
