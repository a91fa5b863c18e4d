"""Whether a checkpoint is all there: every file of its index, as long as its header says.

    python3 -m stitch_recipes.launch.whole /models/air-fp8

A copy that was cut off is a directory as well. Reads headers, no weights; exits with 1 and the first fault.
"""

from __future__ import annotations

import sys
from pathlib import Path

from stitch_core.checkpoint import Checkpoint, CheckpointError
from stitch_core.files import PosixFiles


def fault(directory: Path) -> str | None:
    """What is wrong first, None if nothing is."""
    try:
        Checkpoint.open(directory, PosixFiles())
    except (CheckpointError, OSError) as error:
        return str(error)
    return None if (directory / "config.json").is_file() else f"{directory / 'config.json'}: not there"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(fault(Path(sys.argv[1])))
