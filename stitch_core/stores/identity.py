"""Which store a directory holds: ``<root>/.stitch/store.json``, written by its first writer.

A directory that was unmounted or removed looks like an empty store, and so does a mistyped one. Who has seen
the identity once takes "there is nothing" for an answer only while it is still there.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..manifest import FormatError, canonical_json, read_document
from ..ports import Files, StoreError

FORMAT = "stitch.store/1"
FILE = "store.json"


@dataclass(frozen=True)
class Identity:
    """``create`` is how objects come to be, the same for every writer: by hard link, or under a lock."""

    id: str
    create: Literal["link", "lock"]

    def encode(self) -> bytes:
        return canonical_json({"format": FORMAT, "id": self.id, "create": self.create})

    @classmethod
    def decode(cls, data: bytes, where: str) -> Identity:
        """Raises FormatError."""
        value = read_document(data, FORMAT, where)
        name, create = value.get("id"), value.get("create")
        if not isinstance(name, str) or not name:
            raise FormatError(f"{where}: id is missing")
        if create == "link":
            return cls(name, "link")
        if create == "lock":
            return cls(name, "lock")
        raise FormatError(f"{where}: create must be link or lock, not {create!r}")


def read_identity(files: Files, private: Path) -> Identity | None:
    """The identity kept in ``private``, None where there is none. Raises OSError, StoreError."""
    path = private / FILE
    try:
        return Identity.decode(files.read(path), str(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except FormatError as error:
        raise StoreError(
            f"{error}; remove the file if the store is sound, and the next write makes it anew"
        ) from error
