"""Stock delta directories decoded from docs/format.md alone, and the weights that Megatron really had.

Nothing here is shared with stitch_core: it is what its decoder, and the frameworks' encoders, are checked by.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import torch
import xxhash
import zstandard

from tests.tensor_parallel.policy import from_shards


def read_shard(path: Path) -> tuple[dict[str, bytes], dict[str, str]]:
    """A safetensors file: the bytes of each tensor, and its metadata."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    metadata = header.pop("__metadata__", {})
    data = raw[8 + length :]
    return {name: data[slice(*entry["data_offsets"])] for name, entry in header.items()}, metadata


def read_checkpoint(directory: Path) -> dict[str, bytes]:
    return {n: data for file in directory.glob("*.safetensors") for n, data in read_shard(file)[0].items()}


def decode(directory: Path, base: dict[str, bytes]) -> tuple[str, dict[str, bytes]]:
    """The encoding of a delta directory, and what it makes of ``base``."""
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    said = index["metadata"]
    assert said["version"] == directory.name.removeprefix("weight_v")
    assert (said["compression_format"], said["checksum_format"]) == ("zstd", "xxh3-128")
    result, seen = dict(base), []
    for file in sorted(directory.glob("*.safetensors")):
        frames, checksums = read_shard(file)
        for name, frame in frames.items():
            assert index["weight_map"][name] == file.name
            diff = zstandard.ZstdDecompressor().decompress(frame)
            new = np.frombuffer(bytearray(base[name]), np.uint8)
            if said["delta_encoding"] == "xor":
                new ^= np.frombuffer(diff, np.uint8)
            else:
                count = int.from_bytes(diff[:4], "little")
                positions = np.frombuffer(diff, "<u4", count, 4)
                new[positions] = np.frombuffer(diff, np.uint8, count, 4 + 4 * count)
            assert xxhash.xxh3_128_hexdigest(new.tobytes()) == checksums[name]
            result[name] = new.tobytes()
            seen.append(name)
    assert sorted(seen) == sorted(index["weight_map"])
    return said["delta_encoding"], result


def trained(checkpoints: Path, rollout_id: int) -> dict[str, bytes]:
    """The weights after a rollout's step, from the checkpoint that Megatron saved of each rank."""
    shards = []
    for file in sorted(checkpoints.glob(f"iter_{rollout_id:07d}/mp_rank_*/model_optim_rng.pt")):
        model = torch.load(file, weights_only=False)["model"]
        tensors = {name: value for name, value in model.items() if isinstance(value, torch.Tensor)}
        assert {value.dtype for value in tensors.values()} == {torch.bfloat16}
        shards.append({name: value.view(torch.int16).numpy() for name, value in tensors.items()})
    return {name: value.tobytes() for name, value in from_shards(shards).items()}
