"""A Modal Volume as a store: ``modal://volume/prefix?mount=/vol``.

A Volume has no conditional writes, and of two containers that write one file the last commit wins. So who
wins is decided by cells of a Modal Dict (see ``cells``), and no two writers ever write different bytes to
one file. The files say what was decided, for as long as the Volume exists:

    <key>                            what was created; whole from the moment it is there
    <dir>/.<name>/<n>.<kind>.<token> the n-th state of what was swapped, replaced or deleted, from then on
    .stitch/new/<time>.<token>       bytes that were not claimed yet, or whose writer died

Creating: the bytes are committed under ``.stitch/new``, then the cell is claimed, then they are moved and
committed again (small ones are in the cell: one commit). Swapping: the cell of the next state is claimed,
with the bytes in it, then the file is written and committed. A writer that dies in between has its work
finished by whoever meets the cell. A call returns when all of it is committed.

Reading what was swapped asks the Dict for newer cells than the newest file, so a head is never read old, and
without a reload. Everything else is read from the files as they were at the last reload; what is not there is
looked for once more after a reload, at most one in ``visible_after`` seconds.
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import os
import secrets
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from stitch_core.ports import (
    AlreadyExists,
    Blob,
    Buffer,
    Capabilities,
    Clock,
    Conflict,
    Entry,
    FileSource,
    NotFound,
    StoreError,
    SystemClock,
    Unavailable,
)
from stitch_core.stores.keys import BadKey, check_key, check_prefix, check_range, is_key
from stitch_core.stores.sources import source_chunks, source_size
from stitch_core.threads import Threads

from .cells import Cell, Cells
from .errors import translate
from .host import Host, check_installed, host_of
from .mount import MountedFiles
from .remote import RemoteFiles
from .states import LOOK_AGAIN, STATE, State, States, digest, order, parsed, state_of, state_path
from .url import Location, parse_url

T = TypeVar("T")

PARALLEL = 16
INLINE = 32 * 2**10
"""Bytes of an object that is created in one commit, out of its cell."""

LARGEST_SWAP = 2**20
VISIBLE_AFTER = 2.0
DEAD_AFTER = 3600.0
"""Seconds after which a claim without bytes is taken for one of a process that died while deleting."""

ROUNDS = 16


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
        self._opened: States | None = None
        self._opening = threading.Lock()
        self._folders_seen: set[str] = set()

    def __repr__(self) -> str:
        return f"ModalStore({self.location})"

    @property
    def capabilities(self) -> Capabilities:
        """One writer wins as long as its Dict does what Modal says of it; see docs/modal.md."""
        return Capabilities(conditional_writes=True, visible_after=self._visible_after)

    async def load(self, key: str) -> Blob:
        return await self._reading(self._load, key)

    async def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        check_range(start, length)
        return await self._reading(self._read, key, start, length)

    async def size(self, key: str) -> int:
        return await self._reading(self._size, key)

    async def create(self, key: str, source: Buffer | FileSource) -> None:
        await self._writing(self._create, key, source)

    async def swap(self, key: str, expected: str | None, data: bytes) -> str:
        return await self._writing(self._swap, key, expected, bytes(data))

    async def replace(self, key: str, data: bytes) -> None:
        await self._writing(self._replace, key, bytes(data))

    async def delete(self, key: str) -> None:
        await self._writing(self._delete, key)

    async def list(self, prefix: str) -> builtins.list[Entry]:
        check_prefix(prefix)
        return await self._threads(
            self._translated, f"listing {self.location}{prefix}", Unavailable, self._list, prefix
        )

    async def folders(self, prefix: str) -> builtins.list[str]:
        """As BrowsableStore.folders."""
        check_prefix(prefix)
        return await self._threads(
            self._translated, f"listing {self.location}{prefix}", Unavailable, self._folders, prefix
        )

    async def modified(self, key: str) -> float | None:
        """As BrowsableStore.modified, by the clock of the container that wrote it."""
        return await self._reading(self._modified, key)

    async def close(self) -> None:
        self._threads.close()
        if self._opened is not None and isinstance(self._opened.files, RemoteFiles):
            await asyncio.to_thread(self._opened.files.close)

    async def _reading(self, operation: Callable[..., T], key: str, *args: Any) -> T:
        check_key(key)
        return await self._threads(
            self._translated, f"reading {self.location}{key}", NotFound, operation, key, *args
        )

    async def _writing(self, operation: Callable[..., T], key: str, *args: Any) -> T:
        check_key(key)
        return await self._threads(
            self._translated, f"writing {self.location}{key}", Unavailable, self._write, operation, key, *args
        )

    def _write(self, operation: Callable[..., T], key: str, *args: Any) -> T:
        with self._files.writing():
            return operation(key, *args)

    def _translated(self, what: str, missing: type[StoreError], operation: Callable[..., T], *args: Any) -> T:
        check_installed()
        try:
            return operation(*args)
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

    @property
    def _files(self) -> MountedFiles | RemoteFiles:
        return self._states.files

    @property
    def _states(self) -> States:
        with self._opening:
            if self._opened is None:
                files, where = self._host.files(self.location), str(self.location)
                self._opened = States(files, self._cells, self._clock, self._visible_after, where)
            return self._opened

    # ---------------------------------------------------------------------------- blocking: what is there

    def _load(self, key: str) -> Blob:
        state = self._states.look(key)
        if not state.live:
            raise NotFound(f"{self.location}{key}: no such object")
        if state.data is not None:
            return Blob(state.data, state.tag)
        data = self._stored(key)
        return Blob(data, f"{state.number}.{digest(data)}")

    def _read(self, key: str, start: int, length: int | None) -> bytes:
        state = self._states.look(key, newest=False)
        if not state.live:
            raise NotFound(f"{self.location}{key}: no such object")
        if state.data is not None:
            return state.data[start:] if length is None else state.data[start : start + length]
        return self._stored(key, start, length)

    def _stored(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """Of what was created; its cell may tell of it before the files do."""
        try:
            return self._files.read(key, start, length)
        except FileNotFoundError:
            self._files.refresh(0.0)
            return self._files.read(key, start, length)

    def _size(self, key: str) -> int:
        state = self._states.look(key, newest=False)
        if state.data is not None:
            return len(state.data)
        size = self._files.size(key) if state.live else None
        if size is None and state.live:
            self._files.refresh(0.0)
            size = self._files.size(key)
        if size is None:
            raise NotFound(f"{self.location}{key}: no such object")
        return size

    def _modified(self, key: str) -> float | None:
        state = self._states.look(key, newest=False)
        if not state.live:
            raise NotFound(f"{self.location}{key}: no such object")
        if state.kind == "file":
            return self._files.modified(key)
        try:
            return self._files.modified(state_path(key, state))
        except FileNotFoundError:  # only its cell tells of it yet
            return None

    def _list(self, prefix: str) -> builtins.list[Entry]:
        self._files.refresh(self._visible_after)
        plain: dict[str, int] = {}
        states: dict[str, builtins.list[tuple[State, int]]] = {}
        for path, size in self._files.walk(prefix.rpartition("/")[0]):
            folder, _, name = path.rpartition("/")
            match = STATE.match(name)
            above, _, hidden = folder.rpartition("/")
            if match and hidden.startswith(".") and hidden != ".stitch":
                key = (above + "/" if above else "") + hidden[1:]
                states.setdefault(key, []).append((parsed(match), size))
            else:
                plain[path] = size
        for key, found in states.items():
            state, size = max(found, key=lambda row: order(row[0]))
            known = self._states.known(key)
            if known is not None and known.number >= state.number:
                state, size = known, len(known.data or b"")
            if state.kind != "file":
                plain.pop(key, None)
            if state.kind in ("bytes", "hint"):
                plain[key] = size
        rows = (Entry(key, size) for key, size in plain.items() if is_key(key) and key.startswith(prefix))
        return sorted(rows, key=lambda entry: entry.key)

    def _folders(self, prefix: str) -> builtins.list[str]:
        self._files.refresh(self._visible_after)
        names = self._files.names(prefix.rstrip("/"))
        return [name for name, is_folder in names if is_folder and is_key(prefix + name)]

    # ------------------------------------------------------------------------------------ blocking: writing

    def _create(self, key: str, source: Buffer | FileSource) -> None:
        self._check_folders(key)
        if self._files.size(key) is None and self._files.names(key):
            raise BadKey(f"{self.location}{key} is a directory")
        token, data, new = secrets.token_hex(12), None, None
        if source_size(source) <= INLINE:
            data = b"".join(source_chunks(source))
        for _ in range(ROUNDS):
            self._files.refresh(LOOK_AGAIN)
            known = self._states.known(key) is not None
            state = self._states.look(key) if known else self._states.from_files(key)
            if state.live:
                self._files.commit()  # the caller may take its bytes for durable
                raise AlreadyExists(f"{self.location}{key} exists")
            began = self._clock.time()
            if data is None and new is None:
                new = self._states.new_name(token)
                self._files.write(new, source)
                self._files.commit()
            cell = Cell("file", token, began, data, new)
            found = self._cells.claim(key, state.number + 1, cell)
            if found.token == token:
                self._states.check_claim(key, state.number + 1, token, began, AlreadyExists)
                self._place(key, state.number + 1, cell)
                self._files.commit()
                return
            if self._is_there(key, state.number + 1, found):
                if new is not None:
                    self._files.remove(new)
                raise AlreadyExists(f"{self.location}{key} exists")
        raise Unavailable(f"{self.location}{key} is being written and deleted by others")

    def _is_there(self, key: str, number: int, found: Cell) -> bool:
        """Whether another's claim is of an object that is there; helps it to be. False: look again."""
        if found.kind == "gone":
            self._states.remember(key, state_of(number, found))
            return False
        if found.kind in ("bytes", "hint"):
            self._states.remember(key, state_of(number, found))
            state = self._states.look(key)
            self._states.settle(key, state)
            return state.live
        self._files.refresh(self._visible_after)
        if found.kind == "file":
            if self._files.size(key) is None:
                if found.data is None and (found.new is None or self._files.size(found.new) is None):
                    self._bury(key, number, found)
                self._place(key, number, found)
            self._files.commit()
            return True
        self._bury(key, number, found)
        return False

    def _bury(self, key: str, number: int, found: Cell) -> None:
        """A claim whose bytes are nowhere: of one that is deleting it, or died doing so, long ago."""
        if self._clock.time() - found.time > DEAD_AFTER and self._files.size(key) is None:
            self._cells.pop(key, number)
        raise Unavailable(f"{self.location}{key} is being moved or deleted by another process")

    def _place(self, key: str, number: int, cell: Cell) -> None:
        """Put created bytes where they belong. Whoever does it, does the same."""
        if cell.data is not None:
            self._files.put(key, cell.data, self._states.new_name(secrets.token_hex(12)))
        elif cell.new is not None:
            try:
                self._files.move(cell.new, key)
            except FileNotFoundError:  # somebody has moved it
                self._files.refresh(0.0)
                if self._files.size(key) is None:
                    raise Unavailable(f"{self.location}{key}: its bytes are not there yet") from None
        if number > 1:
            self._states.mark(key, State(number, "file", cell.token))

    def _swap(self, key: str, expected: str | None, data: bytes) -> str:
        self._check_swappable(key, data)
        self._states.check_known(key)
        state = self._states.look(key)
        tag: str | None = None
        if state.kind == "file":
            with contextlib.suppress(FileNotFoundError):
                tag = f"{state.number}.{digest(self._files.read(key))}"
        elif state.live:
            tag = state.tag
        if tag != expected:
            # It may be this very call's, repeated after a failure: then it has to be as durable as one that
            # succeeded at once.
            self._states.settle(key, state)
            raise Conflict(f"{self.location}{key} is not as it was read")
        began, number = self._clock.time(), state.number + 1
        cell = Cell("bytes", secrets.token_hex(12), began, data)
        found = self._cells.claim(key, number, cell)
        if found.token != cell.token:
            if found.kind == "going":
                self._bury(key, number, found)
            self._states.remember(key, state_of(number, found))
            raise Conflict(f"{self.location}{key} was swapped by another writer")
        self._states.check_claim(key, number, cell.token, began, Conflict)
        mine = state_of(number, cell)
        self._states.remember(key, mine)
        self._states.settle(key, mine)
        return mine.tag

    def _replace(self, key: str, data: bytes) -> None:
        self._check_swappable(key, data)
        cell = Cell("hint", digest(data), self._clock.time(), data)
        for _ in range(ROUNDS):
            state = self._states.look(key)
            if state.kind == "hint":
                self._cells.put(key, state.number, cell)
                mine = replace(state_of(state.number, cell), settled=state.settled, looked=state.looked)
                if mine.settled:
                    # The Dict has it, for all; the file follows with the next commit.
                    self._states.mark(key, mine)
                break
            mine = state_of(state.number + 1, cell)
            found = self._cells.claim(key, mine.number, cell)
            if found.token == cell.token:
                break
            if found.kind in ("file", "going"):
                self._is_there(key, mine.number, found)
            self._states.remember(key, state_of(mine.number, found))
        else:
            raise Unavailable(f"{self.location}{key} is being swapped by others")
        self._states.remember(key, mine)
        self._states.settle(key, mine)

    def _delete(self, key: str) -> None:
        state = self._states.look(key)
        if state.number == 0:
            self._files.commit()  # an earlier try may have ended before
            cell = self._cells.get(key, 1)
            if cell is not None and cell.kind == "going":
                self._cells.pop(key, 1)
            return
        if state.kind == "file" and not state.marked:
            now = self._clock.time()
            self._cells.put(key, state.number, Cell("going", secrets.token_hex(12), now))
            self._files.remove(key)
            self._files.commit()
            self._cells.pop(key, state.number)
            return
        if state.kind == "hint" and state.number == 1:
            # Hints decide nothing: no need to remember that there was one.
            self._cells.pop(key, 1)
            self._states.forget(key)
            self._files.remove(state_path(key, state))
            self._files.commit()
            return
        for _ in range(ROUNDS):
            if not state.live:
                break
            cell = Cell("gone", secrets.token_hex(12), self._clock.time())
            found = self._cells.claim(key, state.number + 1, cell)
            state = state_of(state.number + 1, found)
            self._states.remember(key, state)
        else:
            raise Unavailable(f"{self.location}{key} is being written by others")
        self._states.settle(key, state)
        self._states.forget_old(key)

    # ----------------------------------------------------------------------------------- blocking: parts

    def _check_folders(self, key: str) -> None:
        """BadKey where a folder of the key is an object, before anything is claimed."""
        parts = key.split("/")
        for folder in ("/".join(parts[:count]) for count in range(len(parts) - 1, 0, -1)):
            if folder in self._folders_seen:
                return
            if self._files.size(folder) is not None:
                raise BadKey(f"{self.location}{key}: {folder} is an object")
        self._folders_seen.add(key.rpartition("/")[0])

    def _check_swappable(self, key: str, data: bytes) -> None:
        if len(data) > LARGEST_SWAP:
            raise StoreError(
                f"{self.location}{key}: {len(data)} bytes; what is swapped or replaced has {LARGEST_SWAP} at "
                "most on Modal"
            )
        self._check_folders(key)


def open_url(url: str) -> ModalStore:
    """``modal://volume/prefix?mount=/vol&environment=name``; docs/modal.md has them all. Raises BadUrl."""
    location = parse_url(url, os.environ)
    check_installed()
    return ModalStore(location)
