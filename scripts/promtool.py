"""`promtool.py` prints where promtool is, fetched if need be; nothing, and why, where that cannot be.

The tests hold docs/alerts.yml to it. Where it is not installed, Debian's package `prometheus` is unpacked
below the cache, which needs no root; where there is no apt, or no network, those tests are skipped.
"""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGE = "prometheus"
SECONDS = 120.0


def cached() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return Path(cache, "stitch", "promtool", "promtool")


def works(promtool: str | Path) -> bool:
    """Whether it runs here: a cache may have come from another machine."""
    try:
        done = subprocess.run([promtool, "--version"], capture_output=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def fetch(to: Path) -> None:
    """Raises CalledProcessError, TimeoutExpired, OSError."""
    with tempfile.TemporaryDirectory(dir=to.parent) as folder:

        def run(*words: str) -> None:
            subprocess.run(words, cwd=folder, check=True, timeout=SECONDS, capture_output=True, text=True)

        apt = ("apt-get", "-o", "Acquire::Retries=2", "-o", "Acquire::http::Timeout=20")
        try:
            run(*apt, "download", PACKAGE)
        except subprocess.CalledProcessError:  # lists that are missing, as in most containers, or old
            apt = (*apt, "-o", f"Dir::State::lists={folder}/lists", "-o", f"Dir::Cache={folder}/cache")
            run(*apt, "-o", "Acquire::Languages=none", "update")
            run(*apt, "download", PACKAGE)
        (package,) = Path(folder).glob(f"{PACKAGE}_*.deb")
        run("dpkg-deb", "-x", package.name, "unpacked")
        os.replace(Path(folder, "unpacked", "usr", "bin", "promtool"), to)


def find() -> str | None:
    """Where it is. What stands in the way is said on stderr."""
    if (installed := shutil.which("promtool")) is not None:
        return installed
    here = cached()
    here.parent.mkdir(parents=True, exist_ok=True)
    with open(here.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            if not works(here):
                fetch(here)
        except (subprocess.SubprocessError, OSError, ValueError) as error:
            said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
            print(f"no promtool, its tests are skipped: {said[-1] if said else error}", file=sys.stderr)
            return None
    return str(here) if works(here) else None


if __name__ == "__main__":
    if (found := find()) is not None:
        print(found)
