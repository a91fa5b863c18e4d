"""A store in a directory that every process sees: a local disk, or a shared POSIX mount.

An object is the file of its key's name, whole from the moment it is there: bytes are written and synced
under ``<root>/.stitch/tmp`` first, then linked (create) or renamed (swap) into place, and the directory is
synced before the call returns. A crash at any line leaves the old object or the new one. What changes or
removes an object holds a lock in ``<root>/.stitch/locks``; creating needs none, because link(2) decides.
Where there are no hard links, creating takes that lock too, and renames; ``<root>/.stitch/store.json`` says
which of the two, so that every writer does the same. A store whose directory is gone is an error, and never
looks empty. Names that start with '.' are no keys, so ``.stitch`` is nobody's object.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import hashlib
import os
import secrets
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from ..files import PosixFiles
from ..ports import (
    AlreadyExists,
    Blob,
    Buffer,
    Capabilities,
    Clock,
    Conflict,
    Entry,
    Files,
    FileSource,
    NoStore,
    NotFound,
    RunBlocking,
    Stamp,
    StoreError,
    SystemClock,
    Unavailable,
    WriteRefused,
)
from ..threads import Threads
from . import BadUrl
from .dated import StoreTime
from .identity import FILE, Identity, read_identity
from .keys import BadKey, check_key, check_prefix, check_range
from .mount import Mount
from .probe import can_link, error_text
from .temporaries import Temporaries
from .walk import Odd, list_folders, list_objects

T = TypeVar("T")

PRIVATE = ".stitch"
NOT_POSSIBLE = frozenset({errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP})
"""What a mount answers that lacks what all disks have: in place of a file system it may be a bucket."""

REFUSED = NOT_POSSIBLE | {errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""What comes at once and leaves nothing, when it comes before an object is in its place."""

VANISHED = 16
"""How often a write begins again because others removed its directory while it was empty."""

_LOCKS = 64  # a fixed number, so that deleted keys leave no lock files behind


