"""What a directory can really do. Some mounts (FUSE, SMB, FAT, 9p) have no hard links, no file locks, or
cannot make a directory's entries durable; they say so only when asked to do it.
"""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..ports import Files, WriteRefused


class Unsupported(WriteRefused):
    """The directory cannot do what a store needs. Another try will not help."""


NOT_THERE = frozenset({errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL})
"""What a filesystem without an operation answers to it."""

NO_LINKS = NOT_THERE | {errno.EPERM, errno.EMLINK}
"""The same for link(2): EPERM is POSIX' answer, and what FAT and most FUSE mounts give."""

NO_LOCKS = NOT_THERE | {errno.ENOLCK}
NO_DIRECTORY_SYNC = NOT_THERE | {errno.EBADF}


@dataclass(frozen=True)
class Abilities:
    """Each an error's text where the directory cannot, else None. ``sync_seconds``: one fsync of 4 KiB."""

    links: str | None
    locks: str | None
    directory_sync: str | None
    rename: str | None
    exact_names: str | None
    sync_seconds: float

    @property
    def limits(self) -> tuple[str, ...]:
        """What is missing, and what follows, one sentence each."""
        return tuple(
            f"{sentence} ({error})"
            for error, sentence in (
                (self.rename, "files cannot be renamed: no store can be written here"),
                (self.locks, "there are no file locks: the store can be read here, not written"),
                (self.links, "there are no hard links: objects are created under a lock instead"),
                (self.directory_sync, "directory entries cannot be synced: the last writes may be lost when "
                                      "the machine loses power"),
                (self.exact_names, "names are not kept as written: run ids that differ in case, or in a dot "
                                   "at the end, would be one"),
            )
            if error is not None
        )  # fmt: skip

    @property
    def writable(self) -> bool:
        """Whether a store can be written here."""
        return self.rename is None and self.locks is None


def can_link(files: Files, directory: Path, nonce: str) -> str | None:
    """Whether hard links work in ``directory``: None, or the error's text. Leaves nothing. Raises OSError."""
    with _file(files, directory / f"{nonce}.a") as path:
        return _try(NO_LINKS, _link_and_remove, files, path, directory / f"{nonce}.b")


def probe(files: Files, directory: Path, nonce: str) -> Abilities:
    """Try everything in a directory that is there; leaves nothing. Raises OSError for what is no ability,
    such as a full disk or a directory that may not be written.
    """
    links = can_link(files, directory, nonce)
    with _file(files, directory / f"{nonce}.Lock") as path:
        locks = _try(NO_LOCKS, _lock, files, path)
        exact = None
        if path.name not in files.list(directory) or files.exists(path.with_name(path.name.lower())):
            exact = f"{path.name} is also found as {path.name.lower()}"
    with _file(files, directory / f"{nonce}.c") as path:
        other = directory / f"{nonce}.d."
        began = time.perf_counter()
        files.write_at(path, 0, bytes(4096))
        files.sync(path)
        seconds = time.perf_counter() - began
        rename = _try(NOT_THERE | {errno.EPERM}, files.rename, path, other)
        if rename is None:
            if other.name not in files.list(directory):
                exact = f"{other.name} is kept under another name"
            files.remove(other)
    directory_sync = _try(NO_DIRECTORY_SYNC, files.sync, directory)
    return Abilities(links, locks, directory_sync, rename, exact, seconds)


def _link_and_remove(files: Files, source: Path, target: Path) -> None:
    files.link(source, target)
    files.remove(target)


def _lock(files: Files, path: Path) -> None:
    with files.lock(path, 1.0):
        pass


def _try(missing: frozenset[int], operation: Callable[..., object], *arguments: object) -> str | None:
    try:
        operation(*arguments)
    except OSError as error:
        if error.errno not in missing:
            raise
        return error_text(error)
    return None


def error_text(error: OSError) -> str:
    """``EPERM, Operation not permitted``"""
    return f"{errno.errorcode.get(error.errno or 0, error.errno)}, {error.strerror}"


@contextlib.contextmanager
def _file(files: Files, path: Path) -> Iterator[Path]:
    """An empty file, gone afterwards."""
    files.write_new(path, b"")
    try:
        yield path
    finally:
        with contextlib.suppress(FileNotFoundError):
            files.remove(path)
