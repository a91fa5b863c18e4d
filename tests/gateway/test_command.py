"""``stitch gateway``: options that cannot be met are said at start, and those that can reach the gateway."""

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import aiohttp
import pytest

from stitch_core.cli.main import main
from stitch_core.head import Head, head_key
from stitch_core.manifest import manifest_key
from stitch_core.stores import open_store
from stitch_gateway import command


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--replica", "http://a:1", "--facade"], "--run"),
        ([], "--store, --pool or --replica"),
        (["--pool", "dns:nowhere"], "dns:NAME:PORT"),
        (["--pool", "carrier:pigeon"], "there is no pool 'carrier'"),
        (["--replica", "http://a:1", "--run", "r", "--lag", "1"], "--store"),
        (["--replica", "http://a:1", "--run", "r", "--engine", "tp_size=2"], "--facade"),
        (["--replica", "http://a:1", "--run", "r", "--facade", "--engine", "tp_size"], "KEY=VALUE"),
        (["--replica", "http://a:1", "--consumer", "a~b"], "consumer"),
        (["--replica", "http://a:1", "--run", ""], "run id '' is not valid"),
        (["--replica", "http://a:1", "--store", ""], "--store is empty"),
        (["--pool", ""], "--pool is empty"),
    ],
)
def test_usage(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gateway", *options]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("lag", ["-1", "x", " 1", "1_0", "٣", "+1"])
def test_a_lag_is_a_number(lag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["gateway", "--store", "file:/nowhere", "--run", "r", "--lag", lag])
    assert "--lag" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value"),
    [("--port", "65536"), ("--port", "-1"), ("--hold", "-1"), ("--hold", "nan"), ("--hold", "inf"),
     ("--poll", "0"), ("--poll", "-1"), ("--poll", "nan")],
)  # fmt: skip
def test_numbers_that_mean_nothing(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["gateway", "--store", "file:/nowhere", f"{option}={value}"])
    assert f"argument {option}: expected a " in capsys.readouterr().err


async def test_a_store_that_was_mistyped_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The gateway waits for it, and said nothing."""
    store = open_store(f"file:{tmp_path / 'none'}")
    await command._tell_if_away(store)
    said = capsys.readouterr().err
    assert said.startswith("the store cannot be read, and is tried again: there is no directory")
    (tmp_path / "none").mkdir()
    await command._tell_if_away(store)
    assert capsys.readouterr().err == ""
    await store.close()


@pytest.mark.slow
async def test_a_facade_over_a_store(tmp_path: Path) -> None:
    store = open_store(f"file:{tmp_path}")
    head = Head(3, 1, manifest_key(3, 1), "sha256:" + "0" * 64, "writer")
    await store.replace(head_key("r"), head.encode())
    await store.close()
    words = [sys.executable, "-m", "stitch_core.cli", "gateway", "--json", "--store", f"file:{tmp_path}"]
    options = [
        "--run",
        "r",
        "--port",
        "0",
        "--leave",
        "0",
        "--facade",
        "--engine",
        "tp_size=4",
        "--engine",
        "dtype=bfloat16",
    ]
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = await asyncio.create_subprocess_exec(*words, *options, stdout=PIPE, env=paths)
    try:
        assert process.stdout is not None
        url = json.loads(await asyncio.wait_for(process.stdout.readline(), 30))["url"]
        async with aiohttp.ClientSession() as session:
            body = {"target_version": 3}
            async with session.post(f"{url}/pull_weights", json=body) as answer:
                assert answer.status == 200
            async with session.get(f"{url}/server_info") as answer:
                info = await answer.json()
        assert (info["tp_size"], info["dtype"], info["weight_version"]) == (4, "bfloat16", "3")
    finally:
        process.terminate()
        assert await asyncio.wait_for(process.wait(), 60) == 0
