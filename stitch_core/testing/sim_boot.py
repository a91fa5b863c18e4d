"""The boot checkpoint on a simulated machine's disk, which somebody may exchange for another for a while."""

from __future__ import annotations

from pathlib import Path

from .process import Loop, SimulatedProcess
from .sim_files import SimulatedMachine


class BootDirectory:
    """``path`` holds the boot checkpoint; ``other``, beside it, weights of the same layout that no run knows.

    ``exchanges`` counts how often the two have changed places.
    """

    def __init__(self, machine: SimulatedMachine, loop: Loop, path: Path, other: Path) -> None:
        self.path, self.other = path, other
        self.exchanges = 0
        self._machine, self._loop = machine, loop

    @property
    def exchanged(self) -> bool:
        """Whether ``path`` holds the other weights now."""
        return self.exchanges % 2 == 1

    def exchange(self) -> None:
        """By renames, which change no file."""
        faults, aside = self._machine.faults, self.path.with_name("aside")
        files = self._machine.files(SimulatedProcess(self._loop, "somebody"))
        faults.trace.add(f"{self._machine.name}: somebody exchanges the boot checkpoint")
        armed, faults.armed = faults.armed, False
        for source, target in ((self.path, aside), (self.other, self.path), (aside, self.other)):
            files.rename(source, target)
        files.sync(self.path.parent)
        faults.armed = armed
        self.exchanges += 1
