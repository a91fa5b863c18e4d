"""Miles' example agent is given a connection for every agent: stand-ins for httpx and for the example."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from stitch_recipes import catalogue

EXAMPLE = """
import httpx

def client():
    transport = httpx.AsyncHTTPTransport(socket_options=[1])
    return httpx.AsyncClient(transport=transport, limits=httpx.Limits(max_connections=64), timeout=None)

async def run(base_url, prompt): ...

async def abort(args): ...
"""
"""As the example makes its client at Miles 31f1ca961: httpx looks at no limits beside a transport."""


@pytest.fixture
def harbor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ModuleType]:
    httpx = ModuleType("httpx")

    def given(**values: Any) -> SimpleNamespace:
        return SimpleNamespace(**values)

    for name in ("AsyncHTTPTransport", "AsyncClient", "Limits"):
        setattr(httpx, name, given)
    monkeypatch.setitem(sys.modules, "httpx", httpx)
    (tmp_path / "swe_agent_function.py").write_text(EXAMPLE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("stitch_recipes.harbor")
    for name in ("stitch_recipes.harbor", "swe_agent_function"):
        del sys.modules[name]


def test_its_transport_has_no_limit_and_what_else_it_was_given(harbor: ModuleType) -> None:
    """100 agents for 48 replicas with 28 requests each: the others waited until their time was over."""
    transport = harbor.example.client().transport
    assert transport.limits.max_connections is None
    assert transport.limits.max_keepalive_connections is None
    assert transport.socket_options == [1]


def test_only_the_example_is_given_it(harbor: ModuleType) -> None:
    assert not hasattr(harbor.httpx.AsyncHTTPTransport(), "limits")
    assert (harbor.run, harbor.abort) == (harbor.example.run, harbor.example.abort)


@pytest.mark.parametrize("name", ["glm-4.7-flash/code", "glm-5.2/nvfp4", "glm-5.2/fp8"])
def test_every_recipe_with_agents_names_it_and_has_the_example_beside(name: str) -> None:
    trainer = catalogue.load(name).trainer
    assert trainer is not None
    assert trainer.flags["custom-agent-function-path"] == "stitch_recipes.harbor.run"
    assert trainer.modules == ["examples/swe-agent-harbor-docker"]
