"""Listing the objects in a directory: files whose paths are keys.

Symbolic links are followed, but for those that lead round in a circle. Such a link, and what is neither file
nor directory, is no object: ``odd`` is told of it, in words, and the rest is listed.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

from ..ports import Entry, Files
from .keys import is_key

Odd = Callable[[str], None]


def list_objects(root: Path, files: Files, odd: Odd, prefix: str) -> list[Entry]:
    """Objects whose key starts with ``prefix``, sorted; none where there is no directory. Raises OSError."""
    found: list[Entry] = []
    folder = prefix.rpartition("/")[0]
    # With each folder the real places that lead there: its own, and of those that its links lie in.
    pending: list[tuple[str, tuple[Path, ...]]] = [(folder + "/" if folder else "", (_real(root / folder),))]
    while pending:
        folder, places = pending.pop()
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
                there = _entered(root / key, places, odd)
                if there is not None:
                    pending.append((key + "/", there))
            except FileNotFoundError:
                pass  # deleted while we list
            except OSError as error:
                if not _is_odd(error, root / key, odd):
                    raise
            else:
                if key.startswith(prefix):
                    found.append(Entry(key, size))
    return sorted(found, key=lambda entry: entry.key)


def list_folders(root: Path, files: Files, odd: Odd, prefix: str) -> list[str]:
    """Names of the directories right below ``prefix``, which ends with '/'. Raises OSError."""
    try:
        names = files.list(root / prefix)
    except (FileNotFoundError, NotADirectoryError):
        return []
    places = (_real(root / prefix),)
    return [
        name
        for name in names
        if is_key(prefix + name)
        and _is_directory(root / prefix / name, odd)
        and _entered(root / prefix / name, places, odd) is not None
    ]


def _is_directory(path: Path, odd: Odd) -> bool:
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        if not _is_odd(error, path, odd):
            raise
        return False


def _is_odd(error: OSError, path: Path, odd: Odd) -> bool:
    what = {errno.ELOOP: "a loop of symbolic links", errno.EINVAL: "neither a file nor a directory"}
    if error.errno not in what:
        return False
    odd(f"{path} is {what[error.errno]}: it is no object, and is passed over")
    return True


def _entered(path: Path, places: tuple[Path, ...], odd: Odd) -> tuple[Path, ...] | None:
    """The places that lead into a directory in the last of ``places``; None where they would come round."""
    if not path.is_symlink():
        return (*places[:-1], places[-1] / path.name)
    real = _real(path)
    if any(place.is_relative_to(real) for place in places):
        odd(f"{path} is a symbolic link to {real}, in which it lies itself: what is below it is passed over")
        return None
    return (*places, real)


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))
