"""``stitch replica`` from start to end over an engine that holds bytes, and what keeps it from starting."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stitch_core import plugins, scratch
from stitch_core.cli import replica
from stitch_core.cli.common import UsageError
from stitch_core.cli.main import build_parser
from stitch_core.replica.asgi import Receive, Scope, Send
from stitch_core.replica.engines import OpenedEngine
from stitch_core.replica.server import listen
from stitch_core.stores import open_store
from stitch_core.testing.checkpoints import random_tensors, write_checkpoint
from tests.cli.commands import Shell
from tests.replica.following import BytesEngine
from tests.small_run import FILES, LAYOUT, Trainer

ENGINES: list[BytesEngine] = []
CLOSED: list[bool] = []


async def open_engine(checkpoint: Path, options: Mapping[str, str]) -> OpenedEngine:
    """An engine of the group ``stitch.engines``; its app answers nothing."""
    if options.get("fail"):
        raise ValueError(f"option fail: {options['fail']}")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            for answer in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{answer}.complete"})

    async def close() -> None:
        CLOSED.append(True)

    ENGINES.append(BytesEngine(checkpoint))
    return OpenedEngine(ENGINES[-1], app, close)


@pytest.fixture(autouse=True)
def bytes_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(plugins.OURS["stitch.engines"], "bytes", f"{__name__}:open_engine")
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])
    ENGINES.clear()
    CLOSED.clear()


def arguments(shell: Shell, *more: object) -> list[str]:
    given = ("replica", "--store", shell.store, "--base", shell.base, "--engine", "bytes", "--port", 0, *more)
    return [str(argument) for argument in given]


class Running:
    """A replica in this event loop."""

    def __init__(self, task: asyncio.Task[int], url: str, replica_id: str, complaints: str) -> None:
        self.task, self.url, self.id, self.complaints = task, url, replica_id, complaints

    async def get(self, path: str) -> tuple[int, Any]:
        host, port = self.url.removeprefix("http://").rsplit(":", 1)
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        await writer.wait_closed()
        return int(head.split()[1]), json.loads(body)

    async def ready_says(self, condition: Callable[[int, Any], bool]) -> Any:
        """What ``/ready`` says once ``condition`` holds of its status and body."""
        async with asyncio.timeout(60):
            while True:
                code, body = await self.get("/ready")
                if condition(code, body):
                    return body
                await asyncio.sleep(0.01)

    async def serves(self, number: int) -> None:
        await self.ready_says(lambda code, body: code == 200 and body["applied"] == number)


@asynccontextmanager
async def running(shell: Shell, capsys: pytest.CaptureFixture[str], *more: object) -> AsyncIterator[Running]:
    options = build_parser().parse_args(arguments(shell, "--json", "--poll", 0.02, *more))
    task = asyncio.ensure_future(replica.run(options))
    said, complaints = "", ""
    async with asyncio.timeout(60):
        while not said and not task.done():
            await asyncio.sleep(0.01)
            captured = capsys.readouterr()
            said, complaints = captured.out, complaints + captured.err
    if task.done():
        task.result()
    started = json.loads(said)
    try:
        yield Running(task, started["url"], started["id"], complaints)
    finally:
        # The command has set the handler; it is what a supervisor sends.
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(60):
            assert await task == 0


async def publish(shell: Shell) -> None:
    """Another version of run r, by a trainer of the same boot checkpoint."""
    trainer = Trainer(shell.root)
    trainer.boot = shell.base
    trainer.tensors = shell.tensors
    trainer.weights[trainer.state] = shell.tensors
    store = open_store(shell.store)
    publisher = trainer.publisher(store)
    head = await publisher.claim(trainer.version0)
    trainer.resume(head.state)
    await trainer.publish(publisher)
    await store.close()


@pytest.mark.parametrize("how", [("--run", "r"), ("--channel", "latest"), ()])
async def test_an_empty_store_is_waited_for(
    shell: Shell, capsys: pytest.CaptureFixture[str], how: tuple[str, ...]
) -> None:
    """It says why, on stderr and in /ready; then serves, follows, and ends in order on SIGTERM."""
    announced = shell.root / "store" / "replicas" / "one.json"
    async with running(shell, capsys, "--id", "one", *how) as life:
        why = "run r has no head yet" if how[:1] == ("--run",) else "channel latest is not there"
        body = await life.ready_says(lambda code, body: code == 503 and why in body["why_not_ready"])
        assert (life.id, body["id"], body["state"]) == ("one", "one", "booting")
        assert why in life.complaints + capsys.readouterr().err
        await asyncio.to_thread(claim, shell)
        await life.serves(0)
        await publish(shell)
        await life.serves(1)
        assert ENGINES[0].label == "r/weight_v000001"
        async with asyncio.timeout(60):
            while (record := json.loads(announced.read_bytes()))["applied"] != 1:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert record["address"] == life.url
    assert not announced.exists()
    assert CLOSED == [True]


def claim(shell: Shell) -> None:
    """In a thread, since a command has an event loop of its own."""
    assert shell.claim("--channel", "latest").code == 0


async def test_the_host_checkpoint_is_kept_where_it_is_told(
    shell: Shell, capsys: pytest.CaptureFixture[str]
) -> None:
    await asyncio.to_thread(claim, shell)
    where = shell.root / "host"
    async with running(shell, capsys, "--run", "r", "--host-dir", where) as life:
        await life.serves(0)
    assert (where / "weight_v000000").is_symlink()
    async with running(shell, capsys, "--run", "r", "--host-dir", where) as life:
        await life.serves(0)


async def test_the_probe_remembers_in_the_host_directory_unless_it_is_turned_off(
    shell: Shell, capsys: pytest.CaptureFixture[str]
) -> None:
    await asyncio.to_thread(claim, shell)
    where = shell.root / "host"
    async with running(shell, capsys, "--run", "r", "--host-dir", where, "--no-probe") as life:
        await life.serves(0)
        assert (await life.get("/ready"))[1]["probe"] is None
    assert ENGINES[-1].names("probe") == []
    async with running(shell, capsys, "--run", "r", "--host-dir", where) as life:
        await life.serves(0)
        await life.ready_says(
            lambda code, body: body["probe"]["states"] == 1 and (where / "probe.json").exists()
        )


async def test_a_temporary_host_checkpoint_goes_with_the_process(
    shell: Shell, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratch, "TMPFS", shell.root)
    await asyncio.to_thread(claim, shell)
    async with running(shell, capsys, "--run", "r") as life:
        await life.serves(0)
        assert len(list(shell.root.glob("stitch-*"))) == 1
    assert list(shell.root.glob("stitch-*")) == []


# ------------------------------------------------------------------------------------- what cannot start


def test_a_port_in_use(shell: Shell) -> None:
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    said = shell(*arguments(shell, "--port", port))
    listener.close()
    assert said.code == 2
    assert said.complaint == f"stitch replica: port {port} on 127.0.0.1 is in use by another process"
    assert ENGINES == [], "found before the engine takes its time to load"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--run", "no/run"), "run id 'no/run' is not valid"),
        (("--run", ""), "run id '' is not valid"),
        (("--channel", ""), "--channel '' is not valid"),
        (("--channel", "a/b"), "--channel 'a/b' is not valid"),
        (("--id", "../x"), "--id '../x' is not valid"),
        (("--id", ""), "--id '' is not valid"),
        (("--address", "me:30100"), "--address 'me:30100' is not a URL such as http://10.0.0.7:30100"),
        (("--address", "http://me:99999"), "--address 'http://me:99999' is not a URL"),
        (("--engine", "http://"), "'http://' is not the URL of a server, such as http://127.0.0.1:30000"),
        (("--engine", "http://[::1"), "'http://[::1' is not the URL of a server"),
        (("--engine", "http://127.0.0.1:99999"), "'http://127.0.0.1:99999' is not the URL of a server"),
        (("--base", __file__), "test_replica.py: is a file; name the checkpoint directory that the engine"),
        (("--anchor-every", "3", "--anchor-scratch", __file__), "test_replica.py cannot be a directory"),
        (("--host-dir", "/dev/null"), "--host-dir /dev/null cannot be a directory: File exists"),
        (("--store", "/data"), "'/data' is not a store URL"),
        (("--store", "tape://x"), "there is no store 'tape' here"),
        (("--store", "s3://bucket/x?key=1"), "'key' is no option of s3: URLs"),
        (("--engine", "vllm"), "there is no engine 'vllm' here (known: bytes, embedded"),
        (("--engine-opt", "x"), "--engine-opt x: expected KEY=VALUE"),
        (("--engine-opt", "fail=yes"), "option fail: yes"),
        (
            ("--host", "no-such-host.invalid"),
            "stitch replica: no-such-host.invalid is not an address of this machine",
        ),
        (("--host", "192.0.2.1"), "192.0.2.1 is not an address of this machine"),
        (("--base", "/nowhere/base"), "/nowhere/base: no such directory"),
    ],
)
def test_what_cannot_start(shell: Shell, more: tuple[str, ...], message: str) -> None:
    """One clear line, and not a fallback to something else."""
    said = shell(*arguments(shell, *more))
    assert said.code == 2
    assert message in said.complaint
    assert len(CLOSED) == len(ENGINES)


@pytest.mark.parametrize("port", ["70000", "-1", "http"])
def test_a_port_that_is_none(shell: Shell, port: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        shell(*arguments(shell, f"--port={port}"))
    assert exit.value.code == 2
    assert (
        f"argument --port: expected a whole number from 0 to 65535, got '{port}'" in capsys.readouterr().err
    )


def test_a_base_that_is_not_version_0(shell: Shell) -> None:
    shell.claim()
    other = shell.root / "other"
    write_checkpoint(other, FILES, random_tensors(np.random.default_rng(9), LAYOUT))
    for follow in (("--run", "r"), ()):
        if not follow:
            shell.claim("--channel", "latest")
        said = shell(*arguments(shell, "--base", other, "--json", *follow))
        assert said.code == 2
        lines = [line for line in said.err.splitlines() if line.startswith("stitch replica: ")]
        assert len(lines) == 1
        assert f"the base checkpoint {other} is not version 0 of run r: its state is sha256:" in lines[0]
    assert CLOSED == [True, True]


def test_addresses() -> None:
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    given = {"store": "x", "base": "x"}
    listed: list[str] = []
    for more in (
        ["--host", "10.0.0.7"], ["--host", "::1"], ["--host", "0.0.0.0"], ["--address", "https://me/"],
    ):  # fmt: skip
        pairs = [f"--{key}={value}" for key, value in given.items()]
        listed.append(replica._url(build_parser().parse_args(["replica", *pairs, *more]), listener))
    listener.close()
    assert listed[:2] == [f"http://10.0.0.7:{port}", f"http://[::1]:{port}"]
    assert listed[2].endswith(f":{port}")
    assert "0.0.0.0" not in listed[2]
    assert listed[3] == "https://me/"


async def test_it_uploads_fulls_from_its_host_checkpoint(
    shell: Shell, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """While it serves; with scratch space also when the next version comes at once."""
    await asyncio.to_thread(shell.claim)
    await publish(shell)
    scratch = tmp_path / "scratch"
    more = ("--run", "r", "--anchor-every", 1, "--anchor-scratch", scratch)
    async with running(shell, capsys, *more) as one:
        await one.serves(1)
        fulls = Path(shell.store.removeprefix("file:")) / "runs/r/fulls"
        async with asyncio.timeout(60):
            while not list(fulls.glob("000001.*.json")):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    assert not (scratch / "anchor").exists()
    with pytest.raises(UsageError, match="--anchor-scratch is for --anchor-every"):
        await replica.run(build_parser().parse_args(arguments(shell, "--anchor-scratch", scratch)))


# -------------------------------------------------------------------------------------- as users start it


def as_process(*given: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "stitch_core.cli", *(str(argument) for argument in given)],
        capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )  # fmt: skip


def test_one_line_and_no_traceback_in_a_process(shell: Shell) -> None:
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    common = ("replica", "--store", shell.store, "--base", shell.base)
    for more, message in (
        (("--port", port), f"port {port} on 127.0.0.1 is in use by another process"),
        (("--port", 0, "--run", ".hidden"), "run id '.hidden' is not valid"),
    ):
        done = as_process(*common, *more)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("stitch replica: ")
        assert done.stderr.count("\n") == 1
        assert message in done.stderr
    listener.close()
