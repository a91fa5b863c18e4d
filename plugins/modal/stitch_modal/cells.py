"""Write-once cells in a Modal Dict: of all that claim one, one wins.

The n-th state of an object is claimed by putting its cell, ``<volume id>/<key>#<n>``, with
``skip_if_exists``. The call repeats itself after a lost answer, and is then told "there is one already" of
its own put; so the cell is read back, and whose it is says the token in it, which nobody else can have.

Modal drops an entry that nobody read or wrote for 7 days. By then the files of the Volume say the same
(see ``store``), and who decided on older knowledge of them than that looks again.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from stitch_core.ports import Unavailable

from .host import Host

Kind = Literal["file", "bytes", "hint", "gone", "going"]


@dataclass(frozen=True)
class Cell:
    """``file``: created; its bytes are here (``data``) or in the file ``new`` until they are in their place.

    ``bytes``: swapped in. ``hint``: replaced, again and again, in this cell. ``gone``: deleted. ``going``:
    was created, and is being deleted. ``time``: of the writer, seconds since 1970.
    """

    kind: Kind
    token: str
    time: float
    data: bytes | None = None
    new: str | None = None


class Cells:
    """The cells of one store. Blocking. Raises what the SDK does, and Unavailable."""

    def __init__(self, host: Host, prefix: str) -> None:
        self._host, self._prefix = host, prefix

    def get(self, key: str, number: int) -> Cell | None:
        entries, name = self._named(key, number)
        value = entries.get(name)
        return None if value is None else Cell(**value)

    def claim(self, key: str, number: int, cell: Cell) -> Cell:
        """The cell that is there afterwards: ``cell``, or the one that was there before it."""
        entries, name = self._named(key, number)
        failed: Exception | None = None
        try:
            entries.put(name, asdict(cell), skip_if_exists=True)
        except Exception as error:  # it may have landed all the same
            failed = error
        found = self.get(key, number)
        if found is None:
            if failed is not None:
                raise failed
            raise Unavailable(f"{key}: the claim {name} is not there after it was put")
        return found

    def put(self, key: str, number: int, cell: Cell) -> None:
        """Whatever was there."""
        entries, name = self._named(key, number)
        entries.put(name, asdict(cell))

    def pop(self, key: str, number: int) -> None:
        entries, name = self._named(key, number)
        entries.pop(name, None)

    def _named(self, key: str, number: int) -> tuple[Any, str]:
        entries, volume = self._host.connect()
        return entries, f"{volume}/{self._prefix}{key}#{number}"
