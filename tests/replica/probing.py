"""A replica with a probe, and an engine whose weights are not always those of its label."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.replica.following import Following


async def served(root: Path) -> Following:
    """A replica that has served versions 0, 1 and 2 by their weights, and keeps what each answers."""
    following = Following(root, probes=True)
    await following.claim()
    await following.catch_up()
    for _ in range(2):
        await following.publish()
        await following.catch_up()
        await learned(following)
    return following


async def learned(f: Following) -> None:
    """Until the answer of what is served is kept, also in the file."""
    last = f.versions[-1].state
    await f.until(lambda: (one := said(f)["last"] or {}).get("state") == last and one["outcome"] == "kept")
    await f.catch_up()


def restarted(f: Following, *, engine: bool = True) -> None:
    """The replica's process, and with it the engine's."""
    f.host.close()
    f.start()
    if engine:
        f.engine.restart()


def said(f: Following) -> dict[str, Any]:
    status: dict[str, Any] = f.reconciler.status()["probe"]
    return status


def damage(f: Following) -> None:
    """One tensor's last byte, which no label tells."""
    dtype, shape, data = f.engine.tensors["b"]
    f.engine.tensors["b"] = (dtype, shape, data[:-1] + bytes([data[-1] ^ 1]))


def damaging(f: Following) -> None:
    """Every copy from now on leaves other weights than were prepared, and says that it is done."""

    async def hook() -> None:
        damage(f)

    f.engine.after["activate"] = hook


async def kept_file(f: Following) -> dict[str, Any]:
    """As the next pass leaves it."""
    await f.reconciler.reconcile()
    value: dict[str, Any] = json.loads((f.root / "host" / "probe.json").read_bytes())
    return value
