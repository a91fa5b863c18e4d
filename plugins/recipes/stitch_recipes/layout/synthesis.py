"""Checkpoints of a model, from nothing: each tensor of every version, and a directory of the first one."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from stitch_core import safetensors
from stitch_core.dialects import INDEX_NAME
from stitch_core.ports import Files, write_atomic

from ..schema import Checkpoint
from .config import config_json, hf_quant_config
from .formats import group_of, parts, scope
from .geometry import Geometry
from .masters import initial, trained
from .quantize import quantize
from .rounding import F32, from_bf16, to_bf16
from .spec import Tensor
from .synthetic import Bytes, Density, changed
from .tensors import tensors

SHARD_BYTES = 4 << 30

_GATE = (".gate_proj.weight", ".w1.weight")


@dataclass(frozen=True)
class Training:
    """Versions as training makes them: steps at this learning rate, quantized anew each time."""

    rate: float = 1e-6


@dataclass(frozen=True)
class Synthetic:
    """Versions that differ by random elements of these densities (synthetic.py)."""

    density: Density


@dataclass(frozen=True)
class Stored:
    """A tensor of the checkpoint, and its bytes in versions 0, 1, 2, ...: one array where nothing changes."""

    tensor: Tensor
    versions: Sequence[Bytes]

    def at(self, version: int) -> Bytes:
        """Its bytes in a version."""
        return self.versions[min(version, len(self.versions) - 1)]


def stored(
    geometry: Geometry,
    checkpoint: Checkpoint,
    *,
    seed: int = 0,
    steps: int = 0,
    change: Training | Synthetic = Training(),
) -> Iterator[Stored]:
    """Every tensor with versions 0 to ``steps``, in the layout's order; memory is that of two weights.

    What the checkpoint calls immutable stays as it is. Raises LayoutError.
    """
    inside = scope(checkpoint)
    for masters in _pairs(tensors(geometry), checkpoint):
        moves = steps if not masters[0].name.startswith(tuple(checkpoint.immutable)) else 0
        if isinstance(change, Training):
            yield from _trained(masters, checkpoint, inside(masters[0]), seed, moves, change.rate)
        else:
            quantized = inside(masters[0])
            for one in _encoded(masters, checkpoint, quantized, [initial(m, seed) for m in masters]):
                flat = [one[1]]
                for step in range(moves):
                    flat.append(
                        changed(flat[-1], one[0], quantized, change.density, synthetic_seed(seed, step + 1))
                    )
                yield Stored(one[0], flat)


def synthetic_seed(seed: int, version: int) -> int:
    """The seed of what changes from the version before; see synthetic.perturbed."""
    return seed * 65536 + version


def write_checkpoint(
    directory: Path,
    files: Files,
    geometry: Geometry,
    checkpoint: Checkpoint,
    content: Iterable[tuple[Tensor, Bytes]],
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Make a Hugging Face directory: shards of about ``shard_bytes``, index, config.json.

    It is there whole or not at all, and replaces no other. Memory is that of one shard. Raises OSError,
    CheckpointError.
    """
    building = directory.with_name(f".{directory.name}.building")
    files.remove_tree(building)
    files.make_dirs(building)
    shards: list[list[str]] = []
    total = 0
    for held in _shards(content, shard_bytes):
        safetensors.write_file(building / f"part-{len(shards)}", files, held, {"format": "pt"})
        shards.append(list(held))
        total += sum(len(tensor.data) for tensor in held.values())
    weight_map: dict[str, str] = {}
    for index, names in enumerate(shards):
        name = f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors"
        files.rename(building / f"part-{index}", building / name)
        weight_map |= dict.fromkeys(names, name)
    for name, document in (
        ("config.json", config_json(geometry, checkpoint)),
        ("hf_quant_config.json", hf_quant_config(geometry, checkpoint)),
        (INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map}),
    ):
        if document is not None:
            write_atomic(files, building / name, json.dumps(document, indent=2).encode())
    files.sync(building)
    if files.exists(directory):
        raise FileExistsError(f"{directory} is there already: remove it or name another directory")
    files.rename(building, directory)
    files.sync(directory.parent)


def _shards(
    content: Iterable[tuple[Tensor, Bytes]], shard_bytes: int
) -> Iterator[dict[str, safetensors.Tensor]]:
    held: dict[str, safetensors.Tensor] = {}
    size = 0
    for tensor, data in content:
        if held and size + data.size > shard_bytes:
            yield held
            held, size = {}, 0
        held[tensor.name] = safetensors.Tensor(tensor.dtype, tensor.shape, data.data)
        size += data.size
    if held:
        yield held


def _pairs(masters: Iterable[Tensor], checkpoint: Checkpoint) -> Iterator[tuple[Tensor, ...]]:
    """Weights one by one, but gate and up of NVFP4 together: they share their second scale."""
    inside = scope(checkpoint)
    following = iter(masters)
    for master in following:
        if checkpoint.quantization == "nvfp4-modelopt" and master.name.endswith(_GATE) and inside(master):
            yield master, next(following)
        else:
            yield (master,)


def _trained(
    masters: tuple[Tensor, ...], checkpoint: Checkpoint, quantized: bool, seed: int, steps: int, rate: float
) -> Iterator[Stored]:
    runs = zip(*(trained(master, seed, rate) for master in masters), strict=True)
    made = [
        _encoded(masters, checkpoint, quantized, weights) for weights in itertools.islice(runs, steps + 1)
    ]
    for one in zip(*made, strict=True):
        yield Stored(one[0][0], [data for _, data in one])


def _encoded(
    masters: tuple[Tensor, ...], checkpoint: Checkpoint, quantized: bool, weights: Sequence[F32]
) -> list[tuple[Tensor, Bytes]]:
    """What stands for weights in the checkpoint. Quantization starts from BF16, as exports do."""
    if not quantized:
        return [
            (m, _bytes(w if m.dtype == "F32" else to_bf16(w))) for m, w in zip(masters, weights, strict=True)
        ]
    exported = [from_bf16(to_bf16(weight)) for weight in weights]
    largest = max(float(np.abs(weight).max()) for weight in exported)
    result = []
    for master, weight in zip(masters, exported, strict=True):
        made = quantize(weight, checkpoint.quantization, group_of(checkpoint), largest)
        module = master.name.removesuffix(".weight")
        for part in parts(master, checkpoint):
            result.append((part, _bytes(made[part.name.removeprefix(module)])))
    return result


def _bytes(array: npt.NDArray[np.generic]) -> Bytes:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
