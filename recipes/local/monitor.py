"""Watches the replicas by what they say of themselves: their versions, and what each activation took."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from .fleet import Fleet

INTERVAL = 1.0


@dataclass
class ReplicaView:
    """What is known of one replica; ``updates`` by version number, each as ``/server_info`` gives it."""

    name: str
    kv_mode: str
    state: str = "starting"
    applied: int | None = None
    active: int = 0
    seen: float = field(default_factory=time.monotonic)
    updates: dict[int, dict[str, Any]] = field(default_factory=dict)


class Monitor:
    """Remembers every replica there was, gone ones too."""

    def __init__(self, fleet: Fleet) -> None:
        self.replicas: dict[str, ReplicaView] = {}
        self._fleet = fleet

    async def run(self) -> None:
        """Until cancelled."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as session:
            while True:
                await self._look(session)
                await asyncio.sleep(INTERVAL)

    def updates(self) -> list[dict[str, Any]]:
        """Every activation that was seen, with ``replica`` and ``kv_mode``, in the order of their times."""
        rows = [
            {"replica": view.name, "kv_mode": view.kv_mode, "number": number, **update}
            for view in self.replicas.values()
            for number, update in view.updates.items()
        ]
        return sorted(rows, key=lambda row: float(row["time"]))

    async def _look(self, session: aiohttp.ClientSession) -> None:
        children = dict(self._fleet.replicas)
        for name, view in self.replicas.items():
            if name not in children:
                view.state, view.active = "gone", 0
        for name, child in children.items():
            view = self.replicas.setdefault(name, ReplicaView(name, str(child.kv_mode)))
            try:
                async with session.get(f"{child.url}/server_info") as response:
                    self._take(view, (await response.json())["stitch"])
            except (aiohttp.ClientError, TimeoutError, ValueError, KeyError):
                view.state = "silent"
            if child.ending:
                view.state = "draining"

    def _take(self, view: ReplicaView, status: dict[str, Any]) -> None:
        view.state = status["state"] if status["activity"] == "idle" else status["activity"]
        view.applied, view.active, view.seen = status["applied"], status["active_requests"], time.monotonic()
        for update in status["updates"]:
            view.updates[int(update["version"].rpartition("_v")[2])] = update
