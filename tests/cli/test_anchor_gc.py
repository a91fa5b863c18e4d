"""``stitch anchor`` and ``stitch gc`` on a store in a directory."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from stitch_core.cli import anchor
from stitch_core.cli.gc import duration
from stitch_core.cli.main import build_parser
from tests.cli.commands import Shell, built_once


def options(shell: Shell) -> list[object]:
    return ["--store", shell.store, "--run", "r"]


def build(shell: Shell) -> None:
    shell.claim()
    for i in range(3):
        shell.publish(shell.learn(f"v{i + 1}"), "--as-delta")
    assert shell.head()[0] == 3


@pytest.fixture
def run(shell: Shell, tmp_path_factory: pytest.TempPathFactory) -> Shell:
    """Versions 1 to 3, all deltas."""
    return built_once(shell, tmp_path_factory, build)


def files(shell: Shell, below: str) -> list[str]:
    root = Path(shell.store.removeprefix("file:")) / "runs/r" / below
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def test_a_full_is_built_from_the_store_once(run: Shell, tmp_path: Path) -> None:
    said = run("anchor", *options(run), "--base", run.base, "--work", tmp_path / "work", "--json").json
    assert (said["version"], said["new"]) == ("r/weight_v000003", True)
    assert len(files(run, "fulls")) > 2
    assert os.listdir(tmp_path / "work") == []
    again = run("anchor", *options(run), "--base", run.base, "--json").json
    assert (again["new"], again["record"]) == (False, said["record"])
    due = run("anchor", *options(run), "--base", run.base, "--every", 2)
    assert due.out == "r/weight_v000003 is less than 2 versions after the newest full\n"


def test_c81_a_loop_of_symbolic_links_in_a_run_stopped_every_command(
    run: Shell, caplog: pytest.LogCaptureFixture
) -> None:
    """It is named, and the command goes on; what the link is below is listed once."""
    store = run.root / "store"
    for place in ("runs", "runs/r", "runs/r/e0002", "runs/r/fulls", "channels", "replicas", "pins"):
        (store / place).mkdir(exist_ok=True)
        (store / place / "self").symlink_to("self")
        (store / place / "up").symlink_to("..")
    for command, named in (
        (("gc", *options(run)), "runs/r/e0002/self"),
        (("gc", *options(run), "--dry-run"), "runs/r/e0002/up"),
        (("status", "--store", run.store), "runs/self"),
        (("status", "--store", run.store), "replicas/up"),
        (("inspect", "r", "--store", run.store), "runs/r/fulls/self"),
        (("verify", "r", "--store", run.store), "runs/r/fulls/up"),
        (("versions", *options(run)), None),
        (("doctor", "--store", run.store), "channels/self"),
        (("compact", *options(run), "--base", run.base), None),
        (("anchor", *options(run), "--base", run.base), "runs/r/fulls/self"),
        (("publish", run.learn("more"), *options(run), "--base", run.base), None),
    ):
        caplog.clear()
        said = run(*command)
        assert said.code == 0, (command, said)
        assert named is None or f"{store / named} " in caplog.text, command
    assert [row["run"] for row in run("status", "--store", run.store, "--json").json["runs"]] == ["r"]


def test_a_checkpoint_must_be_the_version_to_the_bit(run: Shell, tmp_path: Path) -> None:
    before = files(run, "")
    said = run("anchor", *options(run), "--from-checkpoint", run.root / "v1")
    assert said.code == 2
    assert "is not r/weight_v000003: its state is" in said.complaint
    assert [name for name in files(run, "") if name not in before and name != "fulls/lease"] == []
    assert run("anchor", *options(run), "--from-checkpoint", run.root / "v1", "--version", 1, "--json").json[
        "new"
    ]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--follow", "--base", "x"], "--follow needs --every K and --base DIR"),
        (["--base", "x", "--version", 1, "--every", 2], "use one of them"),
        (["--base", "x", "--version", 9], "has no version 9"),
    ],
)
def test_what_means_nothing_is_refused(run: Shell, more: list[object], message: str) -> None:
    assert message in run("anchor", *options(run), *more).complaint


async def test_it_follows_a_run_until_it_is_told_to_stop(
    run: Shell, capsys: pytest.CaptureFixture[str]
) -> None:
    """A store that is not there yet is waited for; each full that is due is uploaded once."""
    store = run.store
    run.store = f"file:{run.root / 'nothing'}"
    given = ["anchor", *options(run), "--base", run.base, "--every", "2", "--follow", "--poll", "0.02"]
    task = asyncio.ensure_future(anchor.run(build_parser().parse_args([str(option) for option in given])))
    async with asyncio.timeout(60):
        while "has no head" not in capsys.readouterr().err:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        (run.root / "nothing").mkdir(exist_ok=True)
        shutil.copytree(store.removeprefix("file:"), run.root / "nothing", dirs_exist_ok=True)
        while "r/weight_v000003 is a full beside the chain now" not in capsys.readouterr().out:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert await task == 0
    documents = [name for name in files(run, "fulls") if name.endswith(".json") and "/" not in name]
    assert len(documents) == 1


def test_gc_keeps_everything_without_floors(run: Shell) -> None:
    said = run("gc", *options(run), "--grace", "0", "--json").json
    assert (said["floor"], said["objects"], said["deleted"]) == (0, 0, 0)


def test_gc_plans_and_deletes_below_the_second_floor(run: Shell) -> None:
    for i in (4, 5):
        run.publish(run.learn(f"v{i}"))
    run.publish(run.learn("v6"), "--as-delta")
    before = files(run, "")
    plan = run("gc", *options(run), "--grace", "0", "--dry-run", "--json").json
    assert files(run, "") == before
    assert plan["floor"] == 4
    assert {key.split("/")[3] for key, _ in plan["keys"]} == {f"weight_v00000{i}" for i in (1, 2, 3)}
    text = run("gc", *options(run), "--grace", "0", "--dry-run")
    assert "would delete 6 of" in text.out
    assert "runs/r/e0002/weight_v000001" in text.out
    done = run("gc", *options(run), "--grace", "0", "--json").json
    assert (done["deleted"], done["freed"], done["failed"]) == (plan["objects"], plan["bytes"], {})
    assert {name for name in before if name not in files(run, "")} == {
        key.removeprefix("runs/r/") for key, _ in plan["keys"]
    }
    assert not (Path(run.store.removeprefix("file:")) / "runs/r/e0002").exists(), "no empty directories"
    assert run("gc", *options(run), "--grace", "0").out == "deleted 0 objects, 0 B\n"
    out = run.root / "out"
    checked = run("checkout", "r/6", out, "--store", run.store, "--base", run.base)
    assert checked.code == 0, checked.err


def test_gc_takes_records_of_replicas_that_are_gone(run: Shell) -> None:
    folder = Path(run.store.removeprefix("file:")) / "replicas"
    folder.mkdir()
    for name, expires in (("dead", 1000.0), ("alive", time.time() + 600)):
        record = {"id": name, "run": "r", "target": None, "expires": expires, "time": expires - 15}
        (folder / f"{name}.json").write_text(json.dumps(record))
    os.utime(folder / "dead.json", (1000.0, 1000.0))
    plan = run("gc", *options(run), "--dry-run", "--json").json
    assert (plan["records"], plan["record_keys"], plan["records_deleted"]) == (1, ["replicas/dead.json"], 0)
    text = run("gc", *options(run), "--dry-run").out
    assert text.endswith("lost the run; and the record of a replica that is gone\n")
    assert "\nreplicas" in text
    assert len(list(folder.iterdir())) == 2
    done = run("gc", *options(run)).out
    assert done.endswith("deleted 0 objects, 0 B; and the record of a replica that is gone\n")
    assert [path.name for path in folder.iterdir()] == ["alive.json"]
    assert run("gc", *options(run), "--json").json["records"] == 0


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_damaged_full_was_left_as_it_was_and_nobody_could_join(run: Shell) -> None:
    """'stitch anchor' said that a full was there, and a joiner that it was not what was announced."""
    how = ("anchor", *options(run), "--base", run.base)
    first = run(*how, "--json").json
    full = run.root / "store" / first["record"]
    damaged = next(path for path in full.with_suffix("").glob("*.safetensors"))
    flip(damaged)
    sound = run.root / "sound"
    assert run("checkout", "r/3", sound, "--store", run.store, "--base", run.base).code == 0
    shutil.rmtree(run.root / "store/runs/r/e0002")
    shutil.rmtree(run.root / "store/runs/r/e0003")
    shutil.rmtree(run.root / "store/runs/r/e0004")
    joiner = ("checkout", "r/3", run.root / "joined", "--store", run.store, "--base", run.base)
    assert "is not what was announced" in run(*joiner).complaint
    shutil.rmtree(run.root / ".joined.checkout", ignore_errors=True)
    from_sound = ("anchor", *options(run), "--from-checkpoint", sound)
    assert run(*from_sound, "--json").json["new"] is False, "nobody looked into it"
    said = run(*from_sound, "--replace", "--json")
    assert said.json["new"] is True
    assert said.json["damaged"] == [first["record"]]
    assert f"a full of r/weight_v000003 is damaged: {damaged.relative_to(run.root / 'store')}" in said.err
    assert not full.exists(), "nobody starts from it any more"
    assert run(*joiner).code == 0
    assert not (run.root / "joined" / "stitch-copy.txt").read_text().strip("0123456789\n")
    again = run(*from_sound, "--replace")
    assert again.out == "r/weight_v000003 has a full beside the chain, read back and sound\n"
    assert "--replace is for one version" in run(*from_sound, "--every", 2, "--replace").complaint


def test_a_full_on_the_chain_that_is_damaged_gets_one_beside_it(run: Shell) -> None:
    directory = run.learn("v4")
    run.publish(directory)
    how = ("anchor", *options(run), "--from-checkpoint", directory, "--replace")
    assert run(*how).out == "r/weight_v000004 is a full already, read back and sound\n"
    flip(next((run.root / "store/runs/r").glob("e*/weight_v000004/*.safetensors")))
    joiner = ("checkout", "r/4", run.root / "joined", "--store", run.store)
    assert "is not what was announced" in run(*joiner).complaint
    said = run(*how, "--json")
    assert (said.json["new"], said.json["damaged"]) == (True, [])
    assert "is damaged: runs/r/e" in said.err
    assert run(*joiner).code == 0
    assert run(*how).out == "r/weight_v000004 has a full beside the chain, read back and sound\n"


def test_gc_says_that_it_waits_for_what_it_cannot_read(run: Shell) -> None:
    (run.root / "store" / "channels").mkdir(exist_ok=True)
    (run.root / "store" / "channels" / "bad").write_bytes(b"x")
    said = run("gc", "--store", run.store, "--run", "r", "--grace", "0s")
    assert (said.code, "nothing is deleted while this cannot be read: channels/bad" in said.complaint) == (
        2,
        True,
    )


def test_gc_looks_at_its_options_before_it_deletes(run: Shell) -> None:
    """A --metrics that means nothing was found when all was deleted."""
    for step in range(3):
        run("publish", run.base, "--store", run.store, "--run", "r", "--base", run.base, "--step", step)
    collect = ("gc", "--store", run.store, "--run", "r", "--grace", "0s")
    doomed = run(*collect, "--dry-run", "--json").json["objects"]
    assert doomed > 0
    assert run(*collect, "--metrics", "no port").code == 2
    assert run(*collect, "--json").json["deleted"] == doomed


def test_gc_of_nothing(shell: Shell) -> None:
    assert "has no head yet" in shell("gc", "--store", shell.store, "--run", "r").complaint


def test_durations() -> None:
    assert [duration(text) for text in ("90s", "30m", "24h", "2d", "5", "1.5h")] == [
        90, 1800, 86400, 172800, 5, 5400,
    ]  # fmt: skip
    for bad in ("", "h", "-1h", "1w", "inf", "1 h"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"such as 90s, 30m, 24h or 2d, got '{bad}'"):
            duration(bad)
