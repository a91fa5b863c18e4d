"""Starts that must fail, before any weights are loaded, with one line that says why."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from recipes.local.sglang_server import environment, free_port

from .checkpoints import random_weights, write
from .server import ARGUMENTS

pytestmark = pytest.mark.real

SECONDS = 300

# As `python -m sglang.launch_server`, on a release that lacks a method.
WITHOUT_A_METHOD = """
import runpy
from sglang.srt.managers.scheduler import Scheduler
del Scheduler.init_request_dispatcher
runpy.run_module("sglang.launch_server", run_name="__main__")
"""


@pytest.fixture(scope="module")
def boot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("boot"), random_weights(0))


def start(
    boot: Path,
    how: Sequence[str],
    arguments: Sequence[str],
    settings: Mapping[str, str],
    loads: bool = False,
) -> str:
    """The output of a start that must fail, before it loads anything unless it ``loads``."""
    command = [sys.executable, "-W", "ignore", *how, "--model-path", str(boot), "--device", "cpu", *arguments]
    variables = environment(boot.parent, settings)
    ended = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=SECONDS)
    assert ended.returncode != 0
    output = ended.stdout + ended.stderr
    assert loads == ("Load weight begin" in output)
    return output


def test_what_is_not_covered_is_refused_by_name(boot: Path) -> None:
    """Settings as flags, too."""
    how = ("-m", "sglang.launch_server", "--stitch-store", f"file:{boot.parent}/store", "--stitch-run", "r")
    output = start(boot, how, ("--tokenizer-worker-num", "2"), {})
    assert "stitch: not covered: --tokenizer-worker-num 2: its HTTP workers load no plugins" in output


def test_a_missing_hook_stops_the_server_with_its_name(boot: Path) -> None:
    output = start(boot, ("-c", WITHOUT_A_METHOD), (), {"STITCH_STORE": f"file:{boot.parent}/store"})
    assert "stitch: sglang.srt.managers.scheduler.Scheduler.init_request_dispatcher is not there" in output


def test_a_setting_that_cannot_be_used_is_named(boot: Path) -> None:
    settings = {"STITCH_STORE": f"file:{boot.parent}/store", "STITCH_KV_MODE": "flush"}
    output = start(boot, ("-m", "sglang.launch_server"), (), settings)
    assert "stitch: STITCH_KV_MODE='flush' cannot be used: it is in_place or retract" in output


def test_a_destination_that_fails_its_self_test_ends_the_server_with_the_tensors(boot: Path) -> None:
    """Weights that are not the boot checkpoint's: here SGLang makes them up."""
    settings = {
        "STITCH_RECEIVE": "r", "STITCH_ROOTS": str(boot.parent), "STITCH_DESTINATION": "cpu",
        "STITCH_HOST_DIR": str(boot.parent / "host"),
    }  # fmt: skip
    output = start(
        boot,
        ("-m", "sglang.launch_server"),
        (*ARGUMENTS, "--port", str(free_port()), "--load-format", "dummy"),
        settings,
        loads=True,
    )
    assert "this replica must be replaced: no destination cpu: a second load of the boot checkpoint" in output
    assert "model.embed_tokens.weight (from byte 0 of" in output
