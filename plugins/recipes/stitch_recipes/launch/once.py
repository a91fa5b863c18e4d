"""Run a command unless it was run before, on whatever host shares the directory of markers.

    python3 -m stitch_recipes.launch.once /models/.prepared NODES bash -c '...'

With several nodes it is run on each at once, NODE_RANK being the node's, and was run before if it ended well
on all. Needs nothing but Python, so that it runs on any of the images. Exits as the command does.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def marker_paths(markers: Path, argv: Sequence[str], nodes: int) -> list[Path]:
    """One for each node; all are there once the command ended well on all."""
    name = hashlib.sha256("\0".join(argv).encode()).hexdigest()[:32]
    return [markers / f"{name}.{node}" for node in range(nodes)]


def once(markers: Path, argv: Sequence[str], nodes: int = 1, node: int = 0) -> int:
    """The command's exit code; 0 if the markers say that it was done."""
    markers.mkdir(parents=True, exist_ok=True)
    marked = marker_paths(markers, argv, nodes)
    with open(f"{marked[node]}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several of one host, for one node
        if all(path.exists() for path in marked):
            print(f"done before ({marked[node]}; remove it to do it again)", file=sys.stderr)
            return 0
        code = subprocess.run(argv).returncode
        if code == 0:
            marked[node].write_text(shlex.join(argv) + "\n", "utf-8")
        return code


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    sys.exit(once(Path(sys.argv[1]), sys.argv[3:], int(sys.argv[2]), int(os.environ.get("NODE_RANK", "0"))))
