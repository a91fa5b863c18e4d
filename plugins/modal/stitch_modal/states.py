"""What is under the keys of a store: by its cells, by its files, and as this process has last seen it.

The files say what was decided, the cells what may be newer. All of it is blocking, from any thread.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import secrets
import time
from dataclasses import dataclass, replace
from typing import Any

from stitch_core.ports import Clock, StoreError
from stitch_core.stores.dated import StoreTime
from stitch_core.stores.keys import is_key

from .cells import Cell, Cells, Kind
from .mount import MountedFiles
from .remote import RemoteFiles

LOOK_AGAIN = 900.0
"""Seconds after which what is known of the files is looked up again. Far below ``EXPIRES``."""

EXPIRES = 7 * 86400.0
"""Seconds without a read or write after which Modal drops an entry of a Dict."""

STALE_AFTER = 86400.0
"""Seconds after which a file in ``.stitch/new`` is the leftover of a process that died."""

FORGET_AFTER = 4 * EXPIRES
"""Seconds for which a file says that an object was deleted."""

KNOWN = 4096
NEW = ".stitch/new"
STATE = re.compile(r"(\d{12})\.(file|bytes|hint|gone)\.([0-9a-f]+)\Z")


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


class States:
    """The states of a store's objects. ``where`` names the store in errors; ``visible_after`` in seconds."""

    def __init__(
        self, files: MountedFiles | RemoteFiles, cells: Cells, clock: Clock, visible_after: float, where: str
    ) -> None:
        self.files, self.cells, self.where = files, cells, where
        self._clock, self.visible_after = clock, visible_after
        self.time = StoreTime(self._date_of_new, clock)
        self._known: dict[str, State] = {}
        self._learned = -float("inf")  # when a swapped object was last seen to have changed
        self._swept = False

    def known(self, key: str) -> State | None:
        """What was last seen of an object that was swapped, replaced or deleted."""
        return self._known.get(key)

    def forget(self, key: str) -> None:
        self._known.pop(key, None)

    def look(self, key: str, *, newest: bool = True) -> State:
        """What is under the key. ``newest``: ask for later states of what the files show as created, too."""
        state = self._known.get(key)
        # Cells are dated by whoever wrote them: what seems to be of the future is looked up, too.
        if state is None or abs(self._clock.time() - state.looked) > LOOK_AGAIN:
            state = self._look_at_files(key, state)
        if state.number == 0 or (state.kind == "file" and not state.marked and not newest):
            return state
        if state.kind == "hint":
            cell = self.cells.get(key, state.number)
            if cell is None:  # deleted, or not touched for a week
                self._known.pop(key, None)
                self.files.refresh(self.visible_after)
                state = self.from_files(key)
            elif cell.kind == "hint":
                state = replace(state_of(state.number, cell), settled=state.settled, looked=state.looked)
        while state.number:
            cell = self.cells.get(key, state.number + 1)
            if cell is None:
                break
            state = replace(state_of(state.number + 1, cell), looked=state.looked)
            if state.kind == "bytes":
                self._learned = self._clock.monotonic()
        self.remember(key, state)
        return state

    def _look_at_files(self, key: str, known: State | None) -> State:
        """What the files say, after a reload where they say nothing; or what is known and newer."""
        if known is not None:
            self.files.refresh(self.visible_after)
        state = self.from_files(key)
        if state.number == 0:
            state = self._wait_for(key)
        if known is None or known.settled or state.number >= known.number:
            self._known.pop(key, None)
            return state
        # Its writer died before it was in the files, and the cell would be dropped in the end.
        self._known.pop(key)
        cell = self.cells.get(key, known.number)
        if cell is None or cell.token != known.token:
            return state
        with contextlib.suppress(StoreError, OSError):
            self.settle(key, known)
        return replace(known, looked=self._clock.time())

    def _wait_for(self, key: str) -> State:
        """After a reload. What a head names was finished before it: until that must be visible, look on."""
        since = self._clock.monotonic() - self._learned
        self.files.refresh(min(since, self.visible_after))
        state = self.from_files(key)
        while state.number == 0 and self._clock.monotonic() - self._learned < self.visible_after:
            time.sleep(self.visible_after / 8)
            self.files.refresh(0.0)
            state = self.from_files(key)
        return state

    def from_files(self, key: str) -> State:
        now = self._clock.time()
        names = [name for name, _ in self.files.names(states_folder(key))]
        states = [parsed(match) for match in map(STATE.match, names) if match]
        if not states:
            if self.files.size(key) is None:
                return State(looked=now)
            return State(1, "file", looked=now)
        state = replace(max(states, key=order), looked=now)
        if state.kind not in ("bytes", "hint"):
            return state
        data = self.files.read(state_path(key, state))
        return replace(state, data=data, token=digest(data) if state.kind == "hint" else state.token)

    def remember(self, key: str, state: State) -> None:
        if state.number == 0 or state.kind in ("file", "going"):
            return  # their bytes are in the files, or not yet, or no more
        known = self._known.get(key)
        if known is None or known.number <= state.number:
            if len(self._known) >= KNOWN:
                self._known.clear()
            self._known[key] = state

    def settle(self, key: str, state: State) -> None:
        """Write what was decided to the files, and commit it."""
        if state.settled or state.kind not in ("bytes", "hint", "gone"):
            return
        self.mark(key, state)
        if self.files.size(key) is not None:
            self.files.remove(key)
        self.files.commit()
        self.remember(key, replace(state, settled=True))

    def mark(self, key: str, state: State) -> None:
        new = self.new_name(secrets.token_hex(12))
        self.files.put(state_path(key, state), state.data or b"", new)
        for name, _ in self.files.names(states_folder(key)):
            match = STATE.match(name)
            # The one before stays: should a commit be seen in parts, there is never none.
            if match and int(match[1]) < state.number - 1:
                self.files.remove(f"{states_folder(key)}/{name}")

    def check_claim(self, key: str, number: int, token: str, began: float, refusal: type[StoreError]) -> None:
        """A cell was free; but had it been so for want of anybody who read it, in the last days?"""
        if self._clock.time() - began < EXPIRES / 2:
            return
        self.files.refresh(0.0)
        state = self.from_files(key)
        if state.number >= number and state.token != token:
            self.cells.pop(key, number)
            self._known.pop(key, None)
            raise refusal(f"{self.where}{key} was written by others while this process slept")

    def check_known(self, key: str) -> None:
        """Should a Dict ever have let two win, the one whose state the readers do not take finds out here."""
        self.files.refresh(self.visible_after)
        known, seen = self._known.get(key), self.from_files(key)
        if known is not None and seen.number >= known.number and seen.token != known.token:
            self._known[key] = seen

    def new_name(self, token: str) -> str:
        self._sweep()
        return f"{NEW}/{int(self._clock.time())}.{token}"

    def _date_of_new(self) -> float:
        return self.files.date_of_new(f"{NEW}/{secrets.token_hex(12)}", self._clock)

    def _sweep(self) -> None:
        """Once per store: remove what writers that died left in ``.stitch/new``."""
        if self._swept:
            return
        self._swept = True
        for name, _ in self.files.names(NEW):
            with contextlib.suppress(OSError):
                if name.partition(".")[0].isdecimal() and self._age(f"{NEW}/{name}") > STALE_AFTER:
                    self.files.remove(f"{NEW}/{name}")

    def _age(self, path: str) -> float:
        return self.time.now() - self.files.modified(path)

    def forget_old(self, key: str) -> None:
        """Remove what says of keys near this one that they were deleted, weeks ago."""
        folder = key.rpartition("/")[0]
        above = folder.rpartition("/")[0]
        near = {folder}
        if above:
            rows = self.files.names(above)
            near |= {f"{above}/{name}" for name, is_folder in rows if is_folder and is_key(name)}
        for place in sorted(near):
            for name, is_folder in self.files.names(place):
                if is_folder and name.startswith(".") and name != ".stitch":
                    self._forget_if_old(f"{place}/{name}" if place else name)

    def _forget_if_old(self, states: str) -> None:
        paths = [f"{states}/{name}" for name, _ in self.files.names(states)]
        newest = max(paths, default="")
        match = STATE.match(newest.rpartition("/")[2])
        if not match or match[2] != "gone":
            return
        if self._age(newest) > FORGET_AFTER:
            for path in paths:
                self.files.remove(path)


def state_of(number: int, cell: Cell) -> State:
    """A state that only its cell says so far."""
    data = cell.data if cell.kind in ("bytes", "hint") else None
    return State(number, cell.kind, cell.token, data, marked=True, settled=False, looked=cell.time)


def parsed(match: re.Match[str]) -> State:
    kind: Any = match[2]
    return State(int(match[1]), kind, match[3], marked=True)


def order(state: State) -> tuple[int, int]:
    """Should a Dict ever have let two win, all readers agree on one of them."""
    return state.number, -int(state.token, 16)


def states_folder(key: str) -> str:
    folder, _, name = key.rpartition("/")
    return f"{folder}/.{name}" if folder else f".{name}"


def state_path(key: str, state: State) -> str:
    token = "0" if state.kind == "hint" else state.token
    return f"{states_folder(key)}/{state.number:012d}.{state.kind}.{token}"


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]
