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
import hashlib
import os
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
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

from .cells import Cell, Cells, Kind
from .errors import translate
from .host import Host, check_installed, host_of
from .mount import MountedFiles
from .remote import RemoteFiles
from .url import Location, parse_url

T = TypeVar("T")

PARALLEL = 16
INLINE = 32 * 2**10
"""Bytes of an object that is created in one commit, out of its cell."""

LARGEST_SWAP = 2**20
VISIBLE_AFTER = 2.0
LOOK_AGAIN = 900.0
"""Seconds after which what is known of the files is looked up again. Far below ``EXPIRES``."""

EXPIRES = 7 * 86400.0
"""Seconds without a read or write after which Modal drops an entry of a Dict."""

DEAD_AFTER = 3600.0
"""Seconds after which a claim without bytes is taken for one of a process that died while deleting."""

STALE_AFTER = 86400.0
"""Seconds after which a file in ``.stitch/new`` is the leftover of a process that died."""

FORGET_AFTER = 4 * EXPIRES
"""Seconds for which a file says that an object was deleted."""

ROUNDS = 16
KNOWN = 4096
NEW = ".stitch/new"
_STATE = re.compile(r"(\d{12})\.(file|bytes|hint|gone)\.([0-9a-f]+)\Z")


@dataclass(frozen=True)
class State:
    """What is under a key. ``number`` counts its states from 1 on; 0: there never was one.

    ``settled``: the files say so, committed. ``marked``: there is a ``.<name>`` directory.
    """

    number: int = 0
    kind: Kind = "gone"
    token: str = ""
    data: bytes | None = None
    marked: bool = False
    settled: bool = True
    looked: float = 0.0

    @property
    def live(self) -> bool:
        return self.kind in ("file", "bytes", "hint")

    @property
    def tag(self) -> str:
        return f"{self.number}.{self.token}"


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
        self._opened: MountedFiles | RemoteFiles | None = None
        self._known: dict[str, State] = {}
        self._folders_seen: set[str] = set()
        self._learned = -float("inf")  # when a swapped object was last seen to have changed
        self._swept = False

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
        if isinstance(self._opened, RemoteFiles):
            await asyncio.to_thread(self._opened.close)

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
        except Exception as error:
            raise translate(error, what) or error from error

    @property
    def _files(self) -> MountedFiles | RemoteFiles:
        if self._opened is None:
            self._opened = self._host.files(self.location)
        return self._opened

    # ---------------------------------------------------------------------------- blocking: what is there

    def _load(self, key: str) -> Blob:
        state = self._look(key)
        if not state.live:
            raise NotFound(f"{self.location}{key}: no such object")
        if state.data is not None:
            return Blob(state.data, state.tag)
        data = self._files.read(key)
        return Blob(data, f"{state.number}.{_digest(data)}")

    def _read(self, key: str, start: int, length: int | None) -> bytes:
        state = self._look(key, newest=False)
        if not state.live:
            raise NotFound(f"{self.location}{key}: no such object")
        if state.data is not None:
            return state.data[start:] if length is None else state.data[start : start + length]
        return self._files.read(key, start, length)

    def _size(self, key: str) -> int:
        state = self._look(key, newest=False)
        size = len(state.data) if state.data is not None else self._files.size(key) if state.live else None
        if size is None:
            raise NotFound(f"{self.location}{key}: no such object")
        return size

    def _modified(self, key: str) -> float | None:
        state = self._look(key, newest=False)
        if not state.live:
            raise NotFound(f"{self.location}{key}: no such object")
        if state.kind == "file":
            return self._files.modified(key)
        try:
            return self._files.modified(_state_path(key, state))
        except FileNotFoundError:  # only its cell tells of it yet
            return None

    def _list(self, prefix: str) -> builtins.list[Entry]:
        self._files.refresh(self._visible_after)
        plain: dict[str, int] = {}
        states: dict[str, builtins.list[tuple[State, int]]] = {}
        for path, size in self._files.walk(prefix.rpartition("/")[0]):
            folder, _, name = path.rpartition("/")
            match = _STATE.match(name)
            above, _, hidden = folder.rpartition("/")
            if match and hidden.startswith(".") and hidden != ".stitch":
                key = (above + "/" if above else "") + hidden[1:]
                states.setdefault(key, []).append((_parsed(match), size))
            else:
                plain[path] = size
        for key, found in states.items():
            state, size = max(found, key=lambda row: _order(row[0]))
            known = self._known.get(key)
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

    def _look(self, key: str, *, newest: bool = True) -> State:
        """What is under the key. ``newest``: ask for later states of what the files show as created, too."""
        state = self._known.get(key)
        if state is None or self._clock.time() - state.looked > LOOK_AGAIN:
            state = self._look_at_files(key, state)
        if state.number == 0 or (state.kind == "file" and not state.marked and not newest):
            return state
        if state.kind == "hint":
            cell = self._cells.get(key, state.number)
            if cell is None:  # deleted, or not touched for a week
                self._known.pop(key, None)
                self._files.refresh(self._visible_after)
                state = self._from_files(key)
            elif cell.kind == "hint":
                state = replace(_state(state.number, cell), settled=state.settled, looked=state.looked)
        while state.number:
            cell = self._cells.get(key, state.number + 1)
            if cell is None:
                break
            state = replace(_state(state.number + 1, cell), looked=state.looked)
            if state.kind == "bytes":
                self._learned = self._clock.monotonic()
        self._remember(key, state)
        return state

    def _look_at_files(self, key: str, known: State | None) -> State:
        """What the files say, after a reload where they say nothing; or what is known and newer."""
        if known is not None:
            self._files.refresh(self._visible_after)
        state = self._from_files(key)
        if state.number == 0:
            state = self._wait_for(key)
        if known is None or known.settled or state.number >= known.number:
            self._known.pop(key, None)
            return state
        # Its writer died before it was in the files, and the cell would be dropped in the end.
        self._known.pop(key)
        cell = self._cells.get(key, known.number)
        if cell is None or cell.token != known.token:
            return state
        with contextlib.suppress(StoreError, OSError):
            self._settle(key, known)
        return replace(known, looked=self._clock.time())

    def _wait_for(self, key: str) -> State:
        """After a reload. What a head names was finished before it: until that must be visible, look on."""
        since = self._clock.monotonic() - self._learned
        self._files.refresh(min(since, self._visible_after))
        state = self._from_files(key)
        while state.number == 0 and self._clock.monotonic() - self._learned < self._visible_after:
            time.sleep(self._visible_after / 8)
            self._files.refresh(0.0)
            state = self._from_files(key)
        return state

    def _from_files(self, key: str) -> State:
        now = self._clock.time()
        names = [name for name, _ in self._files.names(_states_folder(key))]
        states = [_parsed(match) for match in map(_STATE.match, names) if match]
        if not states:
            if self._files.size(key) is None:
                return State(looked=now)
            return State(1, "file", looked=now)
        state = replace(max(states, key=_order), looked=now)
        if state.kind not in ("bytes", "hint"):
            return state
        data = self._files.read(_state_path(key, state))
        return replace(state, data=data, token=_digest(data) if state.kind == "hint" else state.token)

    def _remember(self, key: str, state: State) -> None:
        if state.number == 0 or state.kind in ("file", "going"):
            return  # their bytes are in the files, or not yet, or no more
        known = self._known.get(key)
        if known is None or known.number <= state.number:
            if len(self._known) >= KNOWN:
                self._known.clear()
            self._known[key] = state

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
            state = self._known.get(key) or self._from_files(key)
            if state.live:
                self._files.commit()  # the caller may take its bytes for durable
                raise AlreadyExists(f"{self.location}{key} exists")
            began = self._clock.time()
            if data is None and new is None:
                new = self._new_name(token)
                self._files.write(new, source)
                self._files.commit()
            cell = Cell("file", token, began, data, new)
            found = self._cells.claim(key, state.number + 1, cell)
            if found.token == token:
                self._check_claim(key, state.number + 1, token, began, AlreadyExists)
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
            self._remember(key, _state(number, found))
            return False
        if found.kind in ("bytes", "hint"):
            self._remember(key, _state(number, found))
            state = self._look(key)
            self._settle(key, state)
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
            self._files.put(key, cell.data, self._new_name(secrets.token_hex(12)))
        elif cell.new is not None:
            try:
                self._files.move(cell.new, key)
            except FileNotFoundError:  # somebody has moved it
                self._files.refresh(0.0)
                if self._files.size(key) is None:
                    raise Unavailable(f"{self.location}{key}: its bytes are not there yet") from None
        if number > 1:
            self._mark(key, State(number, "file", cell.token))

    def _swap(self, key: str, expected: str | None, data: bytes) -> str:
        self._check_swappable(key, data)
        self._check_known(key)
        state = self._look(key)
        tag: str | None = None
        if state.kind == "file":
            with contextlib.suppress(FileNotFoundError):
                tag = f"{state.number}.{_digest(self._files.read(key))}"
        elif state.live:
            tag = state.tag
        if tag != expected:
            # It may be this very call's, repeated after a failure: then it has to be as durable as one that
            # succeeded at once.
            self._settle(key, state)
            raise Conflict(f"{self.location}{key} is not as it was read")
        began, number = self._clock.time(), state.number + 1
        cell = Cell("bytes", secrets.token_hex(12), began, data)
        found = self._cells.claim(key, number, cell)
        if found.token != cell.token:
            if found.kind == "going":
                self._bury(key, number, found)
            self._remember(key, _state(number, found))
            raise Conflict(f"{self.location}{key} was swapped by another writer")
        self._check_claim(key, number, cell.token, began, Conflict)
        mine = _state(number, cell)
        self._remember(key, mine)
        self._settle(key, mine)
        return mine.tag

    def _replace(self, key: str, data: bytes) -> None:
        self._check_swappable(key, data)
        cell = Cell("hint", _digest(data), self._clock.time(), data)
        for _ in range(ROUNDS):
            state = self._look(key)
            if state.kind == "hint":
                self._cells.put(key, state.number, cell)
                mine = replace(_state(state.number, cell), settled=state.settled, looked=state.looked)
                if mine.settled:
                    # The Dict has it, for all; the file follows with the next commit.
                    self._mark(key, mine)
                break
            mine = _state(state.number + 1, cell)
            found = self._cells.claim(key, mine.number, cell)
            if found.token == cell.token:
                break
            if found.kind in ("file", "going"):
                self._is_there(key, mine.number, found)
            self._remember(key, _state(mine.number, found))
        else:
            raise Unavailable(f"{self.location}{key} is being swapped by others")
        self._remember(key, mine)
        self._settle(key, mine)

    def _delete(self, key: str) -> None:
        state = self._look(key)
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
            self._known.pop(key, None)
            self._files.remove(_state_path(key, state))
            self._files.commit()
            return
        for _ in range(ROUNDS):
            if not state.live:
                break
            cell = Cell("gone", secrets.token_hex(12), self._clock.time())
            found = self._cells.claim(key, state.number + 1, cell)
            state = _state(state.number + 1, found)
            self._remember(key, state)
        else:
            raise Unavailable(f"{self.location}{key} is being written by others")
        self._settle(key, state)
        self._forget_old(key)

    def _settle(self, key: str, state: State) -> None:
        """Write what was decided to the files, and commit it."""
        if state.settled or state.kind not in ("bytes", "hint", "gone"):
            return
        self._mark(key, state)
        if self._files.size(key) is not None:
            self._files.remove(key)
        self._files.commit()
        self._remember(key, replace(state, settled=True))

    def _mark(self, key: str, state: State) -> None:
        new = self._new_name(secrets.token_hex(12))
        self._files.put(_state_path(key, state), state.data or b"", new)
        for name, _ in self._files.names(_states_folder(key)):
            match = _STATE.match(name)
            # The one before stays: should a commit be seen in parts, there is never none.
            if match and int(match[1]) < state.number - 1:
                self._files.remove(f"{_states_folder(key)}/{name}")

    # ----------------------------------------------------------------------------------- blocking: parts

    def _check_claim(
        self, key: str, number: int, token: str, began: float, refusal: type[StoreError]
    ) -> None:
        """A cell was free; but had it been so for want of anybody who read it, in the last days?"""
        if self._clock.time() - began < EXPIRES / 2:
            return
        self._files.refresh(0.0)
        state = self._from_files(key)
        if state.number >= number and state.token != token:
            self._cells.pop(key, number)
            self._known.pop(key, None)
            raise refusal(f"{self.location}{key} was written by others while this process slept")

    def _check_known(self, key: str) -> None:
        """Should a Dict ever have let two win, the one whose state the readers do not take finds out here."""
        self._files.refresh(self._visible_after)
        known, seen = self._known.get(key), self._from_files(key)
        if known is not None and seen.number >= known.number and seen.token != known.token:
            self._known[key] = seen

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

    def _new_name(self, token: str) -> str:
        self._sweep()
        return f"{NEW}/{int(self._clock.time())}.{token}"

    def _sweep(self) -> None:
        """Once per store: remove what writers that died left in ``.stitch/new``."""
        if self._swept:
            return
        self._swept = True
        for name, _ in self._files.names(NEW):
            born = name.partition(".")[0]
            if born.isdecimal() and int(born) < self._clock.time() - STALE_AFTER:
                with contextlib.suppress(OSError):
                    self._files.remove(f"{NEW}/{name}")

    def _forget_old(self, key: str) -> None:
        """Remove what says of keys near this one that they were deleted, weeks ago."""
        folder = key.rpartition("/")[0]
        above = folder.rpartition("/")[0]
        near = {folder}
        if above:
            rows = self._files.names(above)
            near |= {f"{above}/{name}" for name, is_folder in rows if is_folder and is_key(name)}
        for place in sorted(near):
            for name, is_folder in self._files.names(place):
                if is_folder and name.startswith(".") and name != ".stitch":
                    self._forget_if_old(f"{place}/{name}" if place else name)

    def _forget_if_old(self, states: str) -> None:
        paths = [f"{states}/{name}" for name, _ in self._files.names(states)]
        newest = max(paths, default="")
        match = _STATE.match(newest.rpartition("/")[2])
        if match and match[2] == "gone":
            if self._files.modified(newest) < self._clock.time() - FORGET_AFTER:
                for path in paths:
                    self._files.remove(path)


def _state(number: int, cell: Cell) -> State:
    """A state that only its cell says so far."""
    data = cell.data if cell.kind in ("bytes", "hint") else None
    return State(number, cell.kind, cell.token, data, marked=True, settled=False, looked=cell.time)


def _parsed(match: re.Match[str]) -> State:
    kind: Any = match[2]
    return State(int(match[1]), kind, match[3], marked=True)


def _order(state: State) -> tuple[int, int]:
    """Should a Dict ever have let two win, all readers agree on one of them."""
    return state.number, -int(state.token, 16)


def _states_folder(key: str) -> str:
    folder, _, name = key.rpartition("/")
    return f"{folder}/.{name}" if folder else f".{name}"


def _state_path(key: str, state: State) -> str:
    token = "0" if state.kind == "hint" else state.token
    return f"{_states_folder(key)}/{state.number:012d}.{state.kind}.{token}"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def open_url(url: str) -> ModalStore:
    """``modal://volume/prefix?mount=/vol&environment=name``; docs/modal.md has them all. Raises BadUrl."""
    location = parse_url(url, os.environ)
    check_installed()
    return ModalStore(location)
