"""The verified, crash-safe local copy of one replica: a checkpoint directory that moves with the versions.

    <root>/marker.json       which version the data is, or "from A to B" while it is being changed
    <root>/data-<nonce>/     the checkpoint: shards, index, config, tokenizer
    <root>/weight_v000007    symbolic link to it, there only while the data is that version
    <root>/journal           what is being written into the data right now
    <root>/fetch/            downloads, the reconciler's
    <root>/lock              held by the one process that has the copy open

The marker is a claim and the hash of the data is the proof: nothing is held that was not hashed by this
process. A plan is verified to its last byte before the first is written. Deltas are applied in place
(in_place.py); since XOR must never be applied twice, every tensor's own digest says how far it has come, and
the journal makes sure that it has one, or that it is known how much of it was written. A full is written
beside the data (host_full.py) and takes its place when the marker says so.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import secrets
from collections.abc import Callable
from pathlib import Path

from .applying import Applying
from .checkpoint import Checkpoint, CheckpointError, Progress, untold
from .delta.fold import CopyDamaged, PlanDeltas, RepresentationInvalid, reconstruct_base
from .delta.stream import PART_BYTES
from .host_checks import HostCheckpointError, check_applied, check_fetched, check_target
from .host_data import side_files
from .host_folder import HostFolder
from .host_full import build_full, copy_boot
from .host_marker import Holding, Interrupted, Marker, Partials, partials_from_json
from .in_place import journal_room, record_bound, records
from .journal import Journal
from .lineage import Plan, Source
from .manifest import Manifest
from .parallel import default_workers
from .ports import Files
from .state import TensorInfo, state_digest
from .versions import directory_name

__all__ = ["Holding", "HostCheckpoint", "HostCheckpointError", "Interrupted", "RepresentationInvalid"]


class HostCheckpoint:
    """The copy under ``root``. Synchronous and not thread-safe; every call may raise OSError.

    ``holding`` is what it holds now, ``table`` that version's tensors. When it holds none, ``problem`` says
    why, and ``interrupted`` is set if a plan from the same base can finish what was begun. ``progress`` is
    told how far a call has come that copies or hashes the whole model.
    """

    def __init__(
        self,
        root: Path,
        files: Files,
        *,
        nonce: Callable[[], str] = lambda: secrets.token_hex(8),
        batch_bytes: int | None = None,
        workers: int | None = None,
        part_bytes: int = PART_BYTES,
    ) -> None:
        """``batch_bytes`` bounds a journal's record, and ``workers`` are threads; by default as fits.

        ``part_bytes``, a multiple of 8, are compared and written at a time.
        """
        self.root = root
        self.files = files
        self.holding: Holding | None = None
        self.interrupted: Interrupted | None = None
        self.problem: str | None = "it is not open"
        self.table: dict[str, TensorInfo] = {}
        self.progress: Progress = untold
        self._folder = HostFolder(root, files, nonce)
        self._nonce = nonce
        self._batch_bytes = batch_bytes
        self.workers = workers or default_workers()
        self._part_bytes = part_bytes
        self._partials: Partials = {}
        self._journal = Journal(root / "journal", files)
        self._data: Path | None = None
        self._checkpoint: Checkpoint | None = None
        self._unsettled = True  # what is on disk may differ from what the fields say

    @property
    def directory(self) -> Path:
        """The checkpoint, under the name of the version it holds."""
        if self.holding is None:
            raise HostCheckpointError(f"{self.root} holds no version: {self.problem}")
        return self.root / directory_name(self.holding.version.number)

    # --------------------------------------------------------------------------------- open and close

    def open(self) -> Holding | None:
        """Take the lock, redo what a crash left half done, and hash the data. May be called again.

        HostCheckpointError if another process has it open.
        """
        self._folder.lock()
        return self._recover()

    def close(self) -> None:
        """Give the lock back; closing twice is fine."""
        self._folder.unlock()
        self._hold_none("it is not open")

    # --------------------------------------------------------------------------------------- recovery

    def _settle(self) -> None:
        """Make the fields true again after a call that failed half way."""
        if not self._folder.locked:
            raise HostCheckpointError(f"{self.root} is not open")
        if self._unsettled:
            self._recover()

    def _recover(self) -> Holding | None:
        self._unsettled = True
        self._partials = {}
        self._hold_none("it is empty")
        self._data = self._checkpoint = None
        marker = None
        try:
            marker = self._folder.marker()
        except CheckpointError as error:
            self.problem = str(error)
        self._folder.unlink()
        self._folder.clean(keep=marker.data if marker else None)
        self._journal.create()
        self.files.sync(self.root)
        if marker is not None:
            self._data = self.root / marker.data
            self._prove(self._data, marker)
        self._unsettled = False
        return self.holding

    def _prove(self, data: Path, marker: Marker) -> None:
        """Finish what the journal holds, and find out by hashing which version the data is."""
        try:
            if marker.target is not None:
                self._redo(marker, data)
            self._checkpoint = Checkpoint.open(data, self.files)
            table = self._checkpoint.table(self.workers, self.progress)
        except (ValueError, FileNotFoundError) as error:  # ValueError also from writing past a file's end
            self._hold_none(f"its data is damaged: {error}")
            return
        state = state_digest(table)
        for holding in filter(None, (marker.target, marker.held)):
            if state == holding.state:
                self._hold(self._checkpoint, table, holding)
                return
        if marker.target is None:
            self._hold_none(f"its data is not {marker.held.version}: state {state}, not {marker.held.state}")
        else:
            self._interrupt(marker)
            self.table = table

    def _redo(self, marker: Marker, data: Path) -> None:
        """Carry out the journal's record, if it is one of this marker's, and note what is partial then."""
        note = self._journal.redo(marker.tag, data, workers=self.workers)
        self._partials = marker.partials if note is None else partials_from_json(note["partials"])
        if self._partials != marker.partials:  # which the next record is not to take away
            self._folder.write_marker(dataclasses.replace(marker, partials=self._partials))

    # ------------------------------------------------------------------------------------------- seed

    def seed(self, source: Path, version0: Manifest) -> Holding:
        """Copy the boot checkpoint at ``source`` and prove that it is version 0 of its run.

        HostCheckpointError if it is not, and then what was held is held still.
        """
        self._settle()
        try:
            boot = Checkpoint.open(source, self.files)
            with self._folder.new_data() as data:
                self._adopt(*copy_boot(boot, data, version0, self.workers, self.progress), version0)
        except CheckpointError as error:
            raise HostCheckpointError(f"the base checkpoint at {source} cannot be used: {error}") from error
        return self._held()

    # ------------------------------------------------------------------------------------------ apply

    def apply(self, plan: Plan, directory_of: Callable[[Source], Path]) -> Holding:
        """Move to the plan's target; ``directory_of`` says where a source's verified files lie.

        RepresentationInvalid names the manifest to use no more; the copy is then as it was. After a
        HostCheckpointError or an OSError see ``holding`` and ``interrupted``.
        """
        self._settle()
        for source in plan.sources:
            check_fetched(source, directory_of(source), self.files)
        if plan.full is not None:
            self._apply_full(plan, plan.full, directory_of)
        elif self._has(plan):
            assert self._checkpoint is not None
            self._hold(self._checkpoint, self.table, Holding.of(plan.target))
        else:
            self._apply_in_place(plan, directory_of)
        return self._held()

    def room_needed(self, plan: Plan) -> int:
        """Bytes of disk, at most, that fetching and applying the plan takes beside what is there now."""
        need = plan.bytes
        if plan.full is not None:
            return need + plan.full.representation.bytes + sum(self._sides().values())
        if self._checkpoint is None:
            return need
        names = {name for delta in plan.deltas for name in delta.representation.changed}
        if any(delta.representation.encoding == "sparse" for delta in plan.deltas):
            names |= self._checkpoint.tensors.keys()  # what is in sparse files is known when they are there
        sizes = [ref.nbytes for name, ref in self._checkpoint.tensors.items() if name in names]
        return need + max(0, journal_room(sizes, self._bound(), self._part_bytes) - self._journal.size())

    def _bound(self) -> int:
        """Bytes of one record of the journal, about."""
        tensors = self._checkpoint.tensors.values() if self._checkpoint else ()
        return self._batch_bytes or record_bound(sum(ref.nbytes for ref in tensors))

    def _apply_in_place(self, plan: Plan, directory_of: Callable[[Source], Path]) -> None:
        held, base = self._base_of(plan, directory_of)
        checkpoint, data = self._checkpoint, self._data
        assert checkpoint is not None
        assert data is not None
        try:
            deltas = PlanDeltas(base, plan.deltas, directory_of, self.files)
            check_target(plan, deltas)
            marker = Marker(data.name, held, Holding.of(plan.target), self._nonce(), self._partials)
            applying = Applying(
                checkpoint, deltas, self.table, self.workers, self._partials, self._part_bytes
            )
            with contextlib.closing(records(applying, self._journal, marker.tag, self._bound())) as sealed:
                for i, record in enumerate(sealed):
                    if i == 0:
                        self._begin(marker)
                    if self._journal.redo(marker.tag, data, workers=self.workers) is None:
                        raise OSError(
                            errno.EIO, "the journal is not what was written into it", str(self.root)
                        )
                    self.table.update((name, deltas.final[name]) for name in record.done)
                    for name in record.partials:
                        self.table[name] = dataclasses.replace(self.table[name], digest="")
                    if record.partials != marker.partials:
                        marker = dataclasses.replace(marker, partials=record.partials)
                        self._folder.write_marker(marker)
        except (CopyDamaged, CheckpointError) as error:
            self._hold_none(f"its data is damaged: {error}")
            raise HostCheckpointError(f"{self.root} holds none: {self.problem}") from error
        check_applied(self.table, plan.target)
        self._hold(checkpoint, self.table, Holding.of(plan.target))

    def _begin(self, marker: Marker) -> None:
        """From now on the data is neither version, until the marker says that it is the target."""
        self._unsettled = True
        self._interrupt(marker)
        self._folder.write_marker(marker)
        self._folder.unlink()

    def _has(self, plan: Plan) -> bool:
        """Whether the data has the target's state already, and no delta is left that could say otherwise."""
        if self.holding is None or self.holding.state != plan.target.state:
            return False
        return not plan.deltas or plan.base != self.holding.state

    def _base_of(
        self, plan: Plan, directory_of: Callable[[Source], Path]
    ) -> tuple[Holding, dict[str, TensorInfo]]:
        """What the plan starts from, and that version's table."""
        if self.holding is not None and self.holding.state == plan.base:
            return self.holding, self.table
        if self.interrupted is None or not self.interrupted.fits(plan):
            has = self.holding.state if self.holding else f"none ({self.problem})"
            raise HostCheckpointError(f"the plan starts from {plan.base}, {self.root} holds {has}")
        base = reconstruct_base(self.table, plan.deltas, directory_of, self.files)
        if state_digest(base) != plan.base:
            version = self.interrupted.base.version
            self._hold_none(f"the step from {version} was interrupted and cannot be finished by this plan")
            raise HostCheckpointError(f"{self.root} holds none: {self.problem}")
        return self.interrupted.base, base

    def _apply_full(self, plan: Plan, full: Source, directory_of: Callable[[Source], Path]) -> None:
        with self._folder.new_data() as data:
            built = build_full(
                plan, full, data, directory_of, self.files,
                sides=[self._data / name for name in self._sides()] if self._data else (),
                present=self._checkpoint.tensors if self._checkpoint else None,
                workers=self.workers, part_bytes=self._part_bytes, progress=self.progress,
            )  # fmt: skip
            self._adopt(*built, plan.target)

    def _sides(self) -> dict[str, int]:
        """Files beside the weights in the data, with their sizes."""
        if self._data is None or not self.files.exists(self._data):
            return {}
        return side_files(self.files, self._data)

    # -------------------------------------------------------------------------------------- the copy

    def _adopt(self, checkpoint: Checkpoint, table: dict[str, TensorInfo], manifest: Manifest) -> None:
        """Make a proven, synced directory the data, in place of the present one."""
        self.files.sync(checkpoint.directory)
        self.files.sync(self.root)
        self._hold(checkpoint, table, Holding.of(manifest))
        self._folder.clean(keep=checkpoint.directory.name)

    def _hold(self, checkpoint: Checkpoint, table: dict[str, TensorInfo], holding: Holding) -> None:
        """The data is this version: say so in the marker, and show it under its name."""
        self._unsettled = True
        data = checkpoint.directory
        self._folder.write_marker(Marker(data.name, holding))
        self._folder.link(holding.version.number, data.name)
        self._data, self._checkpoint, self.table = data, checkpoint, dict(table)
        self.holding, self.interrupted, self.problem, self._partials = holding, None, None, {}
        self._unsettled = False

    def _hold_none(self, problem: str) -> None:
        self.holding = self.interrupted = None
        self.problem = problem
        self.table = {}

    def _interrupt(self, marker: Marker) -> None:
        assert marker.target is not None
        self.holding = None
        self.interrupted = Interrupted(marker.held, marker.target)
        self.problem = f"the step from {marker.held.version} to {marker.target.version} did not end"

    def _held(self) -> Holding:
        assert self.holding is not None
        return self.holding
