"""The shared virtual environments: `venv.py path [NAME]` prints where one is, `venv.py build [NAME]` makes
it. NAME is `core` (the default), `sglang` or `miles`.

They lie outside the clone, named by what goes into them, so that a second clone with the same requirements
starts at once. Stitch itself is never installed there: a clone runs its own code, through PYTHONPATH.
"""

import sys

if sys.version_info < (3, 11):
    sys.exit(
        "stitch needs Python 3.11 or newer, %s is %s: set PYTHON=/path/to/python3.11"
        % (sys.executable, sys.version.split()[0])
    )

import fcntl
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parent.parent / "requirements"
NAMES = ("core", "sglang", "miles")
TORCH_INDEX = os.environ.get("TORCH_INDEX", "")


def requirements(name: str) -> list[Path]:
    """The environment's files: with what each package asks for, and, where there is one, without."""
    files = [REQUIREMENTS / f"{name}.txt", REQUIREMENTS / f"{name}-no-deps.txt"]
    return [file for file in files if file.exists()]


def location(name: str) -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    root = Path(os.environ.get("STITCH_VENVS") or Path(cache, "stitch", "venvs"))
    key = hashlib.sha256(b"".join(file.read_bytes() for file in requirements(name)))
    key.update(f"\0{platform.python_version()}\0{TORCH_INDEX}".encode())
    return root.absolute() / f"{name}-{key.hexdigest()[:12]}"


def complete(venv: Path) -> bool:
    # The interpreter that the environment was made from may be gone; then its link dangles.
    return (venv / ".complete").exists() and (venv / "bin" / "python").exists()


def build(venv: Path, name: str) -> None:
    shutil.rmtree(venv, ignore_errors=True)
    print(f"making {venv} (once for these requirements)", file=sys.stderr, flush=True)
    # Some distributions split ensurepip off; then our own pip installs into the environment from outside.
    has_ensurepip = importlib.util.find_spec("ensurepip") is not None
    python = str(venv / "bin" / "python")
    subprocess.run(
        [sys.executable, "-m", "venv", *([] if has_ensurepip else ["--without-pip"]), str(venv)], check=True
    )
    pip = [python, "-m", "pip"] if has_ensurepip else [sys.executable, "-m", "pip", "--python", python]
    install = [*pip, "install", "--quiet", "--disable-pip-version-check"]
    with_deps, *without_deps = requirements(name)
    if TORCH_INDEX:
        pin = re.search(r"^torch==\S+", with_deps.read_text(), re.MULTILINE)
        assert pin, f"{with_deps} has no line torch==..."
        # Alone: what torch needs comes from the pins, not from that index.
        subprocess.run([*install, "--no-deps", "--index-url", TORCH_INDEX, pin.group()], check=True)
    subprocess.run([*install, "-r", str(with_deps)], check=True)
    for file in without_deps:
        subprocess.run([*install, "--no-deps", "-r", str(file)], check=True)
    (venv / ".complete").touch()


def main() -> None:
    verb, name = [*sys.argv[1:], "core"][:2] if sys.argv[1:] else ("", "")
    if name not in NAMES:
        sys.exit(__doc__)
    venv = location(name)
    if verb == "path":
        print(venv)
    elif verb == "build":
        venv.parent.mkdir(parents=True, exist_ok=True)
        with open(f"{venv}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not complete(venv):
                build(venv, name)
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        sys.exit(f"the virtual environment could not be made: {' '.join(error.cmd)} failed")
