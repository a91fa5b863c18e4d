"""The negative control on SGLang: a replica whose engine takes labels without weights; all else is real.

``python -m recipes.local.sglang_faulty ...`` is ``python -m sglang.launch_server ...`` otherwise.
"""

from __future__ import annotations

import runpy
from collections.abc import Collection
from pathlib import Path


def put_the_fault_in() -> None:
    """Whatever has changed, nothing is handed to the engine, so activation only relabels."""
    from stitch_sglang.engine import SGLangEngine

    prepare = SGLangEngine.prepare

    async def prepare_nothing(engine: SGLangEngine, checkpoint: Path, changed: Collection[str]) -> None:
        await prepare(engine, checkpoint, ())

    SGLangEngine.prepare = prepare_nothing  # type: ignore[method-assign]


if __name__ == "__main__":
    put_the_fault_in()
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
