"""Receiving: a stock trainer's version directories, applied to a proven copy of the boot checkpoint.

The trainer's numbers mean something only within one of its lives, so versions get a run of our own, named
anew when this process starts and whenever the trainer's numbers do not grow.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

from stitch_core.checkpoint import Checkpoint
from stitch_core.delta.directory import DeltaDirectory
from stitch_core.delta.prove import promised_by, prove_delta
from stitch_core.dialects import INDEX_NAME, SPARSE_SUFFIX, read_index, version_number
from stitch_core.host_checkpoint import HostCheckpoint, RepresentationInvalid
from stitch_core.host_data import copy_files, files_of
from stitch_core.lineage import Plan
from stitch_core.manifest import Manifest, PayloadFile, Representation, extend_history
from stitch_core.ports import FileMarks
from stitch_core.replica.boot import BootCheckpoint
from stitch_core.state import state_digest
from stitch_core.stores.transfer import file_digest
from stitch_core.versions import check_run_id, directory_name


class PullRefused(Exception):
    """The versions asked for cannot be had; nothing has changed."""


class Puller:
    """Owns ``host``. ``roots``: where sources may lie. Synchronous."""

    def __init__(
        self,
        name: str,
        host: HostCheckpoint,
        boot: Path,
        roots: Sequence[Path],
        nonce: Callable[[], str] = lambda: secrets.token_hex(4),
    ) -> None:
        self._name, self._host, self._boot, self._roots, self._nonce = name, host, boot, roots, nonce
        self._files = host.files
        self._current: Manifest | None = None
        self.boot_state: str | None = None
        """What the boot checkpoint must hold; by default the state that it is first found to have."""
        self.boot_marks: FileMarks = {}
        """Of its files, after it was last read."""

    @property
    def host(self) -> HostCheckpoint:
        return self._host

    def boot(self) -> Manifest:
        """Version 0 of a new run: the boot checkpoint, proven again.

        Raises CheckpointError, OSError; PullRefused if it is another than before, and then the host holds
        what it held.
        """
        self._current = None
        self._host.open()
        boot = BootCheckpoint.read(self._boot, self._files, self._host.workers, self._host.progress)
        state = state_digest(boot.table)
        if state != (self.boot_state or state):
            raise PullRefused(
                f"the boot checkpoint {self._boot} is not what this replica started with: its state is "
                f"{state}, it was {self.boot_state}. Put its files back, or start this replica anew"
            )
        run = check_run_id(f"{self._name}.{self._nonce()}")
        manifest = Manifest(run, 0, 1, state, Representation("boot", source=str(self._boot)))
        self._host.seed(self._boot, manifest)
        self._current, self.boot_state, self.boot_marks = manifest, state, boot.marks
        return manifest

    def pull(self, source: Path, target: int) -> Manifest:
        """Hold version ``target`` of ``source``; nothing is done if it is what is held already.

        Raises PullRefused, CheckpointError, DeltaError, HostCheckpointError, RepresentationInvalid, OSError.
        """
        current = self._current or self.boot()
        grows = target > current.number
        if not grows and target == current.number and self._is_same(source, current):
            return current
        steps = self._steps(source, target, current.number if grows else 0)
        if not grows:
            current = self.boot()
        for number, directory in steps:
            current = self._take(number, directory, current)
        return current

    def _is_same(self, source: Path, current: Manifest) -> bool:
        if current.number == 0:
            return True
        directory = self._directory(source, current.number)
        names = [file.name for file in current.representation.files]
        if not all(self._files.exists(directory / name) for name in names):
            return False
        return current.representation.files == self._payload(directory, names)

    def _steps(self, source: Path, target: int, held: int) -> list[tuple[int, Path]]:
        """The versions to take in order: from the newest full, or from the one behind ``held``."""
        steps: list[tuple[int, Path]] = []
        for number in range(target, held, -1):
            directory = self._directory(source, number)
            steps.append((number, directory))
            index = directory / INDEX_NAME
            if not self._files.exists(index):
                break  # a full without an index
            read = read_index(self._files.read(index), str(index))
            if read.kind == "full":
                break
            base = version_number(read.base_version)
            if base is not None and base != number - 1:
                raise PullRefused(f"{directory} builds on version {base}, not on {number - 1}")
        return steps[::-1]

    def _directory(self, source: Path, number: int) -> Path:
        directory = source / directory_name(number)
        if not self._files.exists(directory):
            raise PullRefused(f"{directory} is not there")
        if not inside(directory, self._roots):
            raise PullRefused(f"{directory} lies outside the roots that this replica was given")
        return directory

    def _take(self, number: int, source: Path, parent: Manifest) -> Manifest:
        """One version more on the host, from a copy of its files that nobody else can change.

        What its index does not name is no part of it; see DeltaDirectory and Checkpoint.
        """
        directory = self._host.root / "fetch" / directory_name(number)
        self._files.remove_tree(directory)
        self._files.make_dirs(directory)
        names = _weight_files(self._files.list(source))
        outside = [name for name in names if not inside(source / name, self._roots)]
        if outside:
            raise PullRefused(f"{source / outside[0]} lies outside the roots that this replica was given")
        copy_files(self._files, source, directory, names)
        index = directory / INDEX_NAME
        delta = None
        if INDEX_NAME in names and read_index(self._files.read(index), str(index)).kind == "delta":
            delta = DeltaDirectory.open(directory, self._files)
            changed, state = promised_by(delta, self._host.table) or self._prove(delta)
            files = self._payload(directory, delta.names)
            how = Representation("delta", files, parent.state, delta.index.encoding, changed)
        else:
            full = Checkpoint.open(directory, self._files)
            state, files = full.state(), self._payload(directory, files_of(full))
            how = Representation("full", files)
        manifest = Manifest(
            parent.run, number, 1, state, how, extend_history(parent), parent.boot or parent.row(),
            None if how.kind == "full" else parent.floor or parent.row(),
        )  # fmt: skip
        plan = (
            Plan(manifest, None, manifest, ())
            if how.kind == "full"
            else Plan(manifest, parent.state, None, (manifest,))
        )
        try:
            self._host.apply(plan, lambda _: directory)
        except RepresentationInvalid:
            if delta is not None:
                self._prove(delta)  # tells it in words of the trainer's, who has no manifest
            raise
        self._files.remove_tree(directory)
        self._current = manifest
        return manifest

    def _prove(self, delta: DeltaDirectory) -> tuple[dict[str, tuple[str, str]], str]:
        return prove_delta(delta, Checkpoint.open(self._host.directory, self._files), self._host.table)

    def _payload(self, directory: Path, names: Sequence[str]) -> tuple[PayloadFile, ...]:
        sizes = {name: self._files.size(directory / name) for name in names}
        return tuple(
            PayloadFile(name, size, file_digest(self._files, directory / name, size))
            for name, size in sizes.items()
        )


def inside(path: Path, roots: Sequence[Path]) -> bool:
    """Whether ``path``, with every symbolic link followed, lies in one of ``roots``, which are real paths."""
    real = path.resolve()
    return any(real == root or root in real.parents for root in roots)


def _weight_files(names: Sequence[str]) -> list[str]:
    return [name for name in names if name == INDEX_NAME or name.endswith((".safetensors", SPARSE_SUFFIX))]
