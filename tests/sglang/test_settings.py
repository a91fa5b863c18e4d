"""Settings from variables and flags, and what of SGLang's arguments is refused."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from stitch_core import plugins
from stitch_core.replica.reconciler import Follow
from stitch_sglang.refuse import NotCovered, refuse
from stitch_sglang.settings import (
    OPTIONS,
    Settings,
    SettingsError,
    add_flags,
    asked_for,
    export_flags,
    variable,
)


def test_without_store_and_receive_there_are_none() -> None:
    assert Settings.read({"STITCH_RUN": "r", "STITCH_NO_SKIP": "1"}) is None
    assert not asked_for({"STITCH_RUN": "r"}, ["sglang", "serve", "--model-path", "x"])
    assert asked_for({"STITCH_STORE": "file:/s"}, [])
    assert asked_for({}, ["sglang", "serve", "--stitch-store=file:/s"])


def test_a_follower() -> None:
    settings = Settings.read({
        "STITCH_STORE": "file:/s", "STITCH_RUN": "r", "STITCH_KV_MODE": "retract", "STITCH_POLL": "0.5",
        "STITCH_DRAIN_ALL": "1", "STITCH_HOST_DIR": "/h", "STITCH_NICENESS": "0",
    })  # fmt: skip
    assert settings is not None
    assert settings.follow() == Follow(run="r")
    assert (settings.kv_mode, settings.poll, settings.drain_all) == ("retract", 0.5, True)
    assert (settings.host_dir, settings.niceness) == (Path("/h"), 0)
    channel = Settings.read({"STITCH_STORE": "file:/s"})
    assert channel is not None
    assert channel.follow() == Follow(channel="latest")


def test_the_probe_can_be_turned_off() -> None:
    for value, on in ((None, True), ("1", True), ("0", False)):
        probe = {} if value is None else {"STITCH_PROBE": value}
        settings = Settings.read({"STITCH_STORE": "file:/s", **probe})
        assert settings is not None
        assert settings.probe is on
    with pytest.raises(SettingsError):
        Settings.read({"STITCH_STORE": "file:/s", "STITCH_PROBE": "no"})


def test_a_receiver(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")
    settings = Settings.read({"STITCH_RECEIVE": "job", "STITCH_ROOTS": f"{tmp_path}/link:/a"})
    assert settings is not None
    assert settings.roots == (tmp_path.resolve() / "real", Path("/a"))


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"STITCH_STORE": "file:/s", "STITCH_RECEIVE": "job"}, "STITCH_STORE and STITCH_RECEIVE exclude"),
        (
            {"STITCH_STORE": "file:/s", "STITCH_RUN": "a", "STITCH_CHANNEL": "b"},
            "STITCH_RUN and STITCH_CHANNEL",
        ),
        ({"STITCH_RECEIVE": "job"}, "needs STITCH_ROOTS"),
        ({"STITCH_STORE": "file:/s", "STITCH_RUN": "a/b"}, "STITCH_RUN='a/b'"),
        ({"STITCH_STORE": "file:/s", "STITCH_POLL": "soon"}, "STITCH_POLL='soon'"),
        ({"STITCH_STORE": "file:/s", "STITCH_POLL": "nan"}, "STITCH_POLL='nan'"),
        ({"STITCH_STORE": "file:/s", "STITCH_POLL": "-1"}, "STITCH_POLL='-1'"),
        ({"STITCH_STORE": "file:/s", "STITCH_ANCHOR_EVERY": "1_0"}, "STITCH_ANCHOR_EVERY='1_0'"),
        ({"STITCH_STORE": "file:/s", "STITCH_ANCHOR_EVERY": "0"}, "STITCH_ANCHOR_EVERY='0'"),
        ({"STITCH_STORE": "file:/s", "STITCH_DRAIN_ALL": "yes"}, "STITCH_DRAIN_ALL='yes'"),
        ({"STITCH_STORE": "file:/s", "STITCH_NICENESS": "20"}, "STITCH_NICENESS='20'"),
    ],
)
def test_what_cannot_be_used_is_named(variables: dict[str, str], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        Settings.read(variables)


def test_every_setting_has_its_row_in_the_manual() -> None:
    manual = (Path(__file__).resolve().parents[2] / "SGLANG_FORK.md").read_text()
    rows = re.findall(r"`(STITCH_[A-Z_]+)`", manual.split("\n## Settings\n")[1].split("\n## ")[0])
    assert set(rows) == {variable(name) for name in OPTIONS}


def test_flags_become_variables() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    environ = {"STITCH_STORE": "file:/old", "STITCH_POLL": "3"}
    export_flags(parser.parse_args(["--stitch-store", "file:/new", "--stitch-kv-mode", "retract"]), environ)
    assert environ == {"STITCH_STORE": "file:/new", "STITCH_POLL": "3", "STITCH_KV_MODE": "retract"}
    assert len(OPTIONS) == len(Settings.__dataclass_fields__)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tokenizer_worker_num", 2), ("pp_size", 2), ("dp_size", 8), ("speculative_algorithm", "EAGLE"),
        ("load_format", "dummy"),
    ],
)  # fmt: skip
def test_what_is_not_covered_is_refused_by_name(name: str, value: object) -> None:
    refuse(SimpleNamespace(), {})
    with pytest.raises(NotCovered, match=f"--{name.replace('_', '-')} {value}: "):
        refuse(SimpleNamespace(**{name: value}), {})


def test_the_rust_server_is_refused() -> None:
    with pytest.raises(NotCovered, match="SGLANG_RUST_SERVER"):
        refuse(SimpleNamespace(), {"SGLANG_RUST_SERVER": "1"})
    refuse(SimpleNamespace(), {"SGLANG_RUST_SERVER": "0"})


def test_a_replica_command_with_sglang_as_its_engine_is_told_what_to_do() -> None:
    with pytest.raises(plugins.PluginMissing, match="`sglang serve` itself is the replica"):
        plugins.load("stitch.engines", "sglang")
