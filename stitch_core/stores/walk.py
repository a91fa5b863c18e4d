"""Listing the objects in a directory: files whose paths are keys."""

from __future__ import annotations

from pathlib import Path

from ..ports import Entry, Files
from .keys import is_key


def list_objects(root: Path, files: Files, prefix: str) -> list[Entry]:
    """Objects whose key starts with ``prefix``, sorted; none where there is no directory. Raises OSError."""
    found: list[Entry] = []
    folder = prefix.rpartition("/")[0]
    pending = [folder + "/" if folder else ""]
    while pending:
        folder = pending.pop()
        try:
            names = files.list(root / folder)
        except (FileNotFoundError, NotADirectoryError):
            continue
        for key in (folder + name for name in names):
            if not is_key(key) or not (key + "/").startswith(prefix):
                continue
            try:
                size = files.size(root / key)
            except IsADirectoryError:
                pending.append(key + "/")
            except FileNotFoundError:
                pass  # deleted while we list
            else:
                if key.startswith(prefix):
                    found.append(Entry(key, size))
    return sorted(found, key=lambda entry: entry.key)


def list_folders(root: Path, files: Files, prefix: str) -> list[str]:
    """Names of the directories right below ``prefix``, which ends with '/'. Raises OSError."""
    try:
        names = files.list(root / prefix)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [name for name in names if is_key(prefix + name) and (root / prefix / name).is_dir()]
