"""Where scratch goes: into RAM where there is room, since a host checkpoint is rewritten at every version."""

from __future__ import annotations

import shutil
from pathlib import Path

TMPFS = Path("/dev/shm")
ROOM_FOR_JOURNAL = 192 << 20


def scratch_parent(checkpoint: Path) -> Path | None:
    """The parent for a temporary host checkpoint of ``checkpoint``'s size; None: the system's default."""
    try:
        size = sum(path.stat().st_size for path in checkpoint.iterdir() if path.is_file())
        # A full version is built beside the one that it replaces.
        if shutil.disk_usage(TMPFS).free >= 2 * size + ROOM_FOR_JOURNAL:
            return TMPFS
    except OSError:
        pass
    return None
