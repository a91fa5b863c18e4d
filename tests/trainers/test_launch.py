"""``python -m stitch_miles.launch`` runs a script as Python does, with external engines placed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PLACEMENT = """
def _get_placement_group_layout(args):
    return 8, 8
"""
SCRIPT = """
import sys
from types import SimpleNamespace
import beside
from miles.ray import placement_group
for external in (True, False):
    print(placement_group._get_placement_group_layout(SimpleNamespace(rollout_external=external)))
print(__name__, sys.argv[1:], beside.here)
"""


def launch(directory: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).resolve().parents[2]
    paths = [directory, root, root / "plugins" / "miles"]
    return subprocess.run(
        [sys.executable, "-m", "stitch_miles.launch", *argv],
        cwd=directory, capture_output=True, text=True, timeout=60, check=False,
        env={"PYTHONPATH": ":".join(map(str, paths)), "PATH": ""},
    )  # fmt: skip


def test_the_script_runs_as_main_with_its_arguments_and_engines_lie_on_the_trainers_first_gpu(
    tmp_path: Path,
) -> None:
    package = tmp_path / "miles" / "ray"
    package.mkdir(parents=True)
    for path in (package.parent, package):
        (path / "__init__.py").touch()
    (package / "placement_group.py").write_text(PLACEMENT)
    (tmp_path / "beside.py").write_text("here = 1\n")
    (tmp_path / "train.py").write_text(SCRIPT)
    done = launch(tmp_path, "train.py", "--lr", "1e-6")
    assert done.stdout.splitlines() == ["(8, 0)", "(8, 8)", "__main__ ['--lr', '1e-6'] 1"], done.stderr


def test_a_script_that_is_not_there_is_named(tmp_path: Path) -> None:
    done = launch(tmp_path, "train_asink.py")
    assert done.returncode == 1
    assert "train_asink.py is not a file here" in done.stderr
