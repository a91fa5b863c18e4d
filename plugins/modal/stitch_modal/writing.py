"""Writing the objects of a Volume. All of it is blocking.

Creating: the bytes are committed under ``.stitch/new``, then the cell is claimed, then they are moved and
committed again (small ones are in the cell: one commit). Swapping: the cell of the next state is claimed,
with the bytes in it, then the file is written and committed. A writer that dies in between has its work
finished by whoever meets the cell. A call returns when all of it is committed.
"""

from __future__ import annotations

import contextlib
import secrets
from dataclasses import replace

from stitch_core.ports import (
    AlreadyExists,
    Buffer,
    Clock,
    Conflict,
    FileSource,
    StoreError,
    Unavailable,
)
from stitch_core.stores.keys import BadKey
from stitch_core.stores.sources import source_chunks, source_size

from .cells import Cell, Cells
from .states import LOOK_AGAIN, State, States, digest, state_of, state_path

INLINE = 32 * 2**10
"""Bytes of an object that is created in one commit, out of its cell."""

LARGEST_SWAP = 2**20
DEAD_AFTER = 3600.0
"""Seconds after which a claim without bytes is taken for one of a process that died while deleting it."""

ROUNDS = 16


class Writer:
    """Raises AlreadyExists, Conflict, BadKey, Unavailable, what the files do, and what the SDK does."""

    def __init__(self, states: States, cells: Cells, clock: Clock) -> None:
        self._states, self._files, self._cells, self._clock = states, states.files, cells, clock
        self._folders_seen: set[str] = set()
        self._met: dict[str, float] = {}
        """Claims without bytes, by token, and when this process first met them."""

    def create(self, key: str, source: Buffer | FileSource) -> None:
        self._check_folders(key)
        if self._files.size(key) is None and self._files.names(key):
            raise BadKey(f"{self._states.where}{key} is a directory")
        token, data, new = secrets.token_hex(12), None, None
        if source_size(source) <= INLINE:
            data = b"".join(source_chunks(source))
        for _ in range(ROUNDS):
            self._files.refresh(LOOK_AGAIN)
            known = self._states.known(key) is not None
            state = self._states.look(key) if known else self._states.from_files(key)
            if state.live:
                self._files.commit()  # the caller may take its bytes for durable
                raise AlreadyExists(f"{self._states.where}{key} exists")
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
                raise AlreadyExists(f"{self._states.where}{key} exists")
        raise Unavailable(f"{self._states.where}{key} is being written and deleted by others")

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
        self._files.refresh(self._states.visible_after)
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
        """A claim whose bytes are nowhere: of one that is deleting it, or died doing so, long ago.

        Counted from when this process first met it: the clock that dated it may be wrong, or this one.
        """
        here = self._clock.monotonic()
        if here - self._met.setdefault(found.token, here) > DEAD_AFTER and self._files.size(key) is None:
            self._cells.pop(key, number)
            del self._met[found.token]
        raise Unavailable(f"{self._states.where}{key} is being moved or deleted by another process")

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
                    raise Unavailable(f"{self._states.where}{key}: its bytes are not there yet") from None
        if number > 1:
            self._states.mark(key, State(number, "file", cell.token))

    def swap(self, key: str, expected: str | None, data: bytes) -> str:
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
            raise Conflict(f"{self._states.where}{key} is not as it was read")
        began, number = self._clock.time(), state.number + 1
        cell = Cell("bytes", secrets.token_hex(12), began, data)
        found = self._cells.claim(key, number, cell)
        if found.token != cell.token:
            if found.kind == "going":
                self._bury(key, number, found)
            self._states.remember(key, state_of(number, found))
            raise Conflict(f"{self._states.where}{key} was swapped by another writer")
        self._states.check_claim(key, number, cell.token, began, Conflict)
        mine = state_of(number, cell)
        self._states.remember(key, mine)
        self._states.settle(key, mine)
        return mine.tag

    def replace(self, key: str, data: bytes) -> None:
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
            raise Unavailable(f"{self._states.where}{key} is being swapped by others")
        self._states.remember(key, mine)
        self._states.settle(key, mine)

    def delete(self, key: str) -> None:
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
            raise Unavailable(f"{self._states.where}{key} is being written by others")
        self._states.settle(key, state)
        self._states.forget_old(key)

    def _check_folders(self, key: str) -> None:
        """BadKey where a folder of the key is an object, before anything is claimed."""
        parts = key.split("/")
        for folder in ("/".join(parts[:count]) for count in range(len(parts) - 1, 0, -1)):
            if folder in self._folders_seen:
                return
            if self._files.size(folder) is not None:
                raise BadKey(f"{self._states.where}{key}: {folder} is an object")
        self._folders_seen.add(key.rpartition("/")[0])

    def _check_swappable(self, key: str, data: bytes) -> None:
        if len(data) > LARGEST_SWAP:
            raise StoreError(
                f"{self._states.where}{key}: {len(data)} bytes; what is swapped or replaced has "
                f"{LARGEST_SWAP} at most on Modal"
            )
        self._check_folders(key)
