"""`tiers.py COUNT TARGET...` runs make targets, COUNT at once, those named first begun first.

Each writes to out/tests/TARGET.log; here are a line a minute, one when it ends, and, of one that fails, the
end of its log. All are run, whatever becomes of the others; the exit status is 1 if any failed.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import NamedTuple, NoReturn

LOGS = Path("out", "tests")
TAIL = 300  # lines of a log that are shown
SAY_EVERY = 60.0  # seconds


class Running(NamedTuple):
    target: str
    log: Path
    process: subprocess.Popen[bytes]
    began: float

    def say(self, what: str) -> None:
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        seconds = int(time.monotonic() - self.began)
        last = lines[-1][:100] if lines else ""
        print(f"{self.target}: {what}, {seconds // 60}:{seconds % 60:02} ({last})", flush=True)


def start(target: str) -> Running:
    LOGS.mkdir(parents=True, exist_ok=True)
    log = LOGS / f"{target}.log"
    with open(log, "wb") as file:
        # A session of its own, so that all that it started ends with it.
        process = subprocess.Popen(
            ["make", "--no-print-directory", target],
            stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    print(f"{target}: started, its output goes to {log}", flush=True)
    return Running(target, log, process, time.monotonic())


def end(running: list[Running]) -> None:
    for signal_, seconds in ((signal.SIGTERM, 20.0), (signal.SIGKILL, 5.0)):
        for one in running:
            if one.process.poll() is None:
                os.killpg(one.process.pid, signal_)
        deadline = time.monotonic() + seconds
        for one in running:
            try:
                one.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                continue


def finished(one: Running) -> bool:
    """Say how it ended; whether well."""
    if one.process.returncode == 0:
        one.say("passed")
        return True
    one.say(f"FAILED with {one.process.returncode}")
    print(f"----- the end of {one.log}")
    print("\n".join(one.log.read_text(errors="replace").splitlines()[-TAIL:]))
    print(f"----- that was {one.log}", flush=True)
    return False


def main() -> int:
    if len(sys.argv) < 3 or not sys.argv[1].isdecimal():
        sys.exit(__doc__)
    count, waiting = int(sys.argv[1]), sys.argv[2:]
    running: list[Running] = []
    failed = False

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    said = time.monotonic()
    try:
        while waiting or running:
            while waiting and len(running) < count:
                running.append(start(waiting.pop(0)))
            time.sleep(0.2)
            for one in [one for one in running if one.process.poll() is not None]:
                running.remove(one)
                failed |= not finished(one)
            if time.monotonic() - said >= SAY_EVERY:
                said = time.monotonic()
                for one in running:
                    one.say("running")
    finally:
        end(running)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
