"""Payload files by digest in a directory that the replicas of one host share. A convenience, never needed.

    objects/<hex>          a file's bytes; whole once it has this name
    objects/.<id>.<hex>    one that is being written
    leases/<id>.json       what a process needs or is about to add; it counts while leases/<id>.lock is locked
    used.json              when each file was last wanted
    lock                   held by whoever changes one of the above, except to add an object it has room for

Nothing here is synced or trusted: what is read is digested, what is wrong is removed. A process that dies at
any line leaves an old or a new state, and its lease ends with it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from ..files import PosixFiles
from ..ports import Clock, Files, SystemClock, write_atomic
from .sources import CHUNK

T = TypeVar("T")

LOCK_SECONDS = 10.0
DEFAULT_BYTES = 50_000_000_000


class DigestCache:
    """At most ``limit`` bytes of files under ``root``, evicted least recently wanted first.

    Never evicted: what a live process is fetching, and what it fetched for the version it has now. Owned by
    one process, whose unique name is ``nonce``; ``take`` and ``put`` may be called from any thread, one file
    in one at a time. No method raises OSError: a cache that fails is one that has nothing, and ``problem``
    says why. Digests are ``sha256:<hex>``.
    """

    def __init__(
        self,
        root: Path,
        limit: int,
        files: Files,
        clock: Clock,
        *,
        nonce: str,
        lock_seconds: float = LOCK_SECONDS,
    ) -> None:
        self.root, self.limit = root, limit
        self.problem: str | None = None
        self.hits = self.misses = 0
        self._files, self._clock, self._id, self._lock_seconds = files, clock, nonce, lock_seconds
        self._alive: contextlib.ExitStack | None = None
        self._held: dict[str, int] = {}
        self._wanted: dict[str, int] = {}
        self._admitted: set[str] = set()

    def begin(self, wanted: Mapping[str, int]) -> set[str]:
        """Keep the files ``wanted`` (digest to bytes) from being evicted, and make room for the new ones.

        Returns the digests of those that other live processes are about to add; see ``coming``. May be called
        again before ``done``.
        """
        self._wanted = {_name(digest): size for digest, size in wanted.items()}
        self._admitted = set()

        def prepare() -> set[str]:
            with self._changing():
                there = self._sizes()
                protected, pending = self._others()
                protected |= self._held.keys() | self._wanted.keys()
                used = self._last_used()
                admitted = self._make_room(there, protected, pending, used)
                now = self._clock.time()
                used = {name: time for name, time in used.items() if name in there or name in pending}
                used.update(dict.fromkeys(self._wanted, now))
                self._write(self.root / "used.json", used)
                self._lease(admitted)
                self._admitted = set(admitted)
                return self._digests(pending.keys() - there.keys())

        return self._guarded(prepare, set())

    def coming(self) -> set[str]:
        """Digests of wanted files that are not here, and that other live processes are about to add."""

        def look() -> set[str]:
            with self._changing():
                pending = self._others()[1]
                return self._digests(pending.keys() - set(self._files.list(self.root / "objects")))

        return self._guarded(look, set())

    def done(self, *, needed: bool) -> None:
        """The fetch has ended. ``needed``: from now on what it wanted is what this process has and keeps."""
        if needed:
            self._held = self._wanted
        self._wanted, self._admitted = {}, set()

        def settle() -> bool:
            with self._changing():
                self._lease({})
            return True

        if not self._guarded(settle, False):
            self._end_lease()  # or others would wait for what it does not add any more

    def take(self, digest: str, size: int, path: Path) -> bool:
        """Put the file at ``path``, verified and durable; False if it is not here, then it is not there."""
        took = self._guarded(lambda: self._take(_name(digest), size, path), False)
        self.hits, self.misses = self.hits + took, self.misses + (not took)
        return took

    def put(self, digest: str, source: Path) -> None:
        """Add a file that is known to have this digest, if ``begin`` found room for it."""
        name = _name(digest)
        if name not in self._admitted:
            return
        temporary = self.root / "objects" / f".{self._id}.{name}"

        def add() -> bool:
            try:
                self._files.write_new(temporary, b"")
                for offset, data in self._pieces(source):
                    self._files.write_at(temporary, offset, data)
                self._files.rename(temporary, self.root / "objects" / name)
                return True
            except OSError:
                with contextlib.suppress(OSError):
                    self._files.remove(temporary)
                raise

        if not self._guarded(add, False):
            self._admitted = set()  # a full disk would be met by every file

    def close(self) -> None:
        """End this process's lease."""
        if self._alive is None:
            return

        def leave() -> None:
            with self._files.lock(self.root / "lock", self._lock_seconds):
                self._forget(self._id)

        self._guarded(leave, None)
        self._end_lease()

    def _end_lease(self) -> None:
        alive, self._alive = self._alive, None
        if alive is not None:
            alive.close()

    def _digests(self, names: Iterable[str]) -> set[str]:
        return {f"sha256:{name}" for name in names if name in self._wanted}

    # ------------------------------------------------------------------------------------------- parts

    def _guarded(self, action: Callable[[], T], failed: T) -> T:
        try:
            return action()
        except OSError as error:
            self.problem = f"the cache {self.root} cannot be used: {error}"
            return failed

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        for folder in ("objects", "leases"):
            self._files.make_dirs(self.root / folder)
        with self._files.lock(self.root / "lock", self._lock_seconds):
            if self._alive is None:
                with contextlib.ExitStack() as stack:
                    lock = self.root / "leases" / f"{self._id}.lock"
                    stack.enter_context(self._files.lock(lock, 0.0))
                    self._alive = stack.pop_all()
            yield

    def _take(self, name: str, size: int, path: Path) -> bool:
        source, part = self.root / "objects" / name, path.with_name(path.name + ".part")
        if not self._files.exists(source):
            return False
        found, length = hashlib.sha256(), 0
        with contextlib.suppress(FileNotFoundError):
            self._files.remove(part)
        self._files.write_new(part, b"")
        for offset, data in self._pieces(source):
            self._files.write_at(part, offset, data)
            found.update(data)
            length += len(data)
        if found.hexdigest() != name or length != size:
            self._files.remove(part)
            with contextlib.suppress(FileNotFoundError):
                self._files.remove(source)
            if length >= size:  # what it took is free for the right ones
                self._admitted.add(name)
            self.problem = f"the cache {self.root} had wrong bytes under {name}: removed"
            return False
        self._files.sync(part)
        self._files.rename(part, path)
        self._files.sync(path.parent)
        return True

    def _pieces(self, path: Path) -> Iterator[tuple[int, bytes]]:
        offset = 0
        while data := self._files.read(path, offset, CHUNK):
            yield offset, data
            offset += len(data)

    def _sizes(self) -> dict[str, int]:
        """Objects and their bytes, after removing what processes that died were writing."""
        sizes: dict[str, int] = {}
        folder = self.root / "objects"
        for name in self._files.list(folder):
            with contextlib.suppress(FileNotFoundError):
                if not name.startswith("."):
                    sizes[name] = self._files.size(folder / name)
                elif self._is_dead(name[1:].rpartition(".")[0]):
                    self._files.remove(folder / name)
        return sizes

    def _others(self) -> tuple[set[str], dict[str, int]]:
        """What other live processes need, and what they are about to add. Leases of dead ones are removed."""
        needed: set[str] = set()
        pending: dict[str, int] = {}
        for file in self._files.list(self.root / "leases"):
            who, _, kind = file.rpartition(".")
            if kind != "lock" or who == self._id:
                continue
            if self._is_dead(who):
                self._forget(who)
                continue
            lease = self._read(self.root / "leases" / f"{who}.json")
            needed.update(str(name) for name in lease.get("needed", ()))
            pending.update({str(name): int(size) for name, size in lease.get("pending", {}).items()})
        return needed, pending

    def _is_dead(self, who: str) -> bool:
        if who == self._id:
            return False
        path = self.root / "leases" / f"{who}.lock"
        if not self._files.exists(path):
            return True
        try:
            with self._files.lock(path, 0.0):
                return True
        except TimeoutError:
            return False

    def _forget(self, who: str) -> None:
        for kind in ("json", "lock"):
            with contextlib.suppress(FileNotFoundError):
                self._files.remove(self.root / "leases" / f"{who}.{kind}")

    def _make_room(
        self, there: dict[str, int], protected: set[str], pending: dict[str, int], used: dict[str, float]
    ) -> dict[str, int]:
        """Evict what need be from ``there``; the wanted files that fit now."""
        coming = {name: size for name, size in pending.items() if name not in there}
        evictable = sorted(
            there.keys() - protected, key=lambda name: (used.get(name, 0.0), name), reverse=True
        )
        total, spare = sum(there.values()) + sum(coming.values()), sum(there[name] for name in evictable)
        while total > self.limit and evictable:  # the limit may be smaller than it was
            total, spare = total - there[evictable[-1]], spare - there[evictable[-1]]
            self._evict(evictable.pop(), there)
        admitted: dict[str, int] = {}
        for name, size in self._wanted.items():
            if name in there or name in coming or total - spare + size > self.limit:
                continue
            while total + size > self.limit:
                total, spare = total - there[evictable[-1]], spare - there[evictable[-1]]
                self._evict(evictable.pop(), there)
            admitted[name] = size
            total += size
        return admitted

    def _evict(self, name: str, there: dict[str, int]) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._files.remove(self.root / "objects" / name)
        del there[name]

    def _lease(self, pending: Mapping[str, int]) -> None:
        needed = sorted(self._held.keys() | self._wanted.keys())
        self._write(self.root / "leases" / f"{self._id}.json", {"needed": needed, "pending": dict(pending)})

    def _last_used(self) -> dict[str, float]:
        return {str(k): float(v) for k, v in self._read(self.root / "used.json").items()
                if isinstance(v, int | float)}  # fmt: skip

    def _read(self, path: Path) -> dict[str, Any]:
        """A JSON object, empty if there is none that can be read."""
        try:
            value = json.loads(self._files.read(path))
        except (FileNotFoundError, ValueError):
            return {}
        return value if isinstance(value, dict) else {}

    def _write(self, path: Path, value: Mapping[str, Any]) -> None:
        write_atomic(self._files, path, json.dumps(value).encode(), nonce=f".{self._id}")


def opened_cache(root: Path | None, limit: int) -> DigestCache | None:
    """The cache of a directory of this machine for this process; None without one."""
    if root is None:
        return None
    nonce = f"{os.getpid()}-{secrets.token_hex(6)}"
    return DigestCache(root, limit, PosixFiles(), SystemClock(), nonce=nonce)


def _name(digest: str) -> str:
    """The hexadecimal part, which manifests have checked."""
    return digest.removeprefix("sha256:")
