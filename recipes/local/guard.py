"""Ends the demo's children when the demo itself dies, however it dies. A process of its own.

It reads ``+pid`` and ``-pid`` lines from standard input; when that closes, it kills what is left and removes
the directory named on its command line, which holds what the children kept in RAM.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path


class Guard:
    """The demo's end of the pipe."""

    def __init__(self, scratch: Path) -> None:
        # A session of its own: Ctrl-C and a closed terminal must not reach it before its work is done.
        self._process = subprocess.Popen(
            [sys.executable, "-I", __file__, os.fspath(scratch)],
            stdin=subprocess.PIPE, start_new_session=True, text=True, bufsize=1,
        )  # fmt: skip

    def watch(self, pid: int) -> None:
        self._say(f"+{pid}")

    def forget(self, pid: int) -> None:
        """The child was waited for: its pid may soon be another's."""
        self._say(f"-{pid}")

    def close(self) -> None:
        """Let it do its work now, and wait."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")


def main() -> None:
    pids: set[int] = set()
    for line in sys.stdin:
        pid = int(line[1:])
        if line.startswith("+"):
            pids.add(pid)
        else:
            pids.discard(pid)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    shutil.rmtree(sys.argv[1], ignore_errors=True)


if __name__ == "__main__":
    main()
