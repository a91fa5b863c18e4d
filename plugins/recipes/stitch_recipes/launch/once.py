"""Run a command unless it was run before, on whatever host shares the directory of markers.

    python3 -m stitch_recipes.launch.once /models/.prepared /models/air-fp8 1 env A=B bash -c '...'

It was run before if a marker says so, of these very words, and what it made is still there. With several
nodes it is run on each at once, NODE_RANK being the node's, and was run before if it ended well on all.
Needs nothing but Python, so that it runs on any of the images. Exits as the command does.
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

WORDS = 6
"""Before the command's own: python3, -m, this module, markers, what is made, nodes."""


def marker_paths(markers: Path, argv: Sequence[str], nodes: int) -> list[Path]:
    """One for each node; all are there once the command ended well on all."""
    name = hashlib.sha256("\0".join(argv).encode()).hexdigest()[:32]
    return [markers / f"{name}.{node}" for node in range(nodes)]


def once(markers: Path, made: Path, argv: Sequence[str], nodes: int = 1, node: int = 0) -> int:
    """The command's exit code; 0 if the markers say that it was done and ``made`` is there."""
    markers.mkdir(parents=True, exist_ok=True)
    marked = marker_paths(markers, argv, nodes)
    with open(f"{marked[node]}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several of one host, for one node
        if all(path.exists() for path in (*marked, made)):
            print(f"done before ({marked[node]}; remove it to do it again)", file=sys.stderr)
            return 0
        marked[node].unlink(missing_ok=True)  # done again: what it made is gone
        code = subprocess.run(argv).returncode
        if code == 0:
            marked[node].write_text(shlex.join(argv) + "\n", "utf-8")
        return code


if __name__ == "__main__":
    if len(sys.argv) < 5:
        sys.exit(__doc__)
    markers, made, nodes, *command = sys.argv[1:]
    sys.exit(once(Path(markers), Path(made), command, int(nodes), int(os.environ.get("NODE_RANK", "0"))))
