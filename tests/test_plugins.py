"""Plugins are found by name, in a clone as after an install; one that is broken takes nobody else along."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from stitch_core import plugins
from stitch_core.plugins import OURS, PluginMissing, load, names
from stitch_core.stores.memory import open_url

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> list[EntryPoint]:
    """Nothing is installed but what a test adds."""
    entries: list[EntryPoint] = []

    def find(group: str, name: str | None = None) -> list[EntryPoint]:
        return [e for e in entries if e.group == group and name in (None, e.name)]

    monkeypatch.setattr(plugins, "entry_points", find)
    return entries


def test_the_table_is_what_the_distribution_registers() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ours = {group: table for group, table in project["entry-points"].items() if group.startswith("stitch.")}
    assert ours == OURS


def test_every_extra_that_is_named_exists() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    core = {"file", "memory"}
    for group in OURS.values():
        assert {plugins.EXTRAS.get(name, name) for name in group} - core <= set(extras)


def test_every_extra_brings_the_modules_that_it_is_said_to() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for module, brings in plugins.MODULES.items():
        package = {"yaml": "pyyaml", "botocore": "boto3"}.get(module, module)
        for extra in brings:
            assert any(re.match(rf"{package}\b", needed) for needed in extras[extra]), (module, extra)


def test_a_clone_that_was_never_installed(registered: list[EntryPoint]) -> None:
    assert names("stitch.stores") == sorted(OURS["stitch.stores"])
    assert load("stitch.stores", "memory") is open_url
    assert names("stitch.unheard-of") == []


def test_an_installed_plugin_comes_first(registered: list[EntryPoint]) -> None:
    registered.append(EntryPoint("mine", "stitch_core.stores.memory:MemoryStore", "stitch.stores"))
    registered.append(EntryPoint("file", "stitch_core.stores.memory:open_url", "stitch.stores"))
    assert names("stitch.stores") == sorted([*OURS["stitch.stores"], "mine"])
    assert load("stitch.stores", "file") is open_url


def test_what_is_not_there_says_what_is(
    registered: list[EntryPoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(plugins.ELSEWHERE, "stitch.stores", ("tape",))
    with pytest.raises(PluginMissing, match=r"there is no engine 'vllm' here \(known: embedded\)\Z"):
        load("stitch.engines", "vllm")
    with pytest.raises(PluginMissing, match=r"no store 'tape' here .*; it comes with 'stitch-rl\[tape\]'"):
        load("stitch.stores", "tape")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("module_that_nobody_has:x", r"mine needs module_that_nobody_has: pip install 'stitch-rl\[mine\]'"),
        ("stitch_core.stores.memory:nothing", "mine is installed but cannot be loaded: .*'nothing'"),
    ],
)
def test_a_broken_plugin(registered: list[EntryPoint], target: str, message: str) -> None:
    registered.append(EntryPoint("mine", target, "stitch.stores"))
    with pytest.raises(PluginMissing, match=message):
        load("stitch.stores", "mine")
