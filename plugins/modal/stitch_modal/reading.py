"""Reading the objects of a Volume: their newest state, their bytes, what there is. All of it is blocking.

Reading what was swapped asks the Dict for newer cells than the newest file, so a head is never read old, and
without a reload. Everything else is read from the files as they were at the last reload; what is not there is
looked for once more after a reload, at most one in ``visible_after`` seconds.
"""

from __future__ import annotations

import builtins

from stitch_core.ports import Blob, Entry, NotFound
from stitch_core.stores.keys import is_key

from .states import STATE, State, States, digest, order, parsed, state_path


class Reader:
    """Raises NotFound, what the files do, and what the SDK does. From any thread."""

    def __init__(self, states: States) -> None:
        self._states, self._files = states, states.files

    def load(self, key: str) -> Blob:
        state = self._states.look(key)
        if not state.live:
            raise NotFound(f"{self._states.where}{key}: no such object")
        if state.data is not None:
            return Blob(state.data, state.tag)
        data = self._stored(key)
        return Blob(data, f"{state.number}.{digest(data)}")

    def read(self, key: str, start: int, length: int | None) -> bytes:
        state = self._states.look(key, newest=False)
        if not state.live:
            raise NotFound(f"{self._states.where}{key}: no such object")
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

    def size(self, key: str) -> int:
        state = self._states.look(key, newest=False)
        if state.data is not None:
            return len(state.data)
        size = self._files.size(key) if state.live else None
        if size is None and state.live:
            self._files.refresh(0.0)
            size = self._files.size(key)
        if size is None:
            raise NotFound(f"{self._states.where}{key}: no such object")
        return size

    def modified(self, key: str) -> float | None:
        state = self._states.look(key, newest=False)
        if not state.live:
            raise NotFound(f"{self._states.where}{key}: no such object")
        if state.kind == "file":
            return self._files.modified(key)
        try:
            return self._files.modified(state_path(key, state))
        except FileNotFoundError:  # only its cell tells of it yet
            return None

    def now(self) -> float:
        """What time it is by the clock that dates files."""
        return self._states.time.now()

    def list(self, prefix: str) -> builtins.list[Entry]:
        self._files.refresh(self._states.visible_after)
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

    def folders(self, prefix: str) -> builtins.list[str]:
        self._files.refresh(self._states.visible_after)
        names = self._files.names(prefix.rstrip("/"))
        return [name for name, is_folder in names if is_folder and is_key(prefix + name)]
