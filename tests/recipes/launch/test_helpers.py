"""What runs beside a run's processes: the gate before training, steps done once, Modal's containers."""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stitch_recipes import catalogue
from stitch_recipes.launch import modal_run, ready
from stitch_recipes.launch.common import is_done, once
from stitch_recipes.processes import Process
from tests.gateway.fleet import Fleet
from tests.recipes.launch.examples import site_for


async def test_the_gate_opens_when_enough_replicas_are_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ready, "POLL_SECONDS", 0.05)
    fleet = Fleet()
    try:
        one, _ = fleet.add(), fleet.add()
        one.replica.gate.close("booting")
        await fleet.start(until_ready=1)
        assert not await asyncio.to_thread(ready.wait, fleet.url, 2, 0.2)
        waiting = asyncio.create_task(asyncio.to_thread(ready.wait, fleet.url, 2, 30))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        one.serves(7)
        assert await waiting
    finally:
        await fleet.close()


def test_the_gate_says_what_it_saw_and_fails_in_time(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ready, "POLL_SECONDS", 0.01)
    assert not ready.wait("http://127.0.0.1:9", 3, 0.1)
    said = capsys.readouterr().err
    assert said.count("0 of 3 replicas ready at http://127.0.0.1:9") == 1
    assert "/status says why each is out" in said


def test_a_step_that_was_done_is_not_done_again_and_one_that_failed_is(tmp_path: Path) -> None:
    recipe = catalogue.load("qwen3-4b/slime")
    script = f"echo once >> {tmp_path}/log; [[ -e {tmp_path}/good ]]"
    step = once(
        Process(("bash", "-c", script, "a b", "c'd"), converts=True),
        site_for(recipe, models=str(tmp_path / "models")),
    )

    def run() -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, *step.argv[1:]]
        return subprocess.run(argv, capture_output=True, text=True, timeout=60, env={**os.environ, **path})

    path = {"PYTHONPATH": ":".join(filter(None, sys.path))}
    assert run().returncode == 1
    (tmp_path / "good").write_text("")
    assert run().returncode == 0
    last = run()
    assert last.returncode == 0
    assert "remove it to do it again" in last.stderr
    assert (tmp_path / "log").read_text().count("once") == 2


def test_a_step_of_several_nodes_is_done_when_it_is_on_all(tmp_path: Path) -> None:
    """If one node alone had it to do again, it would wait for the others for ever."""
    argv = ["bash", "-c", f"echo $NODE_RANK >> {tmp_path}/log; [[ $NODE_RANK == 0 || -e {tmp_path}/good ]]"]
    site = site_for(catalogue.load("qwen3-4b/slime"), models=str(tmp_path))
    step = once(Process(tuple(argv), {}, 2, converts=True), site)

    def run(node: int) -> int:
        path = {"PYTHONPATH": ":".join(filter(None, sys.path)), "NODE_RANK": str(node)}
        command = [sys.executable, *step.argv[1:]]
        return subprocess.run(command, capture_output=True, timeout=60, env={**os.environ, **path}).returncode

    def done() -> bool:
        return subprocess.run(is_done(step, site).argv, capture_output=True, timeout=60).returncode == 0

    assert [run(0), run(1), done()] == [0, 1, False]
    (tmp_path / "good").write_text("")
    assert [run(0), run(1), done()] == [0, 0, True]
    assert [run(0), run(1), done()] == [0, 0, True]
    assert (tmp_path / "log").read_text().split() == ["0", "1", "0", "1"]


def test_a_download_looks_for_itself() -> None:
    recipe = catalogue.load("qwen3-4b/slime")
    step = Process(("hf", "download", "Qwen/Qwen3-4B"))
    assert once(step, site_for(recipe)) is step


def shell(text: str) -> Process:
    return Process(("bash", "-c", text))


def test_what_follows_is_stopped_when_its_time_is_over() -> None:
    started = time.monotonic()
    modal_run.follow(shell("exec sleep 60"), 0.3)
    assert time.monotonic() - started < 30
    with pytest.raises(RuntimeError, match="bash -c ended with 3"):
        modal_run.follow(shell("exit 3"), 30)


def test_what_fails_in_a_container_is_told_by_its_name_and_not_by_its_secrets() -> None:
    with pytest.raises(RuntimeError, match=r"^bash -c ended with 4$"):
        modal_run.run(Process(("bash", "-c", "[[ $A == b ]] && exit 4"), {"A": "b"}))


def test_a_process_that_is_stopped_takes_its_children_with_it(tmp_path: Path) -> None:
    """And it is nowhere below a Volume, whose reload it would bar."""
    program = f"pwd > {tmp_path}/place; (trap '' TERM; exec sleep 60) & echo $! > {tmp_path}/pid; wait"
    child = modal_run.start(shell(program))
    until = time.monotonic() + 30
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < until
        time.sleep(0.02)
    assert (tmp_path / "place").read_text() == "/\n"
    inner = int((tmp_path / "pid").read_text())
    modal_run.stop(child, 5)
    assert child.returncode is not None
    until = time.monotonic() + 30
    while Path(f"/proc/{inner}").exists() and ") Z " not in Path(f"/proc/{inner}/stat").read_text():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_server_that_ends_before_it_answers_is_not_waited_for() -> None:
    child = modal_run.start(shell("exit 5"))
    with pytest.raises(RuntimeError, match="ended with 5 before http"):
        modal_run._answers("http://127.0.0.1:9/ready", child, 60)
