"""The commands that look at a store, on a real S3 server."""

from __future__ import annotations

import json
import time

import pytest

from stitch_core.cli.main import main
from stitch_core.ports import NotFound
from stitch_s3.testing.server import ENVIRON, SeaweedServer

pytestmark = pytest.mark.real


async def test_folders_and_times(server: SeaweedServer, prefix: str) -> None:
    store, began = server.store(prefix, page=2), time.time()
    for number in range(5):
        await store.create(f"runs/r{number % 3}/k{number}", b"")
    await store.create("runs/plain", b"")
    assert await store.folders("runs/") == ["r0", "r1", "r2"]
    assert await store.folders("none/") == []
    stamp = await store.stamp("runs/r0/k0")
    assert stamp is not None
    assert abs(stamp.written - began) < 60
    assert -2 < stamp.age < 60
    with pytest.raises(NotFound):
        await store.stamp("runs/none")
    await store.close()


def test_doctor(
    server: SeaweedServer, prefix: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in ENVIRON.items():
        monkeypatch.setenv(name, value)
    assert main(["doctor", "--store", server.url(prefix.strip("/")), "--json"]) == 0
    found = {check["check"]: check["result"] for check in json.loads(capsys.readouterr().out)["checks"]}
    for check in (
        "write",
        "create-only",
        "compare-and-swap",
        "race to create",
        "race to swap",
        "clock",
        "delete",
    ):
        assert found[check] == "ok", check
    left = server.client().list_objects_v2(Bucket="stitch", Prefix=prefix.strip("/"))
    assert left["KeyCount"] == 0


def test_doctor_without_permission(
    server: SeaweedServer, prefix: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
    assert main(["doctor", "--store", server.url(prefix.strip("/")), "--json"]) == 1
    (found,) = [c for c in json.loads(capsys.readouterr().out)["checks"] if c["check"] == "list"]
    assert found["result"] == "fail"
    assert "s3:ListBucket" in found["do"]
