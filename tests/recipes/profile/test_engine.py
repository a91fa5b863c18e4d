"""The recipe's replica command on this host: as it is on GPUs, and what changes of it without one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from stitch_recipes import catalogue, processes
from stitch_recipes.profile.engine import (
    CPU_FLAGS,
    PORTABLE,
    EngineUnavailable,
    Launch,
    launch,
    running,
    without_stitch,
)
from stitch_recipes.site import read_site

SITE = read_site(None).model_copy(update={"store": "file:/s", "run": "r"})


def started(name: str, gpu: bool) -> Launch:
    return launch(
        catalogue.load(name), SITE, Path("/m"), program="/bin/sglang", port=7, gpu=gpu, host_dir=Path("/h")
    )


@pytest.mark.parametrize("name", catalogue.names())
def test_on_gpus_it_is_the_launchers_own_command(name: str) -> None:
    recipe = catalogue.load(name)
    ours, theirs = started(name, gpu=True), processes.replica(recipe, SITE, "/m")
    assert ours.argv == ("/bin/sglang", *theirs.argv[1:], "--host", "127.0.0.1", "--port", "7")
    assert ours.left_out == ()
    assert ours.environment == {**theirs.environment, "STITCH_HOST_DIR": "/h", "STITCH_POLL": "1"}


@pytest.mark.parametrize("name", catalogue.names())
def test_without_a_gpu_every_flag_is_kept_or_named_as_left_out(name: str) -> None:
    recipe = catalogue.load(name)
    ours = started(name, gpu=False)
    kept = {flag for flag in recipe.engine.flags if f"--{flag}" in ours.argv and flag in PORTABLE}
    left_out = {flag.split()[0].removeprefix("--") for flag in ours.left_out} - {"tp-size"}
    assert kept | left_out == {flag for flag, value in recipe.engine.flags.items() if value is not False}
    assert ours.argv[ours.argv.index("--tp-size") + 1] == "1"
    assert any("--tp-size" in flag for flag in ours.left_out) == (recipe.engine.gpus > 1)
    assert ours.argv[-len(CPU_FLAGS) - 4 : -4] == CPU_FLAGS
    assert ours.environment["STITCH_DESTINATION"] == recipe.engine.destination


def test_a_fresh_server_is_the_same_engine_and_follows_nothing() -> None:
    replica = started("glm-5.2/fp8", gpu=False)
    fresh = without_stitch(replica, Path("/next"), 8)
    assert fresh.argv[fresh.argv.index("--model-path") + 1] == "/next"
    assert fresh.argv[-2:] == ("--port", "8")
    assert not any(name.startswith("STITCH_") for name in fresh.environment)
    assert fresh.environment["SGLANG_DSA_FUSE_TOPK"] == "1"


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("raise AssertionError('needs AMX')", "AssertionError: needs AMX"),
        ("print('a.b.SomeError: no'); raise SystemExit(3)", "SomeError: no"),
        ("raise SystemExit('bye')", "ended with 1"),
    ],
)
async def test_an_engine_that_ends_says_its_first_error(tmp_path: Path, program: str, said: str) -> None:
    chosen = Launch((sys.executable, "-c", program), {})
    with pytest.raises(EngineUnavailable, match=said):
        async with running(chosen, 9, tmp_path / "log", "/ready"):
            pass


async def test_an_engine_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineUnavailable, match="/nowhere/sglang cannot be run: No such file"):
        async with running(Launch(("/nowhere/sglang",), {}), 9, tmp_path / "log", "/ready"):
            pass
