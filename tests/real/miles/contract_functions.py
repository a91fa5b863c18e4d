"""Stitch's functions for slime with the settings that a launch script's YAML would bring.

slime's contract tests call a function with arguments of their own (None, or a handful), and judge what it
returns: the function inside is then one of their own references.
"""

from __future__ import annotations

import functools
import os
from types import SimpleNamespace
from typing import Any

from stitch_slime import rollout
from stitch_slime.data import StitchDataSource

CONTRACTS = "plugin_contracts.test_plugin_"


def with_settings(args: Any, **more: Any) -> SimpleNamespace:
    root = os.environ["STITCH_CONTRACT_ROOT"]
    given = {name: getattr(args, name) for name in dir(args) if not name.startswith("_")}
    known = {"stitch_run": "r", "stitch_store": f"file:{root}/store", "hf_checkpoint": f"{root}/boot"}
    return SimpleNamespace(**given | known | more)


@functools.wraps(rollout.generate_rollout)
def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    args = with_settings(args, stitch_inner_rollout=f"{CONTRACTS}rollout_contracts.valid_rollout_function")
    return rollout.generate_rollout(args, rollout_id, data_source, evaluation=evaluation)


@functools.wraps(rollout.generate)
async def generate(args: Any, sample: Any, sampling_params: dict[str, Any], evaluation: bool = False) -> Any:
    inner = f"{CONTRACTS}generate_contracts.custom_generate"
    return await rollout.generate(
        with_settings(args, stitch_inner_generate=inner), sample, sampling_params, evaluation
    )


class DataSource(StitchDataSource):
    def __init__(self, args: Any) -> None:
        super().__init__(with_settings(args))
