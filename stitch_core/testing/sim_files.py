"""The file system of one simulated machine, in memory, which keeps apart what is written and what is durable.

The death of a process loses nothing that was written. The death of the machine keeps or loses each change
that was not synced, by chance and page by page: what POSIX allows is what happens here.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ..ports import Buffer
from .faults import Faults, Moment
from .process import SimulatedProcess

MOST_LINKS = 16

_changes = itertools.count()


class _Inode:
    """``number`` is its own, ``changed`` another one after each change of it or of its name."""

    def __init__(self) -> None:
        self.number = self.changed = next(_changes)

    def touch(self) -> None:
        self.changed = next(_changes)


class _File(_Inode):
    """``unsynced``: the writes since the last sync, which a crash may undo."""

    def __init__(self) -> None:
        super().__init__()
        self.data = bytearray()
        self.durable = b""
        self.unsynced: list[tuple[int, bytes]] = []

    def write(self, offset: int, data: bytes) -> None:
        self.touch()
        self.data[offset : offset + len(data)] = data
        self.unsynced.append((offset, data))

    def sync(self) -> None:
        self.durable = bytes(self.data)
        self.unsynced.clear()


class _Link(_Inode):
    def __init__(self, target: str) -> None:
        super().__init__()
        self.target = target


class _Directory(_Inode):
    """``unsynced``: changes to the entries since the last sync, each a list of (name, node or None)."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: dict[str, _Node] = {}
        self.durable: dict[str, _Node] = {}
        self.unsynced: list[list[tuple[str, _Node | None]]] = []

    def change(self, *changes: tuple[str, _Node | None]) -> None:
        """Atomic: after a crash all of ``changes`` are there, or none."""
        self.touch()
        _set(self.entries, changes)
        self.unsynced.append(list(changes))

    def sync(self) -> None:
        self.durable = dict(self.entries)
        self.unsynced.clear()


_Node = _File | _Link | _Directory


class SimulatedMachine:
    """One disk, and the processes that run on it. What is below a ``volatile`` path is RAM, lost in a crash.

    ``page`` is the unit, in bytes, in which a crash keeps or loses what was written. ``capacity`` limits the
    bytes in files. ``operations`` counts changes to files; set ``crash_at`` to die at one of them, and
    ``crash_host`` for the machine to die with the process. ``on_change`` is told of every change.
    """

    def __init__(
        self,
        name: str,
        faults: Faults,
        *,
        volatile: Sequence[Path] = (),
        page: int = 4096,
        capacity: int | None = None,
    ) -> None:
        self.name = name
        self.faults = faults
        self.volatile = tuple(volatile)
        self.page = page
        self.capacity = capacity
        self.operations = 0
        self.on_change: Callable[[SimulatedProcess, str, Path], None] = lambda process, what, path: None
        self.crash_at: tuple[int, Moment] | None = None
        self.crash_host = False
        self.processes: list[SimulatedProcess] = []
        self.root = _Directory()
        self.locks: dict[str, SimulatedProcess] = {}

    def files(self, process: SimulatedProcess) -> SimulatedFiles:
        """This machine's files as ``process`` sees them."""
        if process not in self.processes:
            self.processes = [p for p in self.processes if not p.dead]
            self.processes.append(process)
        return SimulatedFiles(self, process)

    def crash(self) -> None:
        """Kill every process here, lose what is in RAM and, by chance, what was not synced."""
        self.faults.trace.add(f"{self.name}: the machine crashes")
        for process in self.processes:
            process.kill()
        self.processes = []
        self.locks.clear()
        self._lose(self.root)
        for path in self.volatile:
            node: _Node | None = self.root
            for part in path.parts[1:]:
                node = node.entries.get(part) if isinstance(node, _Directory) else None
            if isinstance(node, _Directory):
                node.entries, node.durable = {}, {}

    def settle(self) -> None:
        """Make all that is there durable."""
        _sync_below(self.root)

    def used(self) -> int:
        """Bytes in files."""
        return _bytes_below(self.root, set())

    def _lose(self, directory: _Directory) -> None:
        chance = self.faults.random.choice((0.0, 0.5, 0.9, 1.0))
        for changes in directory.unsynced:
            if self.faults.random.random() < chance:
                _set(directory.durable, changes)
        directory.entries = dict(directory.durable)
        directory.unsynced.clear()
        for node in directory.entries.values():
            if isinstance(node, _Directory):
                self._lose(node)
            elif isinstance(node, _File):
                self._lose_pages(node, chance)

    def _lose_pages(self, file: _File, chance: float) -> None:
        kept = bytearray(file.durable)
        for offset, data in file.unsynced:
            for start in range(0, len(data), self.page):
                if self.faults.random.random() < chance:
                    at, piece = offset + start, data[start : start + self.page]
                    kept.extend(bytes(max(0, at - len(kept))))
                    kept[at : at + len(piece)] = piece
        file.data = kept
        file.sync()


