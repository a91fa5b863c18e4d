"""What ``stitch status`` costs on S3: requests for each run, and none for each of its keys."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stitch_core.cli import common
from stitch_core.cli.main import main
from tests.cli.commands import Shell
from tests.s3.fake import FakeS3, Object

RUNS, VERSIONS = 3, 2500


def test_status_counts_runs_and_not_their_keys(
    fake: FakeS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A listing of every key takes a request for each thousand: a run of a week has a hundred thousand."""
    shell = Shell(tmp_path, capsys)
    monkeypatch.setattr(common, "open_store", lambda url: fake.store())
    shell.store = "s3://bucket"
    for number in range(RUNS):
        assert shell.claim("--channel", "latest", run=f"r{number}").code == 0
        for version in range(VERSIONS):
            fake.objects[f"runs/r{number}/e0001/weight_v{version:06d}/model.safetensors"] = Object(b"")
    fake.requests.clear()
    found = shell("status", "--store", shell.store, "--json").json
    assert [run["run"] for run in found["runs"]] == ["r0", "r1", "r2"]
    # Three listings (channels, replicas, folders of runs), the public reference's pointer, the channel; for
    # each run its head and the manifest that it names.
    assert fake.requests == {"GET": 5 + 2 * RUNS}
    fake.requests.clear()
    assert main(["status", "--store", shell.store, "--run", "r1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["head"] == 0
    assert fake.requests == {"GET": 2}
