"""What the system says of its mounts."""

from __future__ import annotations

import os
import re
from pathlib import Path


def mount_kind(path: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """The kind of filesystem that holds a path, such as ext4 or fuse.s3fs; "unknown" where nothing says."""
    best, kind = -1, "unknown"
    try:
        lines = mounts.read_bytes().split(b"\n")
    except OSError:
        return kind
    resolved = Path(os.path.realpath(path))
    for line in lines:
        fields = line.split(b" ")
        if len(fields) < 3:
            continue
        # A blank is written as a backslash and three octal digits; all else is as in the path.
        point = Path(os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda m: bytes([int(m[1], 8) & 255]), fields[1])))
        if resolved.is_relative_to(point) and len(point.parts) >= best:
            best, kind = len(point.parts), os.fsdecode(fields[2])
    return kind
