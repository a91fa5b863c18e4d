"""``stitch profile`` on a real replica of the embedded engine: the row, and checks that find things out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stitch_core.cli.main import main

pytest.importorskip("torch")

from stitch_embedded.config import ModelConfig
from tests.embedded.models import config_json, nudged, random_tensors, save

RUN = "r"
QUICK = ("--idle", 0.5, "--load", 2, "--load-tokens", 24, "--tokens", 8, "--prompts", 2, "--patience", 60)
ENGINE = ("--engine-opt=pace=0.01", "--engine-opt=self_check_seconds=0.1", "--engine-opt=max_len=64")


class World:
    """A run in a store, one replica that follows it, and the checkpoints of the versions."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.store = f"file:{root / 'store'}"
        self.raw = config_json(vocab_size=128)
        config = ModelConfig.from_dict(self.raw)
        self.weights = random_tensors(config, 1)
        self.boot = save(root / "boot", self.raw, self.weights)
        assert main(["claim", "--store", self.store, "--run", RUN, "--base", str(self.boot)]) == 0
        self.replica = subprocess.Popen(
            [
                sys.executable, "-m", "stitch_core.cli", "replica", "--store", self.store, "--run", RUN,
                "--base", str(self.boot), "--port", "0", "--poll", "0.2", "--json",
                "--host-dir", str(root / "host"), *ENGINE,
            ],
            stdout=subprocess.PIPE, text=True, env=environment(),
        )  # fmt: skip
        assert self.replica.stdout is not None
        self.url = json.loads(self.replica.stdout.readline())["url"]
        until(lambda: get(self.url + "/ready")[0] == 200)

    def next(self, name: str) -> Path:
        """The weights of the next step, as a checkpoint."""
        self.weights = nudged(self.weights, 7)
        return save(self.root / name, self.raw, self.weights)

    def profile(self, *more: object) -> list[str]:
        given = (
            "profile",
            "--server",
            self.url,
            "--store",
            self.store,
            "--run",
            RUN,
            "--json",
            *QUICK,
            *more,
        )
        return [str(one) for one in given]

    def close(self) -> None:
        self.replica.terminate()
        self.replica.wait(20)
        assert self.replica.stdout is not None
        self.replica.stdout.close()


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}


def get(url: str) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, None


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    world = World(tmp_path_factory.mktemp("profile"))
    try:
        yield world
    finally:
        world.close()


def checks(row: dict[str, Any]) -> dict[str, bool]:
    return {check["what"]: check["ok"] for check in row["checks"]}


