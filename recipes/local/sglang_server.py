"""Starting stock SGLang from a clone: its own Python, the plugin as an installed Stitch has it, no GPU.

Only this clone's code needs what stands here: where Stitch is installed, `sglang serve` finds the plugin.
"""

from __future__ import annotations

import os
import socket
import tomllib
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
CPU_STAND_INS = ROOT / "tests" / "real" / "sglang_cpu"

CPU_ARGUMENTS = (
    "--device", "cpu", "--attention-backend", "torch_native", "--mem-fraction-static", "0.3",
    "--random-seed", "1", "--host", "127.0.0.1", "--sleep-on-idle",
)  # fmt: skip


def environment(scratch: Path, settings: Mapping[str, str]) -> dict[str, str]:
    """Of a server's process: this clone's code, the CPU stand-ins, no network, and ``settings``."""
    paths = (
        CPU_STAND_INS, distribution(scratch / "distribution"), ROOT, ROOT / "plugins" / "sglang",
        ROOT / "plugins" / "embedded",
    )  # fmt: skip
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("STITCH_", "SGLANG_", "PYTEST_"))}
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "SGLANG_USE_CPU_ENGINE": "1",
        **settings,
    }


def distribution(directory: Path) -> Path:
    """The metadata that an installed Stitch has, so that SGLang finds the plugin as it is declared."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    info = directory / f"stitch_rl-{project['version']}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    groups = [
        f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in entries.items())
        for group, entries in project["entry-points"].items()
    ]
    metadata = f"Metadata-Version: 2.1\nName: stitch-rl\nVersion: {project['version']}\n"
    (info / "METADATA").write_text(metadata, encoding="utf-8")
    (info / "entry_points.txt").write_text("\n".join(groups), encoding="utf-8")
    return directory


def free_port() -> int:
    """A port of the loopback interface that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
