"""Rolling a run back: a new version above the head with the weights of an older one, and with its own bytes.

What it takes is made ready while the trainer still publishes. Then the run is claimed, which fences the
trainer, and the same swap records the versions above the goal as given up: a supervisor that starts the
trainer again cannot go on from them. Whatever fails or dies, the same rollback can be made again.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from .chain import ChainReader
from .checkout import stage_replanning
from .checkpoint import Checkpoint, CheckpointError
from .delta.directory import DeltaDirectory
from .delta.fold import RepresentationInvalid
from .delta.merge import Changed, compose, merge_deltas, prove_merged
from .delta.sparse_layout import width_of
from .delta.transcode import in_encoding
from .delta.wire import DeltaError
from .fulls import describe_full
from .head import Head
from .host_checkpoint import HostCheckpoint, HostCheckpointError
from .lineage import REVERSIBLE, NoPlan, Source, cheapest_plan, sketches_of_deltas
from .manifest import Manifest, Row, floor_number
from .payload import Payload
from .planner import Planner
from .ports import Clock, Files, NotFound, RunBlocking, Store
from .publisher import Fenced, HeadMoved, OutcomeUnknown, Publisher, PublishError
from .records import RecordRefused, list_records
from .replica.staging import Stager
from .retry import Retry, retrying
from .state import TensorInfo, TensorTable, state_digest
from .stores.transfer import DigestMismatch, download

T = TypeVar("T")

CANNOT = (
    NoPlan, RepresentationInvalid, DeltaError, DigestMismatch, NotFound, HostCheckpointError, CheckpointError,
    RecordRefused,
)  # fmt: skip
"""What speaks against one way, and not against another."""


CLAIMS = 3
"""Tries to claim a head that the trainer moves while a rollback is made ready; the last fences it first."""


class RollbackRefused(PublishError):
    """The run cannot be rolled back as asked; the message says what would help."""


@dataclass(frozen=True)
class RolledBack:
    """``manifest`` is the head now, with the weights of ``goal``; ``given_up`` the range that is not resumed.

    ``proof``: what the bytes were checked against: "manifests" that lead from one to the other, the
    "table" of all tensors, "bytes" of the weights themselves, or "before" if all was done already.
    ``fenced`` is the head before.
    """

    manifest: Manifest
    goal: Manifest
    given_up: tuple[int, int]
    proof: str
    fenced: Head


@dataclass(frozen=True)
class _Known:
    """Weights on this machine: a checkpoint that is some version of the run."""

    manifest: Manifest
    checkpoint: Checkpoint
    table: TensorTable


@dataclass
class Rollback:
    """Rolls back the run of ``publisher``, which has claimed nothing. ``work`` is scratch space.

    ``checkpoint`` is the directory of a checkpoint of any version of the run, if there is one at hand: the
    merged bytes are proven by it, and a full is built from it. ``say`` is told what is going on, and
    ``workers`` threads rebuild a full, by default one for each CPU.
    """

    store: Store
    publisher: Publisher
    work: Path
    files: Files
    clock: Clock
    rng: random.Random
    run_blocking: RunBlocking
    checkpoint: Path | None = None
    say: Callable[[str], None] = lambda _: None
    retry: Retry = field(default_factory=Retry)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    workers: int | None = None

    def __post_init__(self) -> None:
        self._chain = ChainReader(self.store)
        self._planner = Planner(self.store, self._chain)

    async def _call(self, call: Callable[[], Awaitable[T]]) -> T:
        return await retrying(call, self.retry, self.rng)

    async def _find(self, newest: Manifest, wanted: Callable[[Row], bool]) -> Manifest | None:
        return await self._call(lambda: self._chain.find(newest, wanted))

    async def _down_to(self, newest: Manifest, number: int) -> list[Manifest]:
        return await self._call(lambda: self._chain.back_to(newest, number=number, above_floor=False))

    async def to(self, number: int) -> RolledBack:
        """Make the weights of version ``number`` the newest version.

        Raises RollbackRefused, before the trainer is fenced, when there is nothing to do or no way to do
        it; NoHead, and what ``Publisher.take_back`` and ``publish`` raise.
        """
        head, newest = await self._look()
        goal = await self._goal(newest, number)
        if newest.state == goal.state and _is_done(head, newest, goal):
            return RolledBack(newest, goal, (number + 1, newest.history[0].number), "before", head)
        known = await self._look_at(newest)
        claimed, payload, proof = await self._claim(newest, goal, known)
        given_up = (number + 1, claimed.number)
        metadata = {**self.metadata, "rollback": {"to": number, "given_up": list(given_up)}}
        self.say(f"publishing {len(payload.files)} files")
        try:
            manifest = await self.publisher.publish(replace(payload, step=goal.step, metadata=metadata))
        except (Fenced, OutcomeUnknown):
            raise
        except PublishError as error:
            raise PublishError(f"{error}. {_half_done(given_up)}: make it again") from error
        return RolledBack(manifest, goal, given_up, proof, head)

    async def _look(self) -> tuple[Head, Manifest]:
        head, _ = await self._call(lambda: self._chain.head(self.publisher.run))
        return head, await self._call(lambda: self._chain.manifest(self.publisher.run, head))

    async def _claim(
        self, newest: Manifest, goal: Manifest, known: _Known | None
    ) -> tuple[Manifest, Payload, str]:
        """Make the goal ready on top of ``newest``, and claim: the head then, what to publish, its proof.

        If the trainer publishes meanwhile, it is made ready again, and in the end after the claim.
        """
        run = self.publisher.run
        for left in reversed(range(CLAIMS)):
            payload, proof = await self._prepare(newest, goal, known)
            await self.publisher.check(replace(payload, step=goal.step, metadata=self.metadata), newest)
            self.say(f"claiming run {run}, which fences its trainer")
            at = newest if left and payload.kind == "delta" else None
            try:
                claimed = await self.publisher.take_back(goal.number, at=at)
                break
            except HeadMoved:
                _, newest = await self._look()
                self.say(f"the head has moved to {newest.number} meanwhile")
        if claimed.digest() != newest.digest() and payload.kind == "delta":
            self.say(f"the head has moved to {claimed.number} meanwhile")
            try:
                payload, proof = await self._prepare(claimed, goal, known)
            except RollbackRefused as refused:
                half_done = _half_done((goal.number + 1, claimed.number))
                raise RollbackRefused(f"{refused}. {half_done}") from refused
        return claimed, payload, proof

    async def _goal(self, newest: Manifest, number: int) -> Manifest:
        if number == newest.number:
            raise RollbackRefused(f"version {number} is the head of run {newest.run}: nothing to do")
        found = await self._find(newest, lambda row: row.number == number)
        if found is None:
            raise RollbackRefused(
                f"run {newest.run} has no version {number}: its head is {newest.number}, and what it has is "
                "listed by 'stitch versions'"
            )
        return found

    async def _look_at(self, newest: Manifest) -> _Known | None:
        """Which version the checkpoint at hand is."""
        path = self.checkpoint
        if path is None:
            return None
        self.say(f"hashing {path}")
        checkpoint = await self.run_blocking(Checkpoint.open, path, self.files)
        table = await self.run_blocking(checkpoint.table)
        state = state_digest(table)
        found = await self._find(newest, lambda row: row.state == state)
        if found is None:
            raise RollbackRefused(f"{path} is no version of run {newest.run}: its state is {state}")
        return _Known(found, checkpoint, table)

    async def _prepare(self, newest: Manifest, goal: Manifest, known: _Known | None) -> tuple[Payload, str]:
        """What is to be published on top of ``newest``, and how it was proven."""
        why = []
        for name, way in (("delta", self._delta), ("full", self._full)):
            try:
                return await way(newest, goal, known)
            except CANNOT as error:
                why.append(f"no {name} ({error})")
                self.say(why[-1])
        raise RollbackRefused(
            f"there is no way to publish the weights of {goal.version} again: {'; '.join(why)}. Give "
            "--from-checkpoint a checkpoint of that version, or the run's base checkpoint"
        )

    # ------------------------------------------------------------------------------------------- a delta

    async def _delta(self, newest: Manifest, goal: Manifest, known: _Known | None) -> tuple[Payload, str]:
        """Around what is not there any more, or is not what it says it is."""
        unfit: dict[str, Exception] = {}
        while True:
            deltas = await self._path(newest, goal, unfit)
            try:
                return await self._merged(newest, goal, known, deltas, unfit)
            except (NotFound, DigestMismatch, RepresentationInvalid) as error:
                if isinstance(error, RepresentationInvalid):
                    unfit[error.manifest_digest] = error
                if not unfit.keys() & {delta.digest() for delta in deltas}:
                    raise
                self.say(f"looking for another way: {error}")

    async def _merged(
        self,
        newest: Manifest,
        goal: Manifest,
        known: _Known | None,
        deltas: Sequence[Source],
        unfit: dict[str, Exception],
    ) -> tuple[Payload, str]:
        self.say(f"merging {len(deltas)} deltas")
        directories: dict[str, Path] = {}
        for delta in deltas:
            try:
                directories[delta.digest()] = await self._fetch(delta)
            except (NotFound, DigestMismatch) as error:
                unfit[delta.digest()] = error
                raise
        widths = {} if known is None else {n: width_of(info.dtype) for n, info in known.table.items()}
        encoding = _encoding_of(deltas, bool(widths))
        alike, where = await self.run_blocking(in_encoding, encoding, deltas, directories, self.files, widths)
        path = self.work / "merged"
        await self.run_blocking(self.files.remove_tree, path)
        merged = await self.run_blocking(
            lambda: merge_deltas(
                alike, lambda delta: where[delta.digest()], path, self.files,
                number=newest.number + 1, base_number=newest.number,
            )
        )  # fmt: skip
        proof = await self._prove_table(newest, goal, merged.changed, known)
        if known is not None and known.manifest.state in (newest.state, goal.state):
            proof = "bytes"
            await self.run_blocking(lambda: prove_merged(
                DeltaDirectory.open(path, self.files), merged.changed, known.checkpoint, known.table
            ))  # fmt: skip
        payload = Payload("delta", goal.state, path, merged.files, newest.state, encoding, merged.changed)
        return payload, proof

    async def _path(
        self, newest: Manifest, goal: Manifest, unfit: Mapping[str, Exception]
    ) -> tuple[Source, ...]:
        """The cheapest reversible pieces, spans among them, from the head's state to the goal's; NoPlan."""
        spans = await self._call(lambda: list_records(self.store, newest.run, ("spans",)))
        bottom = min(goal.number, floor_number(newest), floor_number(goal))
        for lowest in sorted({goal.number, bottom}, reverse=True):
            rows = await self._call(lambda lowest=lowest: self._chain.rows(newest, number=lowest))  # type: ignore[misc]
            rows = [row for row in rows if row.number >= lowest]
            states = {row.number: row.state for row in rows}
            versions = sketches_of_deltas(newest.run, rows)
            sources: dict[str, Source] = {sketch.of: sketch for sketch in versions}
            sources |= {s.of: s for s in (place.sketch(states) for place in spans) if s is not None}
            with contextlib.suppress(NoPlan):
                return await self._reversible(newest, goal, rows, sources, unfit)
            # A delta may build on another version than the one before it.
            chain = {m.digest(): m for m in await self._down_to(newest, lowest)}
            with contextlib.suppress(NoPlan):
                return await self._reversible(newest, goal, rows, sources | chain, unfit)
        if unfit:
            raise NoPlan("; ".join(dict.fromkeys(str(error) for error in unfit.values())))
        above = await self._down_to(newest, goal.number)
        stops = [m for m in above[:-1] if m.representation.encoding not in REVERSIBLE]
        if stops:
            how = stops[-1].representation
            what = how.kind if how.kind != "delta" else f"delta in {how.encoding}, which goes forward only"
            raise NoPlan(f"version {stops[-1].number}, on the way back, is a {what}")
        raise NoPlan(f"the deltas between version {goal.number} and the head do not meet")

    async def _reversible(
        self,
        newest: Manifest,
        goal: Manifest,
        rows: Sequence[Row],
        sources: dict[str, Source],
        unfit: Collection[str],
    ) -> tuple[Source, ...]:
        excluded = set(unfit)
        while True:
            plan = await self._call(lambda: self._planner.read(goal, rows, sources, {newest.state}, excluded))
            stops = [s for s in plan.sources if s.representation.encoding not in REVERSIBLE]
            if not stops:
                return plan.deltas
            excluded.update(source.digest() for source in stops)

    async def _fetch(self, source: Source) -> Path:
        """The files of one delta, verified."""
        directory = self.work / "fetch" / source.digest().removeprefix("sha256:")[:24]
        await self.run_blocking(self.files.make_dirs, directory)
        for file in source.representation.files:
            await download(
                self.store, source.file_key(file.name), self.files, directory / file.name, file.size,
                file.sha256, run_blocking=self.run_blocking, rng=self.rng, policy=self.retry,
            )  # fmt: skip
        return directory

    async def _prove_table(
        self, newest: Manifest, goal: Manifest, changed: Changed, known: _Known | None
    ) -> str:
        """Compute both states from the whole table, if what is at hand leads to one of them. DeltaError."""
        if known is None:
            return "manifests"
        lowest = min(known.manifest.number, goal.number)
        chain = await self._down_to(newest, lowest)
        back = {name: (new, old) for name, (old, new) in changed.items()}
        for near, far, step in ((newest, goal, changed), (goal, newest, back)):
            try:
                # What a sparse delta changes is said by its files alone.
                deltas = [m for m in chain if m.representation.encoding not in (None, "sparse")]
                way = cheapest_plan(near, deltas, {known.manifest.state}).deltas
            except NoPlan:
                continue
            table = _after(known.table, compose(way))
            for manifest, found in ((near, table), (far, _after(table, step))):
                if state_digest(found) != manifest.state:
                    raise DeltaError(
                        f"the manifests from {known.manifest.version} on lead to {state_digest(found)}, "
                        f"which is not the state of {manifest.version}"
                    )
            return "table"
        return "manifests"

    # -------------------------------------------------------------------------------------------- a full

    async def _full(self, newest: Manifest, goal: Manifest, known: _Known | None) -> tuple[Payload, str]:
        if known is not None and known.manifest.state == goal.state:
            return await self._from(goal, known.checkpoint.directory)
        self.say(f"rebuilding version {goal.number}")
        root = self.work / "host"
        await self.run_blocking(self.files.remove_tree, root)
        host = HostCheckpoint(root, self.files, workers=self.workers)
        stager = Stager(
            self.store, self._chain, host, None, files=self.files, clock=self.clock, rng=self.rng,
            run_blocking=self.run_blocking, activity=self.say,
        )  # fmt: skip
        try:
            await self.run_blocking(host.open)
            if known is not None:
                await self.run_blocking(host.seed, known.checkpoint.directory, known.manifest)
            return await self._from(goal, (await stage_replanning(stager, goal)).directory)
        finally:
            host.close()

    async def _from(self, goal: Manifest, directory: Path) -> tuple[Payload, str]:
        record = await self.run_blocking(describe_full, goal, directory, self.files)
        names = tuple(file.name for file in record.representation.files)
        return Payload("full", goal.state, directory, names), "bytes"


def _encoding_of(deltas: Sequence[Source], widths_known: bool) -> str:
    """That of them all; of two the smaller one, where it is known how wide elements are."""
    found = {delta.representation.encoding or "" for delta in deltas}
    if len(found) < 2:
        return next(iter(found), "xor")
    return "sparse" if widths_known else "xor"


def _half_done(given_up: tuple[int, int]) -> str:
    return (
        f"The trainer is fenced by now, versions {given_up[0]} to {given_up[1]} are given up, and the head "
        "stays where it is until a rollback goes through"
    )


def _is_done(head: Head, newest: Manifest, goal: Manifest) -> bool:
    """Whether the head is a rollback to the goal: all between them is given up, and they are not."""
    between = newest.history[0].number
    given_up = head.abandoned_range(between)
    return given_up is not None and given_up[0] == goal.number + 1 and given_up[1] < newest.number


def _after(table: TensorTable, changed: Changed) -> dict[str, TensorInfo]:
    """The table after a delta; DeltaError for a tensor that is not as the delta needs it."""
    after = dict(table)
    for name, (old, new) in changed.items():
        if name not in table or table[name].digest != old:
            raise DeltaError(f"tensor {name} is {table.get(name)}, and a delta needs {old}")
        after[name] = replace(table[name], digest=new)
    return after
