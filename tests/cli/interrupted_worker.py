"""Ends a command at each of its calls to the store, and looks at what is left; in a process of its own.

Arguments: a directory with ``store``, ``base`` and ``tmp``, a signal's name, the command's words. Prints one
JSON line: how many calls there were, the exit codes, and what was wrong after which call.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from stitch_core import scratch
from stitch_core.cli.main import main
from stitch_core.stores.local import LocalStore

ENDED = 99
"""Exit code of a command that was not reached by the signal any more."""


def end_at(call: int, number: int, words: list[str], output: Path) -> None:
    """In a child: run the command, and send this process the signal when it makes the call."""
    calls = 0

    def counted(real: Any) -> Any:
        def method(self: LocalStore, *arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == call:
                os.kill(os.getpid(), number)
            return real(self, *arguments)

        return method

    for name in ("_translate_write", "_translate_read"):
        setattr(LocalStore, name, counted(getattr(LocalStore, name)))
    with output.open("w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        code = main(words)
    os._exit(code if calls >= call else ENDED)


def look(words: list[str], good: tuple[int, ...] = (0,)) -> str | None:
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        code = main(words)
    return None if code in good else f"{words[0]}: {code}, {out.getvalue()}{err.getvalue()}"


def run(root: Path, number: int, words: list[str]) -> dict[str, Any]:
    place, store = root / "tmp", root / "store"
    tempfile.tempdir, scratch.TMPFS = str(place), place
    codes: Counter[int] = Counter()
    wrong: list[str] = []
    for call in range(1, 200):
        for path in root.glob("*out*"):
            (shutil.rmtree if path.is_dir() else os.remove)(path)
        shutil.rmtree(store)
        shutil.copytree(root / "pristine", store)
        pid = os.fork()
        if pid == 0:
            end_at(call, number, words, root / "output")
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code == ENDED:
            return {"calls": call - 1, "codes": dict(codes), "wrong": wrong}
        codes[code] += 1
        (store / "runs/r/fulls/lease").unlink(missing_ok=True)  # a minute later
        found = [
            "a traceback" if "Traceback" in (root / "output").read_text() else None,
            f"left {os.listdir(place)}" if number == signal.SIGINT and os.listdir(place) else None,
            look(["verify", "r", "--store", f"file:{store}"]),
            look(["status", "--store", f"file:{store}"]),
            look(words),
            f"left {os.listdir(place)} to the next" if os.listdir(place) else None,
        ]
        wrong += [f"after call {call}: {text}" for text in found if text is not None]
    raise AssertionError("it never ends")


if __name__ == "__main__":
    os.fsync = lambda fd: None  # only processes die here, not the machine: half of the time was the disk's
    directory = Path(sys.argv[1])
    # A shell that starts the tests in the background has it ignored, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    print(json.dumps(run(directory, getattr(signal, sys.argv[2]), sys.argv[3:])))