class LocalStore:
    """The objects under ``root``, which the first write creates. Writing needs flock and rename there.

    Tags are content digests: they hold across hosts whose mounts cache inodes and times, and a store may
    have no weaker ones. Without ``run_blocking`` it has threads of its own, which ``close`` ends.
    """

    def __init__(
        self,
        root: Path,
        files: Files | None = None,
        run_blocking: RunBlocking | None = None,
        *,
        lock_timeout: float = 10.0,
        clock: Clock | None = None,
    ) -> None:
        self.root = Path(os.path.abspath(root))
        self._files: Files = files or PosixFiles()
        self._mount = Mount(self.root, self._files)
        self._threads: Threads | None = None
        if run_blocking is None:
            run_blocking = self._threads = Threads(8, "stitch-local-store")
        self._run: RunBlocking = run_blocking
        self._lock_timeout = lock_timeout
        clock = clock or SystemClock()
        self._temporaries = Temporaries(self.root / PRIVATE / "tmp", self._files, clock, self._make_directory)
        self._time = StoreTime(self._temporaries.date_of_new, clock)
        self._durable: set[Path] = set()
        self._identity: Identity | None = None
        self._looked = False

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities()

    async def load(self, key: str) -> Blob:
        data = await self._reading(self._files.read, key)
        return Blob(data, _tag(data))

    async def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        check_range(start, length)
        return await self._reading(self._files.read, key, start, length)

    async def size(self, key: str) -> int:
        return await self._reading(self._files.size, key)

    async def create(self, key: str, source: Buffer | FileSource) -> None:
        await self._writing(self._create, key, source)

    async def swap(self, key: str, expected: str | None, data: bytes) -> str:
        return await self._writing(self._swap, key, expected, data)

    async def replace(self, key: str, data: bytes) -> None:
        await self._writing(self._replace, key, data)

    async def list(self, prefix: str) -> list[Entry]:
        check_prefix(prefix)
        return await self._run(self._translate_read, self._walk, self.root, list_objects, prefix)

    async def folders(self, prefix: str) -> builtins.list[str]:
        """See BrowsableStore."""
        check_prefix(prefix)
        return await self._run(self._translate_read, self._walk, self.root, list_folders, prefix)

    async def stamp(self, key: str) -> Stamp:
        """See BrowsableStore: both are by who dates the files, on a network mount its server."""
        written = (await self._reading(os.stat, key)).st_mtime
        try:
            return Stamp(written, await self._run(self._time.now))
        except OSError:  # nothing can be written there
            return Stamp(written, None)

    async def room(self) -> int | None:
        """See ``room_of``. Mounts of object stores say that there is none, and take what comes."""
        return await self._run(self._translate_read, self._files.free_bytes, self.root) or None

    async def delete(self, key: str) -> None:
        await self._writing(self._delete, key)

    async def close(self) -> None:
        if self._threads:
            self._threads.close()

    def _path(self, key: str) -> Path:
        return self.root.joinpath(*check_key(key).split("/"))

    async def _reading(self, operation: Callable[..., T], key: str, *args: Any) -> T:
        return await self._run(self._translate_read, operation, self._path(key), *args)

    async def _writing(self, operation: Callable[..., T], key: str, *args: Any) -> T:
        return await self._run(self._translate_write, operation, self._path(key), *args)

    # ------------------------------------------------------------------ blocking, in one thread at a time

    def _create(self, path: Path, source: Buffer | FileSource) -> None:
        self._prepare(path)
        if not self._files.exists(path):  # spares the copy; link() or the lock is what decides
            with self._temporaries.new(source) as temporary:
                lock = contextlib.nullcontext() if self._links() else self._locked(path)
                with lock, contextlib.suppress(FileExistsError):
                    self._place_new(temporary, path)
                    self._landed(path)
                    return
        # The other creator may have died before its sync, and the caller may take its bytes for durable.
        self._files.size(path)
        self._mount.sync_directory(path.parent)
        raise AlreadyExists(f"{path} exists")

    def _swap(self, path: Path, expected: str | None, data: bytes) -> str:
        self._prepare(path)
        with self._locked(path):
            try:
                current = _tag(self._files.read(path))
            except FileNotFoundError:
                current = None
            if current != expected:
                raise Conflict(f"{path} is not as it was read")
            with self._temporaries.new(data) as temporary:
                try:
                    (self._place_new if current is None else self._mount.rename)(temporary, path)
                except FileExistsError:
                    raise Conflict(f"{path} was created meanwhile") from None
            self._landed(path)
        return _tag(data)

    def _replace(self, path: Path, data: bytes) -> None:
        self._prepare(path)
        with self._locked(path):
            with self._temporaries.new(data) as temporary:
                self._mount.rename(temporary, path)
            self._landed(path)

    def _delete(self, path: Path) -> None:
        if not self._files.exists(path) and not path.is_symlink():
            self._check_identity()
            return
        for above in path.parents[: path.parents.index(self.root)]:
            if above.is_symlink():
                raise StoreError(
                    f"{path} is not deleted: {above} is a symbolic link, and what it points to is not below "
                    f"{self.root}"
                )
        with self._locked(path), contextlib.suppress(FileNotFoundError, IsADirectoryError):
            self._files.remove(path)
            self._left(path.parent)
            self._remove_empty(path.parent)

    def _remove_empty(self, directory: Path) -> None:
        """Remove a directory and those above it, as far as they are empty, below the root.

        Whoever is about to put an object there finds its directory gone, and makes it again.
        """
        while directory != self.root:
            self._durable.discard(directory)
            try:
                os.rmdir(directory)
            except OSError:  # not empty, or not ours to remove: it is in nobody's way
                return
            directory = directory.parent

    # ------------------------------------------------------------------------------------------ identity

    def _prepare(self, path: Path) -> None:
        """Everything that a write needs; the first write of all begins the store."""
        if self._identity is None:
            if self._files.exists(self.root):
                self._check_root()
            self._identity = read_identity(self._files, self.root / PRIVATE) or self._begin()
        self._make_directory(path.parent)

    def _begin(self) -> Identity:
        unused = self._temporaries.unused()
        error = can_link(self._files, unused.parent, unused.name)
        if error is not None:
            self._mount.say(
                f"{self.root} has no hard links ({error}): objects are created under a lock instead"
                f"{self._mount.advice}"
            )
        identity = Identity(secrets.token_hex(8), "link" if error is None else "lock")
        path = self.root / PRIVATE / FILE
        with self._locked(path):
            found = read_identity(self._files, path.parent)
            if found is not None:
                return found
            with self._temporaries.new(identity.encode()) as temporary:
                self._mount.rename(temporary, path)
            self._mount.sync_directory(path.parent)
        return identity

    def _check_identity(self) -> None:
        """Raise Unavailable if this directory is no longer the store that it was."""
        if self._identity is None:
            return
        found = read_identity(self._files, self.root / PRIVATE)
        if found is None or found.id != self._identity.id:
            what = "is not there any more" if found is None else "is another one now"
            raise Unavailable(f"the store in {self.root} {what}: was it unmounted or removed?")

    # --------------------------------------------------------------------------------------------- parts

    def _links(self) -> bool:
        return self._identity is None or self._identity.create == "link"

    def _place_new(self, temporary: Path, path: Path) -> None:
        """Create-only; without hard links the caller holds the lock of ``path``. FileExistsError."""
        if not self._links():
            if self._files.exists(path):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
            self._mount.rename(temporary, path)
            return
        self._mount.link(temporary, path)

    def _landed(self, path: Path) -> None:
        """The object is in its place: whatever goes wrong from here on, it may be seen."""
        try:
            self._mount.sync_directory(path.parent)
        except OSError as error:
            raise _unavailable(path, error) from error

    def _left(self, directory: Path) -> None:
        """An object is no longer in the directory, which others may have removed since then."""
        try:
            self._mount.sync_directory(directory)
        except FileNotFoundError as error:
            if directory == self.root:
                raise _unavailable(directory, error) from error
            self._check_identity()
            self._left(directory.parent)
        except OSError as error:
            raise _unavailable(directory, error) from error

    def _make_directory(self, path: Path) -> None:
        """Make a directory and every one above it durable, up to the root or what was there before it."""
        if path in self._durable:
            return
        if path == self.root:
            top = path
            while not self._files.exists(top):
                top = top.parent
            chain = [path, *path.parents]
            new = chain[: chain.index(top)]
        else:
            # What is there may be another process's, which has not synced it yet.
            self._make_directory(path.parent)
            new = [path]
        self._check_identity()  # nothing is begun anew under the name of what was unmounted
        self._files.make_dirs(path)
        for directory in reversed(new):
            self._mount.sync_directory(directory.parent)
        self._durable.add(path)

    @contextlib.contextmanager
    def _locked(self, path: Path) -> Iterator[None]:
        directory = self.root / PRIVATE / "locks"
        self._make_directory(directory)
        number = zlib.crc32(path.relative_to(self.root).as_posix().encode()) % _LOCKS
        with self._mount.lock(directory / f"{number:02d}", self._lock_timeout):
            yield

    def _translate_write(self, operation: Callable[..., T], path: Path, *args: Any) -> T:
        try:
            return self._persist(operation, path, *args)
        except (IsADirectoryError, NotADirectoryError, FileExistsError) as error:
            raise BadKey(f"{path}: an object and a directory cannot have one name") from error
        except OSError as error:
            if isinstance(error, FileNotFoundError):
                self._durable.clear()  # somebody removed directories: the next try makes them again
                self._check_identity()
            if error.errno in REFUSED:
                where = error.filename or path
                advice = self._mount.advice if error.errno in NOT_POSSIBLE else ""
                raise WriteRefused(f"{where} cannot be written ({error_text(error)}){advice}") from error
            raise _unavailable(path, error) from error

    def _persist(self, operation: Callable[..., T], path: Path, *args: Any) -> T:
        """Again where a directory was removed meanwhile, such as one that a delete left empty."""
        for _ in range(VANISHED):
            try:
                return operation(path, *args)
            except FileNotFoundError:
                self._durable.clear()
                self._check_identity()
        return operation(path, *args)

    def _translate_read(self, operation: Callable[..., T], path: Path, *args: Any) -> T:
        try:
            if not self._looked:
                self._identity = self._identity or read_identity(self._files, self.root / PRIVATE)
                self._looked = True
            return operation(path, *args)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            self._check_root()
            raise NotFound(f"{path}: no such object") from error
        except OSError as error:
            raise _unavailable(path, error) from error

    def _check_root(self) -> None:
        """Nothing is an answer only where there is a store."""
        try:
            self._check_identity()
            if self.root.is_dir():
                return
            if self._files.exists(self.root):
                raise NoStore(f"{self.root} is a file: a store is a directory")
        except OSError as error:
            raise _unavailable(self.root, error) from error
        raise NoStore(f"there is no directory {self.root}: is it mounted? The first claim makes a new store")

    def _walk(self, root: Path, walk: Callable[[Path, Files, Odd, str], T], prefix: str) -> T:
        found = walk(root, self._files, self._mount.say, prefix)
        self._check_root()
        return found


def _unavailable(path: Path, error: OSError) -> StoreError:
    if error.errno is None:
        return Unavailable(f"{path}: {error}")
    name = errno.errorcode.get(error.errno, str(error.errno))
    return Unavailable(f"{error.filename or path}: {name} ({error.strerror})")


def _tag(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def open_url(url: str) -> LocalStore:
    """``file:/dir`` or ``file:///dir``; ``file:dir`` is relative to the working directory. Raises BadUrl."""
    parts = urlsplit(url)
    path = unquote(parts.path, errors="surrogateescape")
    if parts.netloc not in ("", "localhost") or parts.query or parts.fragment or not path or "\0" in path:
        raise BadUrl(
            f"{url!r} names no directory of this machine: write file:/path, with ? and # as %3F and %23"
        )
    return LocalStore(Path(path))
