"""What a projection assumes of a host that is not here."""

from __future__ import annotations

from dataclasses import dataclass

from stitch_core.parallel import MOST_WORKERS


@dataclass(frozen=True)
class Assumptions:
    """Of a host that is not this one. Nobody measured these: they are options, and MEANING says of what.

    Bytes a second are GB (1e9). ``cores`` are what the replica's container has; ``pcie`` is for each GPU.
    """

    cores: int = 64
    network: float = 2.5
    memory: float = 200.0
    pcie: float = 50.0
    nvme: float = 6.0
    step: float = 0.05

    @property
    def workers(self) -> int:
        """Threads that apply: as stitch_core.replica.child.spare_workers."""
        return self.shared(2)

    def shared(self, shares: int) -> int:
        """Threads for one of so many equal shares of the cores: as stitch_core.parallel.default_workers."""
        return max(1, min(MOST_WORKERS, self.cores // shares))


MEANING = {
    "cores": "CPU cores of a replica",
    "network": "GB/s from the store to a host (about what Modal says of a Volume)",
    "memory": "GB/s that the host's memory moves for one replica, reads and writes together",
    "pcie": "GB/s from page-locked memory to each GPU (PCIe 5 with 16 lanes, in practice)",
    "nvme": "GB/s that the host's NVMe reads or writes",
    "step": "seconds of the decoding step that a pause waits for",
}
