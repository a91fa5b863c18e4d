"""Run a command unless it was run before, on whatever host shares the directory of markers.

    python3 -m stitch_recipes.launch.once /models/.prepared bash -c '...'

Needs nothing but Python, so that it runs on any of the images. Exits as the command does.
"""

from __future__ import annotations

import fcntl
import hashlib
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def once(markers: Path, argv: Sequence[str]) -> int:
    """The command's exit code; 0 if its marker says that it was done."""
    markers.mkdir(parents=True, exist_ok=True)
    marker = markers / hashlib.sha256("\0".join(argv).encode()).hexdigest()[:32]
    with open(f"{marker}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several of one host
        if marker.exists():
            print(f"done before ({marker}; remove it to do it again)", file=sys.stderr)
            return 0
        code = subprocess.run(argv).returncode
        if code == 0:
            marker.write_text(shlex.join(argv) + "\n", "utf-8")
        return code


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    sys.exit(once(Path(sys.argv[1]), sys.argv[2:]))
