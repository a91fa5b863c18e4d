"""A simulated world: a store, machines, and what every part of it needs to run the real code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np

from ..ports import Files
from ..safetensors import Tensor
from ..state import state_digest
from ..stores.bounded import BoundedStore
from .checkpoints import random_tensors, step, table_of, write_checkpoint
from .faults import FaultPlan, Faults
from .loop import SimulatedLoop
from .process import SimulatedClock, SimulatedProcess
from .sim_boot import BootDirectory
from .sim_engine import SimulatedEngine
from .sim_files import SimulatedMachine
from .sim_judge import Judge
from .sim_store import SimulatedBucket

BOOT = Path("/models/boot")
OTHER = Path("/models/other")
DISK = Path("/var/stitch")
RAM = Path("/dev/shm/stitch")
PAGE = 16

LAYOUT: Mapping[str, tuple[str, tuple[int, ...]]] = {
    "embed": ("BF16", (8, 3)),
    "layer.0": ("BF16", (5, 2)),
    "layer.1": ("F32", (7,)),
    "scale": ("F32", ()),
}

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Timing:
    """Seconds. What the simulated parts do, not what goes wrong."""

    train: float = 15.0
    token: float = 0.5
    poll: float = 5.0
    store_timeout: float = 60.0
    pin_drain: float = 30.0
    switch_drain: float = 60.0
    restart: float = 10.0
    boot: float = 2.0
    engine_timeout: float = 30.0


class World:
    """One bucket, one judge, any number of machines, all of one seed."""

    def __init__(self, loop: SimulatedLoop, plan: FaultPlan, timing: Timing | None = None) -> None:
        self.loop = loop
        self.random: Random = loop.random
        self.timing = timing or Timing()
        self.faults = Faults(plan, loop.random, loop.time)
        self.trace = self.faults.trace
        self.bucket = SimulatedBucket(loop, self.faults)
        self._numpy = np.random.default_rng(self.random.getrandbits(64))
        self.boot = random_tensors(self._numpy, LAYOUT)
        self.other = random_tensors(self._numpy, LAYOUT)
        self.weights: dict[str, Weights] = {}
        self.judge = Judge(self.bucket, self.know(self.boot))
        self._engines: list[SimulatedEngine] = []
        self._nonces = 0
        self.bucket.on_call = self._works

    # ---------------------------------------------------------------------------------------- weights

    def know(self, weights: Weights) -> str:
        """Remember what some trainer has; its state digest."""
        state = state_digest(table_of(weights))
        self.weights[state] = weights
        if hasattr(self, "judge"):
            self.judge.states.add(state)
        return state

    def trained(self, weights: Weights, names: list[str] | None = None) -> Weights:
        """The weights after one more step of training; only ``names`` change, if given."""
        some = {name: weights[name] for name in names or weights}
        after = {**weights, **step(self._numpy, some, density=self.random.choice((0.02, 0.3)))}
        self.know(after)
        return after

    # ---------------------------------------------------------------------------------------- machines

    def machine(self, name: str) -> SimulatedMachine:
        """A new machine with the boot checkpoint on its disk, and another one."""
        machine = SimulatedMachine(name, self.faults, volatile=[RAM], page=PAGE)
        machine.on_change = self._works
        armed, self.faults.armed = self.faults.armed, False
        files: Files = machine.files(SimulatedProcess(self.loop, f"{name} setup"))
        write_checkpoint(BOOT, files, self.boot, shards=2)
        write_checkpoint(OTHER, files, self.other, shards=2)
        files.make_dirs(RAM.parent)
        files.make_dirs(DISK.parent)
        machine.settle()
        self.faults.armed = armed
        return machine

    def boot_directory(self, machine: SimulatedMachine) -> BootDirectory:
        """The boot checkpoint there."""
        return BootDirectory(machine, self.loop, BOOT, OTHER)

    def clock(self, behind: float = 0.0) -> SimulatedClock:
        """The clocks of one machine; ``behind``: seconds by which its wall clock is late, faults aside."""
        return SimulatedClock(self.loop, self.faults.plan.clock_skew * self.random.uniform(-1, 1) - behind)

    def store(self, process: SimulatedProcess) -> BoundedStore:
        """The store as the real parts use it."""
        return BoundedStore(self.bucket.store(process), self.timing.store_timeout)

    def nonce(self) -> str:
        """Text that nobody else has."""
        self._nonces += 1
        return f"{self._nonces:04d}{self.random.getrandbits(64):016x}"

    def watch(self, engine: SimulatedEngine) -> None:
        """Check what is done to an engine."""

        def resumed() -> None:
            versions = {str(version): manifest.state for version, manifest in self.judge.versions.items()}
            right = versions.get(engine.label) if engine.activated else engine.boot_state
            if engine.state != right and not engine.lies:
                self.judge.broken("truth: an engine that goes on is whole", str(engine))

        self._engines.append(engine)
        engine.on_call, engine.on_resume = self._works, resumed

    def _works(self, process: SimulatedProcess, what: str, where: object) -> None:
        """``process`` calls the store, changes a file, prepares: not while it has its engine paused."""
        for engine in self._engines:
            if engine.pauser is process:
                self.judge.broken("short pause: nothing but the copy", f"{process.name}: {what} {where}")
