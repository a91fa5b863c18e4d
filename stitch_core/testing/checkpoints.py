"""Small checkpoints for tests: random tensors of many kinds, and the version that a step makes of them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ..dialects import INDEX_NAME
from ..ports import Files, write_atomic
from ..safetensors import ByteArray, Tensor, as_bytes, tensor_nbytes, write_file
from ..state import TensorInfo, tensor_digest

CONFIG = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}

ODD: dict[str, tuple[str, tuple[int, ...]]] = {
    "model.embed_tokens.weight": ("BF16", (64, 16)),
    "model.layers.0.mlp.down_proj.weight": ("F8_E4M3", (24, 16)),
    "model.layers.0.mlp.down_proj.weight_scale_inv": ("F32", (3, 2)),
    "model.layers.0.mlp.packed/int4": ("U8", (33,)),
    "model.norm.weight": ("F32", (16,)),
    "scale": ("F32", ()),
    "empty": ("BF16", (0, 4)),
    "schicht.gewichtsübergang/权重": ("BF16", (5,)),
}
"""A layout with every oddity that the format allows: 0-dim, empty, names with slashes and other alphabets."""


def random_tensors(
    rng: np.random.Generator, layout: Mapping[str, tuple[str, tuple[int, ...]]] = ODD
) -> dict[str, Tensor]:
    """Small numbers for BF16 and F32, random bytes for the rest; ``layout``: names to (dtype, shape)."""
    return {
        name: Tensor(dtype, shape, _random_bytes(rng, dtype, shape))
        for name, (dtype, shape) in layout.items()
    }


def step(rng: np.random.Generator, tensors: Mapping[str, Tensor], density: float = 0.01) -> dict[str, Tensor]:
    """The next version: each element moves by one unit in the last place with chance ``density``.

    At least one element of all moves, if there is any.
    """
    result = {name: Tensor(t.dtype, t.shape, _moved(rng, t, density)) for name, t in tensors.items()}
    if all(result[name].data == tensors[name].data for name in tensors):
        name = next((n for n, t in tensors.items() if len(t.data)), None)
        if name is not None:
            data = bytearray(tensors[name].data)
            data[0] ^= 1
            result[name] = tensors[name]._replace(data=bytes(data))
    return result


def write_checkpoint(
    directory: Path,
    files: Files,
    tensors: Mapping[str, Tensor],
    shards: int = 1,
    index: bool = True,
) -> None:
    """Write an HF checkpoint directory with ``config.json``; shards are named from 00001, as HF does."""
    files.make_dirs(directory)
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for i in range(shards):
        part = names[i::shards]
        file = (
            f"model-{i + 1:05d}-of-{shards:05d}.safetensors" if index or shards > 1 else "model.safetensors"
        )
        write_file(directory / file, files, {name: tensors[name] for name in part}, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    write_atomic(files, directory / "config.json", json.dumps(CONFIG).encode())
    if index:
        total = sum(len(t.data) for t in tensors.values())
        document = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_atomic(files, directory / INDEX_NAME, json.dumps(document, indent=2).encode())


def table_of(tensors: Mapping[str, Tensor]) -> dict[str, TensorInfo]:
    """The tensor table of tensors in memory."""
    return {name: TensorInfo(t.dtype, t.shape, tensor_digest(t.data)) for name, t in tensors.items()}


def _random_bytes(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> bytes:
    count = math.prod(shape)
    if dtype in ("BF16", "F32"):
        values = (rng.standard_normal(count) * 0.02).astype("<f4")
        return values.tobytes() if dtype == "F32" else (values.view("<u4") >> 16).astype("<u2").tobytes()
    return rng.bytes(tensor_nbytes(dtype, shape))


def _moved(rng: np.random.Generator, tensor: Tensor, density: float) -> bytes:
    width = {"BF16": 2, "F16": 2, "F32": 4}.get(tensor.dtype, 1)
    data: ByteArray = as_bytes(tensor.data).copy()
    words = data.view(f"<u{width}")
    chosen = rng.random(words.size) < density
    if width == 1:
        words[chosen] ^= 1
    else:
        # One unit below zero of either sign is no number near it, but a NaN.
        zero = words & words.dtype.type((1 << (8 * width - 1)) - 1) == 0
        up = (rng.random(words.size) < 0.5) | zero
        words[chosen] = np.where(up, words + 1, words - 1)[chosen]
    return data.tobytes()
