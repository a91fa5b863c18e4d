"""docs/openapi.json is what gateways and replicas serve: by its routes, and by schemathesis against both."""

import asyncio
import json
import random
import re
import sys
from asyncio.subprocess import PIPE, STDOUT
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from stitch_core.replica.auth import Tokens, parse_tokens
from stitch_core.replica.routes import ROUTES
from stitch_core.stores.memory import MemoryStore
from stitch_gateway.app import Gateway, GatewaySettings
from stitch_gateway.head_view import Heads
from stitch_gateway.pools import StaticPool
from tests.gateway import echo
from tests.gateway.fleet import Fleet
from tests.gateway.test_wire import raw

ROOT = Path(__file__).resolve().parent.parent.parent
FILE = ROOT / "docs" / "openapi.json"
DOCUMENT: dict[str, Any] = json.loads(FILE.read_text())
CONFIG = Path(__file__).with_name("schemathesis.toml")
# Cases for each operation, beside those that cover its schema.
EXAMPLES = 8
TOKEN = "everything-0123456789"


def documented(tag: str) -> set[tuple[str, str]]:
    return {
        (method.upper(), path)
        for path, operations in DOCUMENT["paths"].items()
        for method, operation in operations.items()
        if tag in operation["tags"]
    }


async def served(*, facade: bool) -> set[tuple[str, str]]:
    """The routes of a gateway, which need not run for that."""
    settings = GatewaySettings(run="r", facade=facade)
    rng, store = random.Random(0), MemoryStore()
    heads = Heads(store, rng, interval=1.0, clock=asyncio.get_running_loop().time, keep="r")
    async with aiohttp.ClientSession() as session:
        gateway = Gateway(StaticPool(["http://127.0.0.1:1"]), session, settings, rng, heads)
        routes = {(route.method, route.path) for route in gateway.routes()}
    await heads.close()
    return routes


def test_the_routes_of_a_replica() -> None:
    assert documented("replica") == {(method, path) for path, (method, _) in ROUTES.items()}


@pytest.mark.parametrize("facade", [False, True])
async def test_the_routes_of_a_gateway(facade: bool) -> None:
    assert documented("facade" if facade else "gateway") == await served(facade=facade)


def test_the_kinds_of_refusals() -> None:
    sources = [*(ROOT / "stitch_core").rglob("*.py"), *(ROOT / "plugins" / "gateway").rglob("*.py")]
    made = {
        found for path in sources for found in re.findall(r"Refusal\(\s*\d{3}, \"(\w+)\"", path.read_text())
    }
    error = DOCUMENT["components"]["schemas"]["Refusal"]["properties"]["error"]
    assert set(error["properties"]["type"]["enum"]) == made


def test_operations_have_names_and_every_reference_leads_somewhere() -> None:
    operations = [o for operations in DOCUMENT["paths"].values() for o in operations.values()]
    names = [operation["operationId"] for operation in operations]
    assert len(set(names)) == len(names)
    for kind, name in re.findall(r'"\$ref": "#/components/(\w+)/(\w+)"', FILE.read_text()):
        assert name in DOCUMENT["components"][kind]


async def schemathesis(url: str, tag: str, directory: Path, *options: str) -> tuple[int, str]:
    """Its exit code and what it says. It leaves nothing in the clone."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "schemathesis.cli", "--config-file", str(CONFIG), "run", str(FILE),
        "--url", url, "--include-tag", tag, "--phases", "coverage,fuzzing", "--seed", "1", "--no-color",
        "--max-examples", str(EXAMPLES), "--warnings", "off", *options,
        stdout=PIPE, stderr=STDOUT, cwd=directory,
    )  # fmt: skip
    try:
        out, _ = await asyncio.wait_for(process.communicate(), 120)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return process.returncode, out.decode()


@pytest.mark.slow
@pytest.mark.parametrize("tag", ["gateway", "facade"])
async def test_schemathesis_finds_nothing_at_a_gateway(fleet: Fleet, tmp_path: Path, tag: str) -> None:
    """It found that an empty X-Stitch-Run was no 400, and that any abort_all but false aborted all."""
    async with echo.running() as url:
        await fleet.start(url, until_ready=1, hold=0.02, run="r", facade=tag == "facade")
        code, said = await schemathesis(fleet.url, tag, tmp_path)
        assert code == 0, said
        assert fleet.gateway.fleet.evictions == 0, "a request made the gateway drop its replica"


@pytest.mark.slow
async def test_schemathesis_finds_nothing_at_a_replica(tmp_path: Path) -> None:
    """It found that a malformed X-Stitch-Consumer was no 400 where no run was named."""
    async with echo.running() as url:
        code, said = await schemathesis(url, "replica", tmp_path)
    assert code == 0, said


@pytest.mark.slow
async def test_schemathesis_gets_past_no_token(fleet: Fleet, tmp_path: Path) -> None:
    grants = parse_tokens(f"admin {TOKEN}", "here")
    tokens = Tokens(lambda: grants)
    options = (
        "--checks", "ignored_auth,not_a_server_error", "--header", f"Authorization:Bearer {TOKEN}",
        "--phases", "coverage",
    )  # fmt: skip
    async with echo.running() as url:
        await fleet.start(url, until_ready=1, hold=0.02, run="r", tokens=tokens)
        code, said = await schemathesis(fleet.url, "gateway", tmp_path, *options)
        assert code == 0, said
        bare = b"POST /generate HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
        assert (await raw(fleet, bare))[0] == 401


async def test_abort_all_is_true_or_false(fleet: Fleet) -> None:
    """A client that spelt "false" as text aborted every request of its consumer."""
    fleet.add()
    await fleet.start(run="r", facade=True)
    for odd in ("false", "true", 0, 1, [], [None], {}):
        status, value = await fleet.post({"abort_all": odd}, "/abort_request")
        assert (status, value["error"]["type"]) == (400, "InvalidRequest"), odd


@pytest.mark.parametrize("facade", [False, True])
async def test_an_empty_run_is_no_run(fleet: Fleet, facade: bool) -> None:
    fleet.add()
    await fleet.start(run="r", facade=facade)
    for headers in ({"X-Stitch-Run": ""}, {"X-Stitch-Consumer": ""}, {"X-Stitch-Consumer": "a~b"}):
        status, _ = await fleet.post({"text": "x"}, headers=headers)
        assert status == 400
        if facade:
            async with fleet.session.get(fleet.url + "/v1/loads", headers=headers) as answer:
                assert answer.status == 400
