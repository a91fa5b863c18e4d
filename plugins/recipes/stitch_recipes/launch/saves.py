"""Run the trainer, and beside it remove checkpoints that nothing needs any more.

    python3 -m stitch_recipes.launch.saves /saves/my-run 5 bash -c '...'

The newest ones stay, so many, and whatever is newer than the one that a trainer would load. (Megatron's own
--save-retain-interval keeps none but the newest here: only multiples of it, which has to be one of
--save-interval, and both frameworks number a checkpoint by its last rollout, from 0: 19, 39, 59.) Needs
nothing but Python, so that it runs on any of the images. Exits as the trainer does.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

EVERY_SECONDS = 300.0
"""Between two looks; STITCH_SAVES_SECONDS replaces it."""

TRACKER = "latest_checkpointed_iteration.txt"
REMOVED = ".removed"

_ITERATION = re.compile(r"iter_(\d{7,})")


def prune(saves: Path, keep: int) -> list[str]:
    """Remove all but the ``keep`` newest of the checkpoints up to the one that would be loaded; their names.

    What is cut off while it is removed goes the next time. Raises OSError.
    """
    for rest in saves.glob(f"iter_*{REMOVED}"):
        shutil.rmtree(rest, ignore_errors=True)
    try:
        newest = int((saves / TRACKER).read_text("utf-8"))
    except (OSError, ValueError):  # nothing saved yet
        return []
    found = {
        int(match[1]): path
        for path in saves.glob("iter_*")
        if (match := _ITERATION.fullmatch(path.name)) and path.is_dir() and not path.is_symlink()
    }
    if newest not in found:  # whatever that is, it is nothing to guess from
        return []
    passed = sorted(number for number in found if number <= newest)
    removed = []
    for number in passed[:-keep]:
        gone = found[number].with_name(found[number].name + REMOVED)
        found[number].rename(gone)  # so that nobody loads half of it
        shutil.rmtree(gone, ignore_errors=True)
        removed.append(found[number].name)
    return removed


def run(saves: Path, keep: int, argv: Sequence[str], every: float = EVERY_SECONDS) -> int:
    """The trainer's exit code; 128 and the signal's number where one ended it."""
    child = subprocess.Popen(argv)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, frame: child.send_signal(received))
    while True:
        try:
            code = child.wait(every)
            return code if code >= 0 else 128 - code
        except subprocess.TimeoutExpired:
            try:
                for name in prune(saves, keep):
                    print(f"removed {saves / name}: {keep} newer ones are kept", file=sys.stderr, flush=True)
            except OSError as error:  # the trainer goes on without
                print(f"{saves}: old checkpoints stay: {error}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    seconds = float(os.environ.get("STITCH_SAVES_SECONDS", EVERY_SECONDS))
    sys.exit(run(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:], seconds))
