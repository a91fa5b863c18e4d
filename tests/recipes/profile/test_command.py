"""``stitch recipe profile`` from its command line: the way to the host here, and a live replica."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stitch_core.cli.main import main
from stitch_recipes import catalogue
from stitch_recipes.profile.bases import made
from tests.cli.test_profile import environment, get, until

MILES, AIR = "qwen3-0.6b/miles", "glm-4.5-air/fp8-serve"


def profiled(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = main(["recipe", "profile", "--json", *map(str, arguments)])
    return code, json.loads(capsys.readouterr().out)


def test_without_an_engine_the_row_has_the_way_to_the_host_and_says_what_it_has_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, row = profiled(capsys, AIR, "--engine", "none", "--project")
    assert (code, row["ok"], row["checks"]) == (0, None, [])
    assert row["checkpoint"]["quantization"] == "fp8-channel"
    assert row["preparation"]["fetch"] > 0
    assert row["preparation"]["apply"] > 0
    absent = [row["preparation"]["total"], row["preparation"]["load"], row["pause"]["total"], row["total"]]
    assert absent == [None] * 4
    assert any("--engine none" in one and "pause" in one for one in row["excludes"])
    assert 0.003 < row["change"]["elements"] < 0.011  # a layer of it is not trained
    assert row["bytes"]["ratio"] == row["bytes"]["delta"] / row["bytes"]["canonical"]
    projection = row["projection"]
    assert projection["published"]["preparation"] == 26.6
    assert [term["seconds"] is None for term in projection["terms"]] == [False, False, True, True, True]
    assert projection["total"] is None


@pytest.mark.slow
def test_rates_of_an_engine_come_from_another_profile_and_are_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    _, row = profiled(capsys, MILES, "--engine", "none", "--change", "training")
    assert 0.004 < row["change"]["elements"] < 0.012
    path = tmp_path / "row.json"
    path.write_text(json.dumps(row))
    assert main(["recipe", "profile", AIR, "--engine", "none", "--rates", str(path)]) == 2
    assert "no rates of an engine" in capsys.readouterr().err
    row["rates"] |= {"load": 1.0, "copy": 1.0, "rest": 0.1}
    path.write_text(json.dumps(row))
    _, row = profiled(capsys, AIR, "--engine", "none", "--project", "--rates", path)
    assert row["projection"]["total"] > 0
    assert any("the engine's rates are those of qwen3" in why for why in row["projection"]["why"])
    assert main(["recipe", "profile", AIR, "--engine", "none", "--project", "--rates", str(path)]) == 0
    said = capsys.readouterr().out
    assert "NOT measured" in said
    assert "26.60 s  preparation (ours / theirs" in said


def test_a_program_that_is_not_there_is_a_row_that_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    code, row = profiled(capsys, MILES, "--sglang", "/nowhere/sglang")
    assert (code, row["ok"]) == (0, None)
    assert any("/nowhere/sglang cannot be run" in one for one in row["excludes"])


def test_a_checkpoint_of_ones_own_is_read_and_another_layout_is_said(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    base = made(catalogue.load(MILES), "small", tmp_path / "base").directory
    _, row = profiled(capsys, MILES, "--base", base, "--engine", "none")
    assert (row["checkpoint"]["size"], row["checkpoint"]["made"]) == ("full", False)
    assert any("does not have the layout that recipe qwen3-0.6b/miles says" in one for one in row["excludes"])
    assert {path.name for path in tmp_path.iterdir()} == {"base"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((MILES, "--server", "http://127.0.0.1:1"), "--server, --store, --run and --base go together"),
        ((MILES, "--reference", "http://127.0.0.1:1"), "go together"),
        ((MILES, "--rates", "/nowhere/row.json"), "--rates /nowhere/row.json: No such file"),
        (("no/such",), "there is no recipe no/such"),
    ],
)
def test_what_cannot_be_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    assert main(["recipe", "profile", *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.fixture
def live(tmp_path: Path) -> Iterator[tuple[str, str, Path]]:
    """A replica of the embedded engine that follows a run: its URL, the store, version 0."""
    base = made(catalogue.load(MILES), "small", tmp_path / "base").directory
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4096}))
    store = f"file:{tmp_path / 'store'}"
    assert main(["claim", "--store", store, "--run", "r", "--base", str(base)]) == 0
    replica = subprocess.Popen(
        [
            sys.executable, "-m", "stitch_core.cli", "replica", "--store", store, "--run", "r",
            "--base", str(base), "--port", "0", "--poll", "0.2", "--json", "--host-dir", str(tmp_path / "h"),
            "--engine-opt=max_len=128", "--engine-opt=pace=0.01",
        ],
        stdout=subprocess.PIPE, text=True, env=environment(),
    )  # fmt: skip
    try:
        assert replica.stdout is not None
        url = json.loads(replica.stdout.readline())["url"]
        until(lambda: get(url + "/ready")[0] == 200)
        yield url, store, base
    finally:
        replica.terminate()
        replica.wait(20)
        assert replica.stdout is not None
        replica.stdout.close()


@pytest.mark.slow
def test_a_live_replica_takes_one_version_after_the_other(
    capsys: pytest.CaptureFixture[str], live: tuple[str, str, Path]
) -> None:
    """The second is a delta from the first, which is rebuilt from the store."""
    url, store, base = live
    where = ("--server", url, "--store", store, "--run", "r", "--base", base, "--idle", 0.5, "--patience", 60)
    for number in (1, 2):
        code, row = profiled(capsys, MILES, *where)
        assert code == 0, row["checks"]
        assert {check["what"]: check["detail"] for check in row["checks"]}[
            "after: the new version"
        ] == f"versions [{number}]"
        assert 0 < row["pause"]["total"] < row["total"]
        assert "equality with a fresh server: no --reference was given" in row["excludes"]
