"""A Volume from where it is not mounted, through Modal's API. All of it is blocking, from any thread.

Every write is there for all when the call returns, in one step on the server for each file.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import tempfile
import threading
from collections import OrderedDict
from contextlib import AbstractContextManager
from typing import Any

from stitch_core.ports import Buffer, Clock, FileSource
from stitch_core.stores.sources import source_chunks

SPOOLED = 16
"""Files that are kept on the local disk while they are read in pieces: the API reads whole files."""


class RemoteFiles:
    """As MountedFiles, below ``below`` of ``volume``. Raises what the SDK does."""

    def __init__(self, volume: Any, below: str) -> None:
        self._volume, self._below = volume, below
        self._lock = threading.Lock()
        self._spooled: OrderedDict[str, str] = OrderedDict()
        self._spooling: dict[str, threading.Lock] = {}
        self._directory: str | None = None

    def refresh(self, max_age: float) -> None:
        """The server always tells what is committed."""

    def commit(self) -> None:
        """Nothing is pending."""

    def writing(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def close(self) -> None:
        with self._lock:
            if self._directory:
                shutil.rmtree(self._directory, ignore_errors=True)
            self._spooled.clear()
            self._directory = None

    def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        if start == 0 and length is None:
            return b"".join(self._volume.read_file(self._below + path))
        while True:
            at = self._spool(path)
            try:
                with open(at, "rb") as file:
                    file.seek(start)
                    return file.read() if length is None else file.read(length)
            except FileNotFoundError:  # others needed the room at this moment
                self._forget(path)

    def size(self, path: str) -> int | None:
        for row in self._list(path, recursive=False):
            if row.path.strip("/") == (self._below + path).strip("/") and row.type.name == "FILE":
                return int(row.size)
        return None

    def modified(self, path: str) -> float:
        for row in self._list(path, recursive=False):
            if row.path.strip("/") == (self._below + path).strip("/"):
                return float(row.mtime)
        raise FileNotFoundError(path)

    def date_of_new(self, temporary: str, clock: Clock) -> float:
        """As MountedFiles.date_of_new: files are dated by the server, so one is made."""
        self.write(temporary, b"")
        try:
            return self.modified(temporary)
        finally:
            self.remove(temporary)

    def names(self, folder: str) -> list[tuple[str, bool]]:
        own = (self._below + folder).strip("/")
        rows = self._list(folder, recursive=False)
        return sorted(
            (row.path.strip("/").rpartition("/")[2], row.type.name == "DIRECTORY")
            for row in rows
            if row.path.strip("/") != own
        )

    def walk(self, folder: str) -> list[tuple[str, int]]:
        return [
            (row.path.strip("/").removeprefix(self._below), int(row.size))
            for row in self._list(folder, recursive=True)
            if row.type.name == "FILE"
        ]

    def write(self, path: str, source: Buffer | FileSource) -> None:
        with contextlib.ExitStack() as held:
            local: Any = io.BytesIO()
            if isinstance(source, FileSource):
                # The SDK reads a file again for each block; and it must be the announced one, whole.
                local = held.enter_context(tempfile.TemporaryFile())
            for chunk in source_chunks(source):
                local.write(chunk)
            local.flush()
            with self._volume.batch_upload(force=True) as batch:
                batch.put_file(local, "/" + self._below + path)

    def move(self, source: str, target: str) -> None:
        self._volume.copy_files([self._below + source], self._below + target)
        self.remove(source)

    def put(self, path: str, data: bytes, temporary: str) -> None:
        self.write(path, data)

    def remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._volume.remove_file(self._below + path)
        self._forget(path)

    def _list(self, path: str, *, recursive: bool) -> list[Any]:
        import modal.exception

        try:
            return list(self._volume.listdir("/" + (self._below + path).strip("/"), recursive=recursive))
        except (modal.exception.NotFoundError, FileNotFoundError):
            return []

    def _spool(self, path: str) -> str:
        with self._lock:
            if path in self._spooled:
                self._spooled.move_to_end(path)
                return self._spooled[path]
            turn = self._spooling.setdefault(path, threading.Lock())
        with turn:
            with self._lock:
                if path in self._spooled:
                    return self._spooled[path]
                if self._directory is None:
                    self._directory = tempfile.mkdtemp(prefix="stitch-modal-")
                handle, at = tempfile.mkstemp(dir=self._directory)
            try:
                with os.fdopen(handle, "wb") as file:
                    for piece in self._volume.read_file(self._below + path):
                        file.write(piece)
            except BaseException:
                os.unlink(at)
                raise
            with self._lock:
                self._spooled[path] = at
                self._spooling.pop(path, None)
                old = [self._spooled.popitem(last=False)[1] for _ in range(len(self._spooled) - SPOOLED)]
        for name in old:
            with contextlib.suppress(OSError):
                os.unlink(name)
        return at

    def _forget(self, path: str) -> None:
        with self._lock:
            at = self._spooled.pop(path, None)
        if at:
            with contextlib.suppress(OSError):
                os.unlink(at)
