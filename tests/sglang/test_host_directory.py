"""Where a server's host checkpoint lives: gone with the server, however it ends, unless a place was named."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from stitch_core import scratch
from stitch_core.files import PosixFiles
from stitch_core.host_checkpoint import HostCheckpoint
from stitch_core.testing.runs import RunBuilder
from stitch_sglang.server import Scratch

FILES = PosixFiles()
DIES = """
import os, signal, sys, tempfile
from pathlib import Path
from stitch_core import scratch
from stitch_core.files import PosixFiles
from stitch_core.host_checkpoint import HostCheckpoint
from stitch_core.manifest import Manifest
from stitch_sglang.server import Scratch
boot, place, given, key, manifest = sys.argv[1:]
tempfile.tempdir, scratch.TMPFS = place, Path(place) / "shm"
mine = Scratch(Path(given) if given else None, Path(boot))
host = HostCheckpoint(mine.path, PosixFiles())
host.open()
host.seed(Path(boot), Manifest.decode(manifest.encode(), key))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the temporary directories of this test are, and of what it kills."""
    path = tmp_path / "place"
    (path / "shm").mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    monkeypatch.setattr(scratch, "TMPFS", path / "shm")
    return path


@pytest.fixture
def run(tmp_path: Path) -> RunBuilder:
    return RunBuilder(tmp_path / "trainer", FILES)


def killed(run: RunBuilder, place: Path, given: Path | None) -> None:
    """A server's host checkpoint was seeded with the boot checkpoint, and then the server was killed."""
    manifest = run.versions[0]
    words = [run.boot, place, given or "", manifest.key, manifest.encode().decode()]
    command = [sys.executable, "-c", DIES, *map(str, words)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == -9, done.stderr


def left(place: Path) -> list[Path]:
    return [path for parent in (place, place / "shm") for path in parent.glob("stitch-*")]


@pytest.mark.slow
def test_a_killed_server_left_its_model_in_ram_for_good(run: RunBuilder, place: Path) -> None:
    killed(run, place, None)
    (dead,) = left(place)
    assert dead.parent == place / "shm"
    assert list(dead.glob("host/data-*/*.safetensors"))
    mine = Scratch(None, run.boot)
    assert left(place) == [mine.path.parent]
    assert mine.path.parent != dead
    mine.close()
    assert left(place) == []


def test_a_living_servers_directory_is_kept_by_the_next_one(run: RunBuilder, place: Path) -> None:
    first, second = Scratch(None, run.boot), Scratch(None, run.boot)
    assert set(left(place)) == {first.path.parent, second.path.parent}
    first.close()
    first.close()
    assert left(place) == [second.path.parent]
    second.close()


def test_without_room_in_ram_it_is_where_temporary_files_are(
    run: RunBuilder, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was put in RAM whatever room was there, and the first copy failed."""
    monkeypatch.setattr(scratch, "ROOM_FOR_JOURNAL", 1 << 60)
    mine = Scratch(None, run.boot)
    assert mine.path.parent.parent == place
    mine.close()


@pytest.mark.slow
def test_a_restarted_server_finds_its_version_in_the_directory_that_was_named(
    run: RunBuilder, place: Path, tmp_path: Path
) -> None:
    killed(run, place, tmp_path / "host")
    mine = Scratch(tmp_path / "host", run.boot)
    host = HostCheckpoint(mine.path, FILES)
    holding = host.open()
    assert holding is not None
    assert holding.state == run.versions[0].state
    host.close()
    mine.close()
    assert (tmp_path / "host" / "marker.json").exists()
    assert left(place) == []
