"""Starts that must fail with one line that says why: before any weights are loaded, except the last."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence

import pytest

from recipes.local.sglang_server import environment, free_port

from .checkpoints import random_weights, write
from .server import ARGUMENTS
from .world import faults

pytestmark = pytest.mark.real

SECONDS = 600
SERVER = ("-m", "sglang.launch_server")

# As `python -m sglang.launch_server`, on a release that lacks a method.
WITHOUT_A_METHOD = """
import runpy
from sglang.srt.managers.scheduler import Scheduler
del Scheduler.init_request_dispatcher
runpy.run_module("sglang.launch_server", run_name="__main__")
"""

Ended = Callable[[str], str]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """The output of a start that must fail, by name; all begin at once, for most of each is imports."""
    root = tmp_path_factory.mktemp("starts")
    boot = write(root / "boot", random_weights(0))
    store = {"STITCH_STORE": f"file:{root}/store", "STITCH_RUN": "r"}
    receive = {
        "STITCH_RECEIVE": "r", "STITCH_ROOTS": str(root), "STITCH_HOST_DIR": str(root / "host"),
        "STITCH_DESTINATION": "cpu",
    }  # fmt: skip
    other = root / "other"
    other.mkdir()
    (other / "altered").touch()
    flags = ("--stitch-store", f"file:{root}/store", "--stitch-run", "r")
    cases: dict[str, tuple[Sequence[str], Sequence[str], dict[str, str]]] = {
        "workers": (SERVER, (*flags, "--tokenizer-worker-num", "2"), {}),
        "dp": (SERVER, ("--dp-size", "2"), store),
        "dummy": (SERVER, ("--load-format", "dummy"), {**store, "STITCH_DESTINATION": "disk"}),
        "hook": (("-c", WITHOUT_A_METHOD), (), store),
        "setting": (SERVER, (), {**store, "STITCH_KV_MODE": "flush"}),
        "self-test": (
            SERVER, (*ARGUMENTS, "--port", str(free_port())), {**receive, **faults(other)}
        ),
    }  # fmt: skip
    begun = {}
    for name, (how, arguments, settings) in cases.items():
        command = [sys.executable, "-W", "ignore", *how, "--model-path", str(boot), "--device", "cpu"]
        scratch = other if name == "self-test" else root
        with (root / f"{name}.log").open("wb") as log:
            begun[name] = subprocess.Popen(
                [*command, *arguments], env=environment(scratch, settings), stdout=log, stderr=log
            )

    def output(name: str) -> str:
        try:
            assert begun[name].wait(SECONDS) != 0
        finally:
            begun[name].kill()
            begun[name].wait(SECONDS)
        said = (root / f"{name}.log").read_text(errors="replace")
        assert ("Load weight begin" in said) == (name == "self-test")
        return said

    return output


def test_what_is_not_covered_is_refused_by_name(ended: Ended) -> None:
    """Settings as flags, too."""
    assert "stitch: not covered: --tokenizer-worker-num 2: its HTTP workers load no plugins" in ended(
        "workers"
    )


def test_data_parallel_schedulers_are_refused_by_name(ended: Ended) -> None:
    assert "stitch: not covered: --dp-size 2: data-parallel schedulers are not activated" in ended("dp")


def test_made_up_weights_are_refused_by_name_before_they_are_served_as_version_0(ended: Ended) -> None:
    """From disk, too: SGLang would make up every later version's as well, under that version's label."""
    assert "stitch: not covered: --load-format dummy: version 0 is the boot checkpoint's" in ended("dummy")


def test_a_missing_hook_stops_the_server_with_its_name(ended: Ended) -> None:
    missing = "stitch: sglang.srt.managers.scheduler.Scheduler.init_request_dispatcher is not there"
    assert missing in ended("hook")


def test_a_setting_that_cannot_be_used_is_named(ended: Ended) -> None:
    assert "stitch: STITCH_KV_MODE='flush' cannot be used: it is in_place or retract" in ended("setting")


def test_a_destination_that_fails_its_self_test_ends_the_server_with_the_tensors(ended: Ended) -> None:
    """Weights that are not the boot checkpoint's."""
    output = ended("self-test")
    assert "this replica must be replaced: no destination cpu: a second load of the boot checkpoint" in output
    assert "model.norm.weight (from byte 0 of" in output
