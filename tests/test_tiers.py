"""scripts/tiers.py: every tier is run, what failed is shown, and nothing outlives it."""

import signal
import subprocess
import sys
import time
from pathlib import Path

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "tiers.py"
MAKEFILE = """
good:
\t@echo fine
bad:
\t@echo what went wrong; exit 3
hangs:
\t@echo $$$$ > pid; exec sleep 600
"""


def start(root: Path, *words: str) -> subprocess.Popen[str]:
    (root / "Makefile").write_text(MAKEFILE)
    return subprocess.Popen([sys.executable, SCRIPT, *words], cwd=root, stdout=subprocess.PIPE, text=True)


def test_all_are_run_and_the_log_of_one_that_fails_is_shown(tmp_path: Path) -> None:
    process = start(tmp_path, "1", "bad", "good")
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "bad: FAILED with 2" in said
    assert "what went wrong" in said
    assert "good: passed, 0:00 (fine)" in said
    assert (tmp_path / "out" / "tests" / "good.log").read_text() == "fine\n"


def test_what_is_ended_ends_its_tiers(tmp_path: Path) -> None:
    process = start(tmp_path, "2", "hangs")
    written = tmp_path / "pid"
    deadline = time.monotonic() + 60
    while not (written.exists() and written.read_text().strip()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    tier = int(written.read_text())
    while Path(f"/proc/{tier}").exists() and Path(f"/proc/{tier}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < deadline, f"{tier} goes on"
        time.sleep(0.02)
