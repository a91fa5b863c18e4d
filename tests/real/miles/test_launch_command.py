"""Ray's own table of jobs has the launch script's words, from which flags that slime dropped are found."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile

import pytest

pytestmark = pytest.mark.real

SCRIPT = """
import json, os, ray
ray.init(num_cpus=1, include_dashboard=False, _temp_dir=os.environ["RAY_DIRECTORY"],
         object_store_memory=100_000_000, log_to_driver=False)

@ray.remote
class Actor:
    def argv(self):
        from stitch_slime.hooks import launch_command
        return launch_command()

print(json.dumps(ray.get(Actor.remote().argv.remote())))
ray.shutdown()
"""


def test_a_worker_reads_the_flags_of_the_launch_script() -> None:
    words = ["--stitch-lag", "1", "--stitch-chanel=x", "--label", 'it\'s "odd"', "--lr", "1e-3"]
    directory = tempfile.mkdtemp(prefix="ray-")  # a socket's path holds hardly more than 100 bytes
    try:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", SCRIPT, *words], capture_output=True, text=True,
            check=False, timeout=120,
            env=os.environ | {"RAY_DIRECTORY": directory, "RAY_AUTH_MODE": "disabled"},
        )  # fmt: skip
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    assert done.returncode == 0, done.stderr[-4000:]
    argv = json.loads(done.stdout.splitlines()[-1])
    assert argv[-len(words) :] == words
