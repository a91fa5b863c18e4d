"""Where on this machine a store is, and whether it can be written."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import unquote, urlsplit


def is_read_only(path: Path) -> bool:
    """Whether a path, or what is there above it, is on a mount that nothing can be written to."""
    while not path.exists():
        path = path.parent
    return bool(os.statvfs(path).f_flag & os.ST_RDONLY)


def directory_of(url: str) -> Path | None:
    """The directory of a ``file:`` store; None for others."""
    parts = urlsplit(url)
    return (
        Path(os.path.abspath(unquote(parts.path, errors="surrogateescape")))
        if parts.scheme == "file"
        else None
    )
