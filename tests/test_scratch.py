"""Scratch directories of processes that share a parent."""

import subprocess
import sys
from pathlib import Path

from stitch_core.files import PosixFiles
from stitch_core.scratch import own_directory, scratch_parent

ROOT = Path(__file__).parents[1]
DIES = """
import os, sys
from pathlib import Path
from stitch_core.files import PosixFiles
from stitch_core.scratch import own_directory
with own_directory(Path(sys.argv[1]), PosixFiles()) as mine:
    (mine / "delta").write_bytes(b"half")
    os._exit(9)
"""


def test_a_stalled_process_and_its_successor_do_not_share_files(tmp_path: Path) -> None:
    with own_directory(tmp_path, PosixFiles()) as stalled, own_directory(tmp_path, PosixFiles()) as successor:
        assert stalled != successor
        assert stalled.is_dir()
    assert not list(tmp_path.iterdir())


def test_what_a_dead_process_left_is_removed(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", DIES, str(tmp_path)], cwd=ROOT, timeout=30)
    assert done.returncode == 9
    assert len(list(tmp_path.iterdir())) == 1
    with own_directory(tmp_path, PosixFiles()) as mine:
        assert list(tmp_path.iterdir()) == [mine]


def test_no_room_in_ram_means_the_default_place(tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(1 << 41)
    assert scratch_parent(tmp_path) is None
    assert scratch_parent(tmp_path / "missing") is None