class SimulatedFiles:
    """A ports.Files. Every change is a point where the process, or the machine, may die."""

    def __init__(self, machine: SimulatedMachine, process: SimulatedProcess) -> None:
        self._machine = machine
        self._process = process

    # ------------------------------------------------------------------------------------- looking

    def read(self, path: Path, offset: int = 0, length: int | None = None) -> bytes:
        if offset < 0 or (length is not None and length < 0):
            raise ValueError(f"{path}: cannot read {length} bytes at {offset}")
        data = self._file(path).data
        return bytes(data[offset:] if length is None else data[offset : offset + length])

    def read_into(self, path: Path, offset: int, out: memoryview) -> int:
        data = self.read(path, offset, out.nbytes)
        out[: len(data)] = data
        return len(data)

    def size(self, path: Path) -> int:
        return len(self._file(path).data)

    def exists(self, path: Path) -> bool:
        try:
            self._find(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def list(self, path: Path) -> list[str]:
        node = self._find(path)
        if not isinstance(node, _Directory):
            raise _error(errno.ENOTDIR, path)
        return sorted(node.entries)

    def mark(self, path: Path) -> tuple[int, ...]:
        way: builtins.list[_Inode] = []
        way.append(self._find(path, way=way))
        return tuple(number for node in way for number in (node.number, node.changed))

    def free_bytes(self, path: Path) -> int:
        self._find(path)
        capacity = self._machine.capacity
        return 2**50 if capacity is None else max(0, capacity - self._machine.used())

    # ------------------------------------------------------------------------------------ changing

    def write_new(self, path: Path, data: Buffer) -> None:
        directory, name = self._parent(path)
        if name in directory.entries:
            raise _error(errno.EEXIST, path)
        file, data = _File(), bytes(data)

        def write(part: bytes) -> None:
            directory.change((name, file))
            file.write(0, part)

        self._write("write_new", path, data, write)

    def write_at(self, path: Path, offset: int, data: Buffer) -> None:
        file, data = self._file(path), bytes(data)
        if not 0 <= offset <= len(file.data):
            raise ValueError(f"{path}: writing at {offset} would leave a hole")
        self._write("write_at", path, data, lambda part: file.write(offset, part))

    def sync(self, path: Path) -> None:
        node = self._find(path)
        assert not isinstance(node, _Link)
        self._change("sync", path, node.sync)

    def rename(self, source: Path, target: Path) -> None:
        old, old_name = self._parent(source)
        new, new_name = self._parent(target)
        if old_name not in old.entries:
            raise _error(errno.ENOENT, source)
        node, there = old.entries[old_name], new.entries.get(new_name)
        if isinstance(there, _Directory) and (there.entries or not isinstance(node, _Directory)):
            raise _error(errno.ENOTEMPTY if there.entries else errno.EISDIR, target)
        if isinstance(node, _Directory) and there is not None and not isinstance(there, _Directory):
            raise _error(errno.ENOTDIR, target)

        def move() -> None:
            if old is new:
                old.change((old_name, None), (new_name, node))
            else:
                new.change((new_name, node))
                old.change((old_name, None))
            node.touch()

        self._change("rename", target, move)

    def link(self, source: Path, target: Path) -> None:
        file = self._file(source)
        self._add("link", target, file)

    def symlink(self, target: str, path: Path) -> None:
        self._add("symlink", path, _Link(target))

    def make_dirs(self, path: Path) -> None:
        for above in [*reversed(path.parents), path]:
            try:
                node = self._find(above)
            except FileNotFoundError:
                self._add("make_dirs", above, _Directory())
            else:
                if not isinstance(node, _Directory):
                    raise _error(errno.EEXIST, above)

    def remove(self, path: Path) -> None:
        directory, name = self._parent(path)
        if name not in directory.entries:
            raise _error(errno.ENOENT, path)
        if isinstance(directory.entries[name], _Directory):
            raise _error(errno.EISDIR, path)
        self._change("remove", path, lambda: directory.change((name, None)))

    def remove_tree(self, path: Path) -> None:
        try:
            directory, name = self._parent(path)
        except FileNotFoundError:
            return
        node = directory.entries.get(name)
        if node is None:
            return
        if isinstance(node, _Link):
            self.remove(path)
            return
        if isinstance(node, _File):
            raise _error(errno.ENOTDIR, path)
        # In no particular order, as a directory is read.
        below = list(node.entries)
        self._machine.faults.random.shuffle(below)
        for entry in below:
            child = path / entry
            (self.remove_tree if isinstance(node.entries[entry], _Directory) else self.remove)(child)
        self._change("remove_tree", path, lambda: directory.change((name, None)))

    @contextlib.contextmanager
    def lock(self, path: Path, timeout: float) -> Iterator[None]:
        """Time does not pass inside a synchronous call: what is locked now stays so until ``timeout``."""
        directory, name = self._parent(path)
        locks, key = self._machine.locks, str(path)
        holder = locks.get(key)
        if holder is not None and not holder.dead:
            raise TimeoutError(f"{path} is locked by {holder.name}")
        if name not in directory.entries:
            directory.change((name, _File()))
        locks[key] = self._process
        try:
            yield
        finally:
            if locks.get(key) is self._process:
                del locks[key]

    # ----------------------------------------------------------------------------------- internals

    def _add(self, what: str, path: Path, node: _Node) -> None:
        directory, name = self._parent(path)
        if name in directory.entries:
            raise _error(errno.EEXIST, path)
        self._change(what, path, lambda: directory.change((name, node)))

    def _write(self, what: str, path: Path, data: bytes, write: Callable[[bytes], None]) -> None:
        faults, free = self._machine.faults, self.free_bytes(path.parent)
        if len(data) > free or faults.hit(faults.plan.disk_full):
            faults.trace.add(f"{self._process.name}: no space for {what} {path.name}")
            write(data[: min(free, faults.random.randrange(len(data) + 1))])
            raise _error(errno.ENOSPC, path)

        def write_some() -> None:
            write(data[: faults.random.randrange(len(data) + 1)])

        self._change(what, path, lambda: write(data), write_some)

    def _change(
        self, what: str, path: Path, effect: Callable[[], None], partly: Callable[[], None] | None = None
    ) -> None:
        """Carry out one change, unless the process dies before, in, or right after it."""
        self._process.check()
        machine = self._machine
        moment = machine.faults.crash_moment()
        if machine.crash_at is not None and machine.crash_at[0] == machine.operations:
            moment = machine.crash_at[1]
        machine.operations += 1
        machine.on_change(self._process, what, path)
        if moment == "partial" and partly is not None:
            partly()
        elif moment in (None, "after"):
            effect()
        if moment is not None:
            machine.faults.trace.add(f"{self._process.name}: dies {moment} {what} {path.name}")
            if machine.crash_host or machine.faults.hit(machine.faults.plan.host_crash):
                machine.crash()
            self._process.crash()

    def _file(self, path: Path) -> _File:
        node = self._find(path)
        if isinstance(node, _File):
            return node
        raise _error(errno.EISDIR, path)

    def _parent(self, path: Path) -> tuple[_Directory, str]:
        node = self._find(path.parent)
        if not isinstance(node, _Directory):
            raise _error(errno.ENOTDIR, path)
        return node, path.name

    def _find(self, path: Path, links: int = 0, way: builtins.list[_Inode] | None = None) -> _Node:
        """The file or directory at a path, links followed and put into ``way``."""
        self._process.check()
        node: _Node = self._machine.root
        parts = path.parts
        if not parts or parts[0] != "/":
            raise ValueError(f"{path} is not absolute")
        for i, part in enumerate(parts[1:], 1):
            if not isinstance(node, _Directory):
                raise _error(errno.ENOTDIR, path)
            if part not in node.entries:
                raise _error(errno.ENOENT, path)
            node = node.entries[part]
            if isinstance(node, _Link):
                if links >= MOST_LINKS:
                    raise _error(errno.ELOOP, path)
                real = Path(os.path.normpath(Path(*parts[:i], node.target)), *parts[i + 1 :])
                if way is not None:
                    way.append(node)
                return self._find(real, links + 1, way)
        return node


def _set(entries: dict[str, _Node], changes: Sequence[tuple[str, _Node | None]]) -> None:
    for name, node in changes:
        if node is None:
            entries.pop(name, None)
        else:
            entries[name] = node


def _sync_below(directory: _Directory) -> None:
    directory.sync()
    for node in directory.entries.values():
        if isinstance(node, _Directory):
            _sync_below(node)
        elif isinstance(node, _File):
            node.sync()


def _bytes_below(directory: _Directory, seen: set[int]) -> int:
    total = 0
    for node in directory.entries.values():
        if isinstance(node, _Directory):
            total += _bytes_below(node, seen)
        elif isinstance(node, _File) and id(node) not in seen:
            seen.add(id(node))
            total += len(node.data)
    return total


def _error(code: int, path: Path) -> OSError:
    return OSError(code, os.strerror(code), str(path))
