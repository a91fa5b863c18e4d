"""A run's settings: a typo is an error with the nearest right name, and every problem is said at once."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from stitch_core.trainers.flags import HELP, add_flags
from stitch_core.trainers.settings import KEYS, SettingsError, read_settings
from stitch_slime.hooks import launch_command


def arguments(**values: Any) -> SimpleNamespace:
    known = {"hf_checkpoint": "/models/boot", "stitch_run": "r", "stitch_store": "file:/store"}
    return SimpleNamespace(**(known | values))


def test_what_is_not_set_has_a_default() -> None:
    settings = read_settings(arguments(stitch_lag=None))
    assert (settings.run, settings.boot, settings.lag) == ("r", Path("/models/boot"), 0)
    assert read_settings(arguments(stitch_async=True)).async_
    assert read_settings(arguments(stitch_boot="/other")).boot == Path("/other")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"stitch_stroe": "x"}, "stitch_stroe is not a setting, did you mean stitch_store?"),
        ({"stitch_run": None}, "stitch_run is missing: add it to the YAML"),
        ({"stitch_run": "-x"}, "stitch_run: run id '-x' is not valid"),
        ({"stitch_run": 7}, "stitch_run: expected text, got 7"),
        ({"stitch_store": "/data"}, "stitch_store: '/data' is not a store URL"),
        ({"stitch_store": "s3://b"}, "stitch_store: 'b' is not a bucket"),
        ({"stitch_lag": -1}, "stitch_lag: expected a number of versions from 0 on, got -1"),
        ({"stitch_lag": "2"}, "got '2'"),
        ({"stitch_lag": True}, "got True"),
        ({"stitch_patience": -1}, "stitch_patience: expected seconds from 0 on, got -1"),
        ({"stitch_keep_files": "yes"}, "stitch_keep_files: expected true or false, got 'yes'"),
        ({"stitch_async": 1}, "stitch_async: expected true or false, got 1"),
        ({"stitch_wait_replicas": 1.5}, "expected a number of replicas from 1 on, or a fraction up to 1.0"),
        ({"stitch_wait_replicas": True}, "got True"),
        ({"stitch_wait_replicas_then": "die"}, "stitch_wait_replicas_then: expected warn or stop, got 'die'"),
        ({"stitch_wake": "gateway:30000"}, "stitch_wake: 'gateway:30000' cannot be woken: expected the URL"),
        ({"stitch_wake": [30000]}, "stitch_wake: [30000] cannot be woken"),
        ({"stitch_anchor_every": 0}, "stitch_anchor_every: expected a number of versions from 1 on, got 0"),
        ({"stitch_asinc": True}, "stitch_asinc is not a setting, did you mean stitch_async?"),
        ({"hf_checkpoint": None}, "stitch_boot is missing"),
        ({"stitch_xyzzy": 1}, "stitch_xyzzy is not a setting: known are stitch_run, "),
    ],
)
def test_a_wrong_setting_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        read_settings(arguments(**values))
    assert message in str(caught.value)


def test_all_problems_at_once() -> None:
    with pytest.raises(SettingsError) as caught:
        read_settings(arguments(stitch_rnu="a", stitch_lag=-2, stitch_store=""))
    assert str(caught.value).count("; ") >= 2


def test_flags_that_the_framework_dropped() -> None:
    argv = ["train.py", "--stitch-lag", "2", "--stitch-chanel=x", "--lr", "1"]
    with pytest.raises(SettingsError) as caught:
        read_settings(arguments(), argv)
    assert "--stitch-lag was dropped by the framework's parser: write it as stitch_lag in the YAML" in str(
        caught.value
    )
    assert "--stitch-chanel is not a setting, did you mean --stitch-channel?" in str(caught.value)
    assert read_settings(arguments(stitch_lag=2), ["--stitch-lag", "2"]).lag == 2


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("python train.py --name 'two words' --stitch-lag 1", ["two words", "--stitch-lag", "1"]),
        ("python train.py --name it's --stitch-lag 1", ["it's", "--stitch-lag", "1"]),
        (None, []),
    ],
)
def test_the_command_line_of_the_launch_script(
    monkeypatch: pytest.MonkeyPatch, text: str | None, found: list[str]
) -> None:
    ray, state = ModuleType("ray"), ModuleType("ray._private.state")
    ray.is_initialized = lambda: True  # type: ignore[attr-defined]
    ray.get_runtime_context = lambda: SimpleNamespace(get_job_id=lambda: "02")  # type: ignore[attr-defined]
    jobs = [{"JobID": "01", "Entrypoint": "other --stitch-lag 7"}, {"JobID": "02", "Entrypoint": text}]
    state.jobs = lambda: jobs[: 1 if text is None else 2]  # type: ignore[attr-defined]
    for module in (ray, ModuleType("ray._private"), state):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    assert launch_command()[-3:] == found


def test_a_flag_that_names_a_function_of_ours_and_was_dropped() -> None:
    args = arguments(
        custom_megatron_init_path="stitch_slime.hooks.megatron_init",
        rollout_sample_hook_path=["mine.hook", "stitch_slime.rollout.record_version"],
        data_source_path="slime.rollout.data_source.RolloutDataSourceWithBuffer",
        custom_config_path="stitch.yaml",
    )
    fine = [
        "--custom-megatron-init-path=stitch_slime.hooks.megatron_init",
        "--custom-config-path",
        "stitch.yaml",
    ]
    fine += ["--rollout-sample-hook-path", "stitch_slime.rollout.record_version"]
    assert read_settings(args, fine).run == "r"
    with pytest.raises(SettingsError) as caught:
        read_settings(args, [*fine, "--data-sorce-path", "stitch_slime.data.StitchDataSource"])
    assert str(caught.value) == (
        "--data-sorce-path stitch_slime.data.StitchDataSource was dropped by the framework's parser, did you "
        "mean --data-source-path?"
    )


def test_every_setting_is_a_flag_where_flags_can_be_added() -> None:
    assert set(HELP) == set(KEYS)
    parser = argparse.ArgumentParser()
    add_flags(parser)
    add_flags(parser)
    parsed = parser.parse_args(["--stitch-run", "r", "--stitch-lag", "2", "--stitch-keep-files"])
    given = {key: value for key, value in vars(parsed).items() if value is not None}
    assert given == {"stitch_run": "r", "stitch_lag": 2, "stitch_keep_files": True}
    more = parser.parse_args(["--stitch-async", "--stitch-wait-replicas", "0.5"])
    assert (more.stitch_async, more.stitch_wait_replicas) == (True, 0.5)
    urls = parser.parse_args(["--stitch-wake", "http://a:1,http://b:2"]).stitch_wake
    assert read_settings(arguments(stitch_wake=urls)).wake == ("http://a:1", "http://b:2")
    settings = read_settings(
        SimpleNamespace(**vars(parsed) | {"stitch_store": "file:/store", "hf_checkpoint": "/b"})
    )
    assert (settings.lag, settings.keep_files) == (2, True)


def test_a_store_that_ends_with_the_trainer_is_refused() -> None:
    """It published into its own memory, and every replica waited for a run that nobody claimed."""
    with pytest.raises(SettingsError, match=r"stitch_store: memory: ends with the process that opened it"):
        read_settings(arguments(stitch_store="memory:"))
