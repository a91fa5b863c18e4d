"""How the replica is put into SGLang's app, without a server: who may call what, who answers first."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from sglang.srt.utils.auth import AuthLevel, _get_auth_level_from_app_and_scope

from stitch_core.ports import FileMarks
from stitch_core.testing.asgi_client import AsgiClient
from stitch_sglang.follower import Follower
from stitch_sglang.receiver import Receiver
from stitch_sglang.server import Life, install, reachable_url
from stitch_sglang.settings import Settings

pytestmark = pytest.mark.real


def server_args(host: str = "127.0.0.1") -> Any:
    shown = "127.0.0.1" if host == "0.0.0.0" else host
    return SimpleNamespace(
        model_path="/boot", host=host, port=30000, url=lambda: f"http://{shown}:30000",
        skip_server_warmup=False,
    )  # fmt: skip


@pytest.fixture(params=["follower", "receiver"])
def app(request: pytest.FixtureRequest, tmp_path: Path) -> FastAPI:
    """An app with a route of SGLang's, and a replica in front of it that has not begun."""
    app = FastAPI()
    app.post("/generate")(lambda: {"text": "from below"})
    app.post("/update_weights_from_tensor")(lambda: {"success": True})
    installed(app, request.param, tmp_path)
    return app


def installed(app: FastAPI, kind: str, root: Path, marks: FileMarks | None = None) -> Life:
    settings = (
        Settings(store=f"file:{root}/store", run="r", host_dir=root)
        if kind == "follower"
        else Settings(receive="job", roots=(root,), host_dir=root)
    )
    manager = SimpleNamespace(config_value={"weight_version": "default"}.get)
    return install(app, settings, manager, server_args(), marks)


@pytest.mark.parametrize("marks", [None, {"": (1, 2)}])
@pytest.mark.parametrize("kind", ["follower", "receiver"])
async def test_c77_the_engine_says_what_was_seen_of_its_boot_checkpoint(
    kind: str, marks: FileMarks | None, tmp_path: Path
) -> None:
    """From before it was loaded; nothing, where nothing was seen."""
    mode = installed(FastAPI(), kind, tmp_path, marks).mode
    assert isinstance(mode, Follower | Receiver)
    assert (await mode._engine.identity()).boot_marks == marks


@pytest.mark.parametrize("path", ["/pull_weights", "/wake"])
def test_the_admins_key_guards_what_stitch_adds(app: FastAPI, path: str) -> None:
    scope = {"type": "http", "method": "POST", "path": path, "root_path": "", "headers": []}
    assert _get_auth_level_from_app_and_scope(app, scope) is AuthLevel.ADMIN_OPTIONAL


async def test_the_gate_answers_before_the_engine(app: FastAPI) -> None:
    client = AsgiClient(app)
    generated = await client.post("/generate", {"text": "x"})
    assert (generated.status, generated.json()["error"]["type"]) == (503, "EngineUnavailable")
    assert (await client.post("/update_weights_from_tensor", {})).status == 403
    assert (await client.get("/health")).status == 200
    assert (await client.get("/ready")).status == 503
    assert (await client.get("/docs")).status == 404


async def test_status_says_what_goes_on(app: FastAPI) -> None:
    answer = await AsgiClient(app).get("/stitch/status")
    assert (answer.status, answer.json()["activity"]) == (200, "idle")


def test_a_server_on_all_interfaces_is_found_by_its_machines_name() -> None:
    assert reachable_url(server_args()) == "http://127.0.0.1:30000"
    assert "127.0.0.1" not in reachable_url(server_args("0.0.0.0"))
    assert reachable_url(server_args("0.0.0.0")).endswith(":30000")
