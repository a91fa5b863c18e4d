"""docs/http.md says what the code does, as far as a machine can tell."""

import json
import re
from pathlib import Path

import pytest

from stitch_core.replica.report import FIELDS
from stitch_core.replica.routes import ROUTES

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs" / "http.md").read_text()
SOURCES = [*(ROOT / "stitch_core").rglob("*.py"), *(ROOT / "plugins" / "gateway").rglob("*.py")]


def test_every_refusal_is_there_with_its_status() -> None:
    made = {
        found for path in SOURCES for found in re.findall(r"Refusal\(\s*(\d{3}), \"(\w+)\"", path.read_text())
    }
    assert len(made) >= 12
    missing = [(status, kind) for status, kind in made if f"{status} `{kind}`" not in TEXT]
    assert not missing


@pytest.mark.parametrize("path", ROUTES)
def test_every_route_is_there(path: str) -> None:
    assert f"{path}`" in TEXT


def test_every_route_of_the_facade_is_there() -> None:
    facade = (ROOT / "plugins" / "gateway" / "stitch_gateway" / "facade.py").read_text()
    paths = set(re.findall(r"\"(/[a-z0-9_/]+)\"", facade))
    assert len(paths) > 25
    assert not [path for path in paths if f"{path}`" not in TEXT]


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_is_there(field: str) -> None:
    assert field in TEXT


def test_every_route_of_an_sglang_receiver_is_there() -> None:
    plugin = ROOT / "plugins" / "sglang" / "stitch_sglang"
    paths = set(re.findall(r"\"(/[a-z0-9_/]+)\"\)", (plugin / "receiver_routes.py").read_text()))
    paths |= set(re.findall(r"STATUS = \"(.*)\"", (plugin / "server.py").read_text()))
    assert {"/pull_weights", "/activate_weights", "/stitch/status"} <= paths
    assert not [path for path in paths if path not in TEXT]


def test_examples_are_json() -> None:
    blocks = re.findall(r"```json\n(.*?)```", TEXT, re.DOTALL)
    assert len(blocks) == 7
    for block in blocks:
        json.loads(block)
