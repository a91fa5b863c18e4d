"""What runs beside a run's processes: the gate before training, steps done once, Modal's containers."""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stitch_recipes import catalogue
from stitch_recipes.launch import modal_run, ready, whole
from stitch_recipes.launch.common import is_done, once
from stitch_recipes.processes import Process
from stitch_recipes.profile.bases import made
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


def run(step: Process, **variables: str) -> subprocess.CompletedProcess[str]:
    path = {"PYTHONPATH": ":".join(filter(None, sys.path)), **variables}
    argv = [sys.executable, *step.argv[1:]]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, env={**os.environ, **path})


def counting(tmp_path: Path, environment: dict[str, str] | None = None) -> Process:
    """A step that notes each time, and ends well where a file is."""
    made = tmp_path / "models" / "made"
    script = f"echo once >> {tmp_path}/log; mkdir -p {made}; [[ -e {tmp_path}/good ]]"
    step = Process(("bash", "-c", script, "a b", "c'd"), environment or {}, makes=str(made))
    return once(step, site_for(catalogue.load("qwen3-4b/slime"), models=str(tmp_path / "models")))


def test_a_step_that_was_done_is_not_done_again_and_one_that_failed_is(tmp_path: Path) -> None:
    step = counting(tmp_path)
    assert run(step).returncode == 1
    (tmp_path / "good").write_text("")
    assert run(step).returncode == 0
    last = run(step)
    assert last.returncode == 0
    assert "remove it to do it again" in last.stderr
    assert (tmp_path / "log").read_text().count("once") == 2


def test_a_step_is_done_again_with_other_variables_or_without_what_it_made(tmp_path: Path) -> None:
    """Only the words counted: a checkpoint rounded by MSE was kept where MAE was asked for."""
    (tmp_path / "good").write_text("")
    mse, mae = (counting(tmp_path, {"MODE": mode, "WITH": "a b"}) for mode in ("MSE", "MAE"))
    assert [run(step).returncode for step in (mse, mse, mae, mae)] == [0] * 4
    assert (tmp_path / "log").read_text().count("once") == 2
    assert run(counting(tmp_path, {"MODE": "MAE", "WITH": "a b", "NCCL_X": "1"})).returncode == 0
    assert (tmp_path / "log").read_text().count("once") == 2  # a network's variable is no reason to convert
    (tmp_path / "models" / "made").rmdir()
    assert [run(mae).returncode for _ in range(2)] == [0, 0]
    assert (tmp_path / "log").read_text().count("once") == 3


def test_variables_of_a_step_reach_it(tmp_path: Path) -> None:
    script = f'printf %s "$GIVEN" > {tmp_path}/log; mkdir {tmp_path}/made'
    step = Process(("bash", "-c", script), {"GIVEN": "a 'b' $c\n"}, makes=f"{tmp_path}/made")
    assert run(once(step, site_for(catalogue.load("qwen3-4b/slime"), models=str(tmp_path)))).returncode == 0
    assert (tmp_path / "log").read_text() == "a 'b' $c\n"


def test_a_step_of_several_nodes_is_done_when_it_is_on_all(tmp_path: Path) -> None:
    """If one node alone had it to do again, it would wait for the others for ever."""
    argv = ["bash", "-c", f"echo $NODE_RANK >> {tmp_path}/log; [[ $NODE_RANK == 0 || -e {tmp_path}/good ]]"]
    site = site_for(catalogue.load("qwen3-4b/slime"), models=str(tmp_path))
    step = once(Process(tuple(argv), {}, 2, makes=str(tmp_path)), site)

    def node(number: int) -> int:
        return run(step, NODE_RANK=str(number)).returncode

    def done() -> bool:
        return subprocess.run(is_done(step, site).argv, capture_output=True, timeout=60).returncode == 0

    assert [node(0), node(1), done()] == [0, 1, False]
    (tmp_path / "good").write_text("")
    assert [node(0), node(1), done()] == [0, 0, True]
    assert [node(0), node(1), done()] == [0, 0, True]
    assert (tmp_path / "log").read_text().split() == ["0", "1", "0", "1"]


def test_a_download_looks_for_itself() -> None:
    recipe = catalogue.load("qwen3-4b/slime")
    step = Process(("hf", "download", "Qwen/Qwen3-4B"))
    assert once(step, site_for(recipe)) is step


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return made(catalogue.load("qwen3-0.6b/miles"), "small", tmp_path / "copied").directory


def test_a_checkpoint_is_whole_when_every_file_of_its_index_is(copied: Path) -> None:
    """A directory was enough: replicas of a copy that was cut off ended one after the other."""
    assert whole.fault(copied) is None
    (shard, *_) = sorted(copied.glob("*.safetensors"))
    content = shard.read_bytes()
    shard.write_bytes(content[:-1])
    assert f"{shard}: {len(content) - 1} bytes, but the header describes {len(content)}" in str(
        whole.fault(copied)
    )
    shard.unlink()
    assert "named by the index, but not there" in str(whole.fault(copied))
    shard.write_bytes(content)
    (copied / "config.json").unlink()
    assert str(whole.fault(copied)).endswith("config.json: not there")
    assert whole.fault(copied / "nowhere") is not None


def test_what_several_containers_converted_is_put_together(tmp_path: Path) -> None:
    """On Modal each has files of its own: the converter renamed the directory of the first one alone."""
    for name in ("release/__0_0.distcp", "release/.metadata", "iter_0000001/__8_0.distcp"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    for _ in range(2):
        modal_run.gather(tmp_path)
        assert [p.name for p in tmp_path.iterdir()] == ["release"]
        assert {p.name for p in (tmp_path / "release").iterdir()} == {
            "__0_0.distcp", "__8_0.distcp", ".metadata",
        }  # fmt: skip


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
