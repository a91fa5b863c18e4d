"""The real file operations of a machine: ``ports.Files`` on POSIX."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from .ports import Buffer

_LOCK_POLL = 0.005
_MOST_LINKS = 40  # as many as Linux follows


class PosixFiles:
    """``ports.Files`` by system calls. Without state: any number may be used, from any thread."""

    def read(self, path: Path, offset: int = 0, length: int | None = None) -> bytes:
        if offset < 0 or (length is not None and length < 0):
            raise ValueError(f"{path}: cannot read {length} bytes at {offset}")
        with open(path, "rb") as file:
            # Python allocates what is asked for, not what is there.
            rest = max(0, os.fstat(file.fileno()).st_size - offset)
            file.seek(offset)
            return file.read(rest if length is None else min(length, rest))

    def read_into(self, path: Path, offset: int, out: memoryview) -> int:
        done = 0
        with _opened(path, os.O_RDONLY) as fd, _named(path):
            while done < out.nbytes:
                count = os.preadv(fd, [out[done:]], offset + done)
                if count == 0:
                    break
                done += count
        return done

    def size(self, path: Path) -> int:
        status = os.stat(path)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return status.st_size

    def exists(self, path: Path) -> bool:
        # Not os.path.exists: it takes every error, EIO among them, for absence.
        try:
            os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def list(self, path: Path) -> list[str]:
        return sorted(os.listdir(path))

    def mark(self, path: Path) -> tuple[int, ...]:
        return tuple(
            number
            for s in _way_to(path)
            for number in (s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns)
        )

    def write_new(self, path: Path, data: Buffer) -> None:
        with _opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd, _named(path):
            _write_all(fd, data, 0)

    def write_at(self, path: Path, offset: int, data: Buffer) -> None:
        with _opened(path, os.O_WRONLY) as fd, _named(path):
            size = os.fstat(fd).st_size
            if not 0 <= offset <= size:
                raise ValueError(f"{path}: writing at {offset} would leave a hole, the file has {size} bytes")
            _write_all(fd, data, offset)

    def sync(self, path: Path) -> None:
        with _opened(path, os.O_RDONLY) as fd, _named(path):
            os.fsync(fd)

    def rename(self, source: Path, target: Path) -> None:
        os.replace(source, target)

    def link(self, source: Path, target: Path) -> None:
        os.link(source, target, follow_symlinks=False)

    def symlink(self, target: str, path: Path) -> None:
        os.symlink(target, path)

    def make_dirs(self, path: Path) -> None:
        while not os.path.isdir(path):
            # It may come and go while others use it, which makedirs takes for a file in the way.
            with contextlib.suppress(FileExistsError):
                os.makedirs(path, exist_ok=True)
                return
            if os.path.lexists(path) and not os.path.isdir(path):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))

    def remove(self, path: Path) -> None:
        os.unlink(path)

    def remove_tree(self, path: Path) -> None:
        if path.is_symlink():
            path.unlink(missing_ok=True)
            return
        while os.path.lexists(path):
            # Another process may be removing the same tree.
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(path)

    def free_bytes(self, path: Path) -> int:
        status = os.statvfs(path)
        return status.f_bavail * status.f_frsize

    @contextlib.contextmanager
    def lock(self, path: Path, timeout: float) -> Iterator[None]:
        deadline = time.monotonic() + timeout
        # A descriptor of its own, so that flock also holds between threads; NFS wants it writable.
        with _opened(path, os.O_RDWR | os.O_CREAT) as fd:
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= deadline:
                        raise TimeoutError(f"{path}: locked by another for {timeout:g} s") from None
                    time.sleep(_LOCK_POLL)
            # Closing the descriptor unlocks. The file stays: removing it would let two hold "the" lock.
            yield


def _way_to(path: Path) -> Iterator[os.stat_result]:
    """Each symbolic link on the way to a path, then what is there."""
    at, parts, links = Path("/"), list(reversed(path.parts[1:])), 0
    while parts:
        part = parts.pop()
        if part == "..":
            at = at.parent
            continue
        status = os.lstat(at / part)
        if not stat.S_ISLNK(status.st_mode):
            at /= part
            continue
        yield status
        links += 1
        if links > _MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        target = Path(os.readlink(at / part))
        at = Path("/") if target.is_absolute() else at
        parts += reversed(target.parts[target.is_absolute() :])
    yield os.stat(at)


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    fd = os.open(path, flags | os.O_CLOEXEC, 0o666)
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Calls on a descriptor fail without saying of which file."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def _write_all(fd: int, data: Buffer, offset: int) -> None:
    view = memoryview(data)
    if not view.nbytes:  # memoryview cannot cast a shape with a zero in it
        return
    view = view.cast("B")
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written
