"""slime's own contract tests for plugins, on Stitch's functions; STITCH_SLIME names a checkout."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.real
CHECKOUT = os.environ.get("STITCH_SLIME", "")
if not CHECKOUT:
    pytest.skip("platform: no checkout of slime, set STITCH_SLIME to one", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[3]
FUNCTIONS = "tests.real.miles.contract_functions"
# What slime's tests read: the flag's name in capitals.
PATHS = {
    "ROLLOUT_FUNCTION_PATH": f"{FUNCTIONS}.generate_rollout",
    "EVAL_FUNCTION_PATH": f"{FUNCTIONS}.generate_rollout",
    "CUSTOM_GENERATE_FUNCTION_PATH": f"{FUNCTIONS}.generate",
    "DATA_SOURCE_PATH": f"{FUNCTIONS}.DataSource",
}
SAMPLE_HOOK = """
import asyncio
from types import SimpleNamespace
from slime.rollout.sample_hooks import apply_rollout_sample_hooks
from slime.utils.types import Sample
from stitch_core.trainers.rollout import Unattributed, begin_episode
args = SimpleNamespace(rollout_sample_hook_path=["stitch_slime.rollout.record_version"])
report = {"run": "r", "start": 1, "end": 2, "spans": []}

async def main():
    episode = begin_episode(False, None)
    episode.reports.append(report)
    made = [[Sample(index=0, response_length=3)], Sample(index=1, response_length=3)]
    (one,), other = await apply_rollout_sample_hooks(args, made, evaluation=False)
    for sample in (one, other):
        assert sample.metadata["stitch"] == [report], sample
        assert sample.weight_versions == ["1", "2"]
    begin_episode(False, None)
    try:
        await apply_rollout_sample_hooks(args, Sample(index=2, response_length=3), evaluation=False)
    except Unattributed as error:
        print("refused:", error)

asyncio.run(main())
"""


def run(tmp_path: Path, *arguments: str) -> str:
    """Output of a Python process in the checkout, which has to end well."""
    paths = [CHECKOUT, f"{CHECKOUT}/tests", str(ROOT), *(str(path) for path in (ROOT / "plugins").iterdir())]
    variables = {f"SLIME_CONTRACT_{name}": path for name, path in PATHS.items()}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *arguments], cwd=CHECKOUT, capture_output=True, text=True,
        env=os.environ | variables | {
            "PYTHONPATH": os.pathsep.join(paths), "STITCH_CONTRACT_ROOT": str(tmp_path),
        },
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout


@pytest.mark.parametrize(("name", "passed"), [("rollout", 6), ("generate", 4), ("path_loading", 16)])
def test_slimes_contracts_hold_for_our_functions(tmp_path: Path, name: str, passed: int) -> None:
    file = f"tests/plugin_contracts/test_plugin_{name}_contracts.py"
    out = run(tmp_path, "-m", "pytest", "-q", "-W", "ignore", "-p", "no:cacheprovider", file)
    assert f"{passed} passed" in out, out


def test_the_sample_hook_is_applied_to_every_leaf(tmp_path: Path) -> None:
    assert "refused: sample 2 has a response and no version record" in run(tmp_path, "-c", SAMPLE_HOOK)
