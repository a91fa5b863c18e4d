"""``stitch recipe profile`` with the recipe's own engine: stock SGLang, on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recipes.local.sglang_server import environment
from stitch_core.cli.main import main

pytestmark = pytest.mark.real


def test_a_recipe_takes_an_update_and_then_answers_as_a_fresh_server_of_the_new_version(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole row: no part of it is absent, and every check passes, equality among them."""
    for name, value in environment(tmp_path, {}).items():
        monkeypatch.setenv(name, value)
    code = main([
        "recipe", "profile", "qwen3-0.6b/miles", "--size", "small", "--project", "--json", "--idle", "0.5",
        "--patience", "200",
    ])  # fmt: skip
    said = capsys.readouterr()
    assert said.out, said.err
    row: dict[str, Any] = json.loads(said.out)
    assert (code, row["ok"]) == (0, True), row["checks"] or row["excludes"]
    assert {"output changed", "after: equal to a fresh server"} <= {check["what"] for check in row["checks"]}
    before, pause, size = row["preparation"], row["pause"], row["bytes"]
    assert all(before[part] > 0 for part in ("fetch", "apply", "load", "total"))
    assert 0 < pause["copy"] <= pause["total"] < row["total"]
    assert 0 < size["delta"] < size["canonical"] <= size["loaded"]
    assert row["memory"]["before"] > 1e9
    assert row["destination"]["path"] == "cpu"
    assert "equality with a fresh server" not in " ".join(row["excludes"])
    assert all(term["seconds"] > 0 for term in row["projection"]["terms"])
