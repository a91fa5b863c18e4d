"""A Modal Volume as a store: ``modal://volume/prefix?mount=/vol``.

A Volume has no conditional writes, and of two containers that write one file the last commit wins. So who
wins is decided by cells of a Modal Dict (see ``cells``), and no two writers ever write different bytes to
one file. The files say what was decided, for as long as the Volume exists:

    <key>                            what was created; whole from the moment it is there
    <dir>/.<name>/<n>.<kind>.<token> the n-th state of what was swapped, replaced or deleted, from then on
    .stitch/new/<time>.<token>       bytes that were not claimed yet, or whose writer died

How they come to say it is in ``writing``, how they are read in ``reading``. Both block: this is their async
face, with threads of its own.
"""

from __future__ import annotations

import asyncio
import builtins
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from stitch_core.ports import (
    Blob,
    Buffer,
    Capabilities,
    Clock,
    Entry,
    FileSource,
    NotFound,
    Stamp,
    StoreError,
    SystemClock,
    Unavailable,
)
from stitch_core.stores.keys import BadKey, check_key, check_prefix, check_range
from stitch_core.threads import Threads

from .cells import Cells
from .errors import translate
from .host import Host, check_installed, host_of
from .mount import MountedFiles
from .reading import Reader
from .remote import RemoteFiles
from .states import States
from .url import Location, parse_url
from .writing import Writer

T = TypeVar("T")

PARALLEL = 16
VISIBLE_AFTER = 2.0


class ModalStore:
    """The objects below ``location``. Has threads of its own, which ``close`` ends.

    ``host``: of the process, unless a test has several in one; ``visible_after`` in seconds.
    """

    def __init__(
        self,
        location: Location,
        *,
        host: Host | None = None,
        clock: Clock | None = None,
        visible_after: float = VISIBLE_AFTER,
    ) -> None:
        self.location = location
        self._host = host or host_of(location)
        self._cells = Cells(self._host, location.prefix)
        self._clock: Clock = clock or SystemClock()
        self._visible_after = visible_after
        self._threads = Threads(PARALLEL, "stitch-modal")
        self._opened: _Opened | None = None
        self._opening = threading.Lock()

    def __repr__(self) -> str:
        return f"ModalStore({self.location})"

    @property
    def capabilities(self) -> Capabilities:
        """One writer wins as long as its Dict does what Modal says of it; see docs/modal.md."""
        return Capabilities(conditional_writes=True, visible_after=self._visible_after)

    async def load(self, key: str) -> Blob:
        return await self._reading(key, lambda reader: reader.load(key))

    async def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        check_range(start, length)
        return await self._reading(key, lambda reader: reader.read(key, start, length))

    async def size(self, key: str) -> int:
        return await self._reading(key, lambda reader: reader.size(key))

    async def stamp(self, key: str) -> Stamp | None:
        """As BrowsableStore.stamp: by Modal's clock; on a mount by that of the container, here or there."""
        written = await self._reading(key, lambda reader: reader.modified(key))
        if written is None:
            return None
        return Stamp(written, await self._reading(key, lambda reader: reader.now()))

    async def create(self, key: str, source: Buffer | FileSource) -> None:
        await self._writing(key, lambda writer: writer.create(key, source))

    async def swap(self, key: str, expected: str | None, data: bytes) -> str:
        return await self._writing(key, lambda writer: writer.swap(key, expected, bytes(data)))

    async def replace(self, key: str, data: bytes) -> None:
        await self._writing(key, lambda writer: writer.replace(key, bytes(data)))

    async def delete(self, key: str) -> None:
        await self._writing(key, lambda writer: writer.delete(key))

    async def list(self, prefix: str) -> builtins.list[Entry]:
        return await self._listing(prefix, lambda reader: reader.list(prefix))

    async def folders(self, prefix: str) -> builtins.list[str]:
        """As BrowsableStore.folders."""
        return await self._listing(prefix, lambda reader: reader.folders(prefix))

    async def close(self) -> None:
        self._threads.close()
        if self._opened is not None and isinstance(self._opened.files, RemoteFiles):
            await asyncio.to_thread(self._opened.files.close)

    async def _reading(self, key: str, call: Callable[[Reader], T]) -> T:
        check_key(key)
        return await self._blocking(f"reading {self.location}{key}", NotFound, lambda at: call(at.reader))

    async def _listing(self, prefix: str, call: Callable[[Reader], T]) -> T:
        check_prefix(prefix)
        what = f"listing {self.location}{prefix}"
        return await self._blocking(what, Unavailable, lambda at: call(at.reader))

    async def _writing(self, key: str, call: Callable[[Writer], T]) -> T:
        check_key(key)

        def write(at: _Opened) -> T:
            with at.files.writing():
                return call(at.writer)

        return await self._blocking(f"writing {self.location}{key}", Unavailable, write)

    async def _blocking(self, what: str, missing: type[StoreError], call: Callable[[_Opened], T]) -> T:
        return await self._threads(self._translated, what, missing, call)

    def _translated(self, what: str, missing: type[StoreError], call: Callable[[_Opened], T]) -> T:
        check_installed()
        try:
            return call(self._open())
        except FileNotFoundError as error:
            raise missing(f"{what}: there is no {error.filename or error}") from error
        except (IsADirectoryError, NotADirectoryError, FileExistsError) as error:
            raise BadKey(f"{what}: an object and a directory cannot have one name") from error
        except StoreError:
            raise
        except Exception as error:
            told = translate(error, what)
            if told is None:
                raise
            raise told from error

    def _open(self) -> _Opened:
        """What needs to know where the Volume is: at the first call, as that asks Modal."""
        with self._opening:
            if self._opened is None:
                files = self._host.files(self.location)
                states = States(files, self._cells, self._clock, self._visible_after, str(self.location))
                self._opened = _Opened(files, Reader(states), Writer(states, self._cells, self._clock))
            return self._opened


@dataclass(frozen=True)
class _Opened:
    files: MountedFiles | RemoteFiles
    reader: Reader
    writer: Writer


def open_url(url: str) -> ModalStore:
    """``modal://volume/prefix?mount=/vol&environment=name``; docs/modal.md has them all. Raises BadUrl."""
    location = parse_url(url, os.environ)
    check_installed()
    return ModalStore(location)
