"""A small run on disk: a boot checkpoint and versions of it, as deltas and fulls, with their manifests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ..delta import DeltaEncoder, overwrite, write_delta
from ..lineage import Source
from ..manifest import Manifest, PayloadFile, Representation, bytes_digest, extend_history
from ..ports import Files
from ..safetensors import Tensor
from ..state import changed_tensors, state_digest
from .checkpoints import ODD, random_tensors, step, table_of, write_checkpoint


class RunBuilder:
    """Makes versions below ``root``; the same seed makes the same run.

    ``versions`` are the manifests by number, ``tensors`` their weights; ``boot`` is the boot checkpoint.
    """

    def __init__(
        self,
        root: Path,
        files: Files,
        *,
        run: str = "run",
        seed: int = 0,
        layout: Mapping[str, tuple[str, tuple[int, ...]]] = ODD,
        shards: int = 2,
    ) -> None:
        self.root = root
        self.files = files
        self.run = run
        self.boot = root / "boot"
        self._rng = np.random.default_rng(seed)
        self.tensors = [random_tensors(self._rng, layout)]
        write_checkpoint(self.boot, files, self.tensors[0], shards)
        self._encoder = DeltaEncoder(self.tensors[0])
        state = state_digest(table_of(self.tensors[0]))
        self.versions = [Manifest(run, 0, 1, state, Representation("boot", source="boot"))]

    def delta(
        self, tensors: Mapping[str, Tensor] | None = None, *, density: float = 0.2, encoding: str = "xor"
    ) -> Manifest:
        """The next version as a delta; without ``tensors``, as ``testing.checkpoints.step`` makes it."""
        new = dict(step(self._rng, self.tensors[-1], density) if tensors is None else tensors)
        number = len(self.versions)
        directory = self._directory(number)
        if encoding == "xor":
            encoded = self._encoder.encode(new, directory, self.files, number=number, base_number=number - 1)
            self._encoder.commit()
            changed, names = dict(encoded.changed), list(encoded.files)
        elif encoding == "sparse":
            encoder = DeltaEncoder(self.tensors[-1], "sparse")
            names = list(
                encoder.encode(new, directory, self.files, number=number, base_number=number - 1).files
            )
            encoder.commit()
            changed = {}
            self._encoder = DeltaEncoder(new)
        else:
            changed, names = self._overwrite(new, directory, number)
        base = self.versions[-1].state
        files = self._payload(directory, names)
        return self._add(new, Representation("delta", files, base, encoding, changed))

    def full(self, tensors: Mapping[str, Tensor] | None = None, *, shards: int = 1) -> Manifest:
        """The next version as a full checkpoint; without ``tensors``, of the same weights as the last."""
        new = dict(self.tensors[-1] if tensors is None else tensors)
        directory = self._directory(len(self.versions))
        write_checkpoint(directory, self.files, new, shards)
        self._encoder = DeltaEncoder(new)
        names = [name for name in self.files.list(directory) if name != "config.json"]
        return self._add(new, Representation("full", self._payload(directory, names)))

    def directory_of(self, manifest: Source) -> Path:
        """Where a version's files lie."""
        return self._directory(manifest.version.number)

    def _directory(self, number: int) -> Path:
        return self.root / "versions" / f"{number:06d}"

    def _overwrite(
        self, new: Mapping[str, Tensor], directory: Path, number: int
    ) -> tuple[dict[str, tuple[str, str]], list[str]]:
        old_table, new_table = table_of(self.tensors[-1]), table_of(new)
        changed = {
            n: (old_table[n].digest, new_table[n].digest) for n in changed_tensors(old_table, new_table)
        }
        payloads = {
            n: (overwrite.encode(self.tensors[-1][n].data, new[n].data), changed[n][1]) for n in changed
        }
        names = write_delta(
            directory, self.files, payloads, number=number, base_number=number - 1, encoding="overwrite"
        )
        self._encoder = DeltaEncoder(new)
        return changed, names

    def _payload(self, directory: Path, names: list[str]) -> tuple[PayloadFile, ...]:
        contents = {name: self.files.read(directory / name) for name in names}
        return tuple(PayloadFile(name, len(data), bytes_digest(data)) for name, data in contents.items())

    def _add(self, tensors: dict[str, Tensor], representation: Representation) -> Manifest:
        parent, boot = self.versions[-1], self.versions[0]
        floor = None if representation.kind != "delta" else (parent.floor or parent.row())
        state = state_digest(table_of(tensors))
        manifest = Manifest(
            self.run, parent.number + 1, 1, state, representation, extend_history(parent), boot.row(), floor
        )
        self.tensors.append(tensors)
        self.versions.append(manifest)
        return manifest
