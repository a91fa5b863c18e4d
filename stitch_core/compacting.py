"""A compactor beside a trainer: a process of its own, at low priority, that ends when the trainer does."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
from pathlib import Path

logger = logging.getLogger("stitch")

STOP_SECONDS = 10.0


class CompactorProcess:
    """``stitch compact`` for a run. Its stdin is a pipe that ends with this process, however that ends."""

    def __init__(self, store: str, run: str, boot: Path, work: Path) -> None:
        """``store`` is a URL, ``boot`` the checkpoint that is version 0, ``work`` scratch space."""
        self._command = [
            sys.executable, "-m", "stitch_core.cli", "compact", "--store", store, "--run", run,
            "--base", str(boot), "--work", str(work / "compact"), "--until-eof",
            "--metrics", "",  # where the trainer's own are shown there is no room for another's
        ]  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None

    def ensure(self) -> None:
        """Start it, or start it again if it has ended. A failure is told, and harms nothing."""
        if self._process is not None and self._process.poll() is None:
            return
        if self._process is not None:
            logger.warning("the compactor ended with code %s: it is started again", self._process.returncode)
            self.close()
        try:
            self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        except OSError as error:
            logger.warning("the compactor cannot be started: %s", error)

    def close(self) -> None:
        """End it; what it was merging is merged again by the next one."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