def test_an_update_that_it_publishes_itself(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    delta = ("--publish", world.next("one"), "--as-delta", "--base", world.boot)
    code = main(world.profile(*delta, "--no-reference"))
    row = json.loads(capsys.readouterr().out)
    assert (code, row["ok"]) == (0, True), row["checks"]
    assert set(checks(row)) == {
        "before: one version", "during: every request answered",
        "during: only versions from the old to the new", "after: the new version", "output changed",
    }  # fmt: skip
    assert row["version"].startswith("r/weight_v")
    assert 0 < row["pause"] < row["total"]
    assert row["total"] == pytest.approx(row["preparation"] + row["drain"] + row["pause"])
    assert row["bytes"] > 0
    assert row["tensors"] > 0
    assert row["memory"]["before"] > 50e6
    assert row["throughput"]["idle"] > 10
    assert 0.005 < row["throughput"]["step"] < 1


@pytest.mark.slow
def test_equal_to_a_fresh_server_that_it_starts(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    capsys.readouterr()
    assert main(world.profile("--publish", world.next("fresh"), "--base", world.boot)) == 0
    assert checks(json.loads(capsys.readouterr().out))["after: equal to a fresh server"]


@pytest.mark.slow
def test_c63_a_perturbed_copy_of_the_boot_checkpoint(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fresh server boots from the copy, and answers as the live one does after the update."""
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    capsys.readouterr()
    assert main(world.profile("--perturb", "--base", world.boot)) == 0
    row = json.loads(capsys.readouterr().out)
    assert checks(row)["output changed"]
    assert checks(row)["after: equal to a fresh server"]


def test_c63_a_server_that_does_not_say_its_setup_has_no_record(
    world: World, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Known before anything is published."""
    before = get(world.url + "/ready")[1]["applied"]
    record = tmp_path / "record.json"
    command = world.profile("--perturb", "--base", world.boot, "--record", record, "--reference", world.url)
    assert main(command) == 2
    assert "--record" in capsys.readouterr().err
    assert not record.exists()
    assert get(world.url + "/ready")[1]["applied"] == before


@pytest.mark.slow
def test_a_trainers_update_and_a_server_that_is_not_of_it(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without --publish it waits; the reference answers as version 0 does, which the check finds out."""
    directory = world.next("two")

    def publish() -> None:
        until(lambda: get(world.url + "/ready")[1]["active_requests"] > 0)
        time.sleep(3)
        command = ["publish", directory, "--store", world.store, "--run", RUN, "--base", world.boot]
        subprocess.run(
            [sys.executable, "-m", "stitch_core.cli", *map(str, command)], env=environment(), check=True,
            stdout=subprocess.DEVNULL,
        )  # fmt: skip

    trainer = threading.Thread(target=publish)
    stale = subprocess.Popen(
        [sys.executable, "-m", "stitch_embedded", "--model", str(world.boot), "--max-len", "64"],
        stdout=subprocess.PIPE, text=True, env=environment(),
    )  # fmt: skip
    try:
        assert stale.stdout is not None
        port = json.loads(stale.stdout.readline())["port"]
        trainer.start()
        capsys.readouterr()
        code = main(world.profile("--reference", f"http://127.0.0.1:{port}", "--idle", 0))
        row = json.loads(capsys.readouterr().out)
    finally:
        stale.kill()
        stale.wait()
        stale.stdout.close()
        trainer.join()
    assert code == 1
    assert [what for what, ok in checks(row).items() if not ok] == ["after: equal to a fresh server"]


@pytest.mark.slow
def test_equal_states_must_answer_the_same(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    again = world.next("again")
    for _ in range(2):
        code = main(world.profile("--publish", again, "--base", world.boot, "--no-reference"))
    row = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert code == 0
    assert checks(row)["the state is the same, so must the output be"]
    assert row["tensors"] == 0


@pytest.mark.slow
def test_in_words(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    arguments = [one for one in world.profile("--no-reference") if one != "--json"]
    assert main([*arguments, "--publish", str(world.next("three")), "--base", str(world.boot)]) == 0
    out = capsys.readouterr().out
    for word in (
        "preparation",
        "pause",
        "total",
        "throughput",
        "memory",
        "NOT CHECKED: equal to a fresh server",
    ):
        assert word in out


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ((), "give --store and --run, or --source-dir, --local-dir and --number"),
        (("--store", "memory:"), "--store and --run go together"),
        (("--store", "memory:", "--run", "r", "--number", 1), "not both"),
        (("--store", "memory:", "--run", "r", "--publish", "/x"), "--publish needs --base"),
        (("--store", "memory:", "--run", "r", "--as-delta"), "are for --publish"),
        (("--store", "memory:", "--run", "r", "--perturb"), "--perturb needs --base"),
        (
            ("--source-dir", "/s", "--local-dir", "/l", "--number", 1, "--perturb", "--base", "/b"),
            "--perturb",
        ),
        (("--store", "memory:", "--run", "r", "--record", "/r", "--no-reference"), "--record needs"),
        (("--source-dir", "/s", "--local-dir", "/l", "--number", 1), "needs --reference-model"),
        (("--store", "memory:", "--run", "r", "--auth-env", "NO_SUCH_THING"), "there is no such variable"),
        (("--store", "file:/no/such/store", "--run", "r", "--no-reference"), "127.0.0.1:9"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    more: tuple[object, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", "--server", "http://127.0.0.1:9", *map(str, more)]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert "Traceback" not in err


def test_a_server_whose_version_is_not_the_runs(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    other = ["--server", world.url, "--store", world.store, "--run", "other", "--no-reference"]
    assert main(["profile", *other]) == 2
    assert "the server is to serve run other before the update: it serves r" in capsys.readouterr().err
