"""The pointer of the public Stitch reference, read so that an operator is told what is there.

``<root>/latest`` holds the text ``<run>/weight_v000007`` or ``weight_v000007``, and the version lies in
``<root>/updates/weight_v000007/`` (source: modal-projects/stitch). Nothing here ever moves it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .ports import Entry, NotFound, Store
from .versions import RUN_ID, directory_name

KEY = "latest"
_POINTER = re.compile(r"(?:(?P<run>[^/\s]+)/)?weight_v(?P<number>[0-9]{6,18})\s*\Z")
_FILE = re.compile(r"updates/weight_v([0-9]{6,18})/(?!\.)[^/]+\Z")


@dataclass(frozen=True)
class LegacyPointer:
    """``run`` is None where the pointer names none; ``number`` is None for text that is no version."""

    text: str
    run: str | None
    number: int | None

    def __str__(self) -> str:
        if self.number is None:
            return f"{KEY} says {self.text!r}, which is no version of the public reference either"
        run = self.run or "a run that it does not name"
        return (
            f"{KEY} is the pointer of the public reference, at version {self.number} of {run}, in "
            f"updates/{directory_name(self.number)}. It is read and never moved here: create a run with "
            "'stitch claim', and publish on"
        )


async def legacy_pointer(store: Store) -> LegacyPointer | None:
    """The pointer, if the store has one. Raises Unavailable."""
    try:
        data = (await store.load(KEY)).data
    except NotFound:
        return None
    text = data[:200].decode("utf-8", "replace")
    match = _POINTER.match(text)
    if match is None or (match["run"] is not None and not RUN_ID.match(match["run"])):
        return LegacyPointer(text, None, None)
    return LegacyPointer(text.strip(), match["run"], int(match["number"]))


async def legacy_versions(store: Store) -> dict[int, list[Entry]]:
    """The files of each version directory. Raises Unavailable."""
    found: dict[int, list[Entry]] = {}
    for entry in await store.list("updates/"):
        match = _FILE.match(entry.key)
        if match is not None:
            found.setdefault(int(match[1]), []).append(entry)
    return found
