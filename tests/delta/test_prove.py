"""C33: a delta that says nothing of the whole is applied only to the base that it proves to fit."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import numpy as np
import pytest

from stitch_core.checkpoint import Checkpoint
from stitch_core.delta import DeltaDirectory, DeltaEncoder, DeltaError, overwrite, write_delta, xor
from stitch_core.delta.prove import prove_delta
from stitch_core.dialects import INDEX_NAME
from stitch_core.files import PosixFiles
from stitch_core.safetensors import Tensor, read_header, write_file
from stitch_core.state import state_digest
from stitch_core.testing.checkpoints import ODD, random_tensors, step, table_of, write_checkpoint

FILES = PosixFiles()


class Step:
    """A base on disk, the version after it, and the delta between them."""

    def __init__(self, root: Path, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.root = root
        self.old = random_tensors(rng, ODD)
        self.new = step(rng, self.old, 0.2)
        write_checkpoint(root / "base", FILES, self.old)
        self.base = Checkpoint.open(root / "base", FILES)
        self.delta = root / "delta"

    def write(self, encoding: str = "xor") -> None:
        if encoding == "xor":
            DeltaEncoder(self.old).encode(self.new, self.delta, FILES, number=1, base_number=0)
            return
        table = table_of(self.new)
        payloads = {
            n: (overwrite.encode(self.old[n].data, t.data), table[n].digest) for n, t in self.new.items()
        }
        write_delta(self.delta, FILES, payloads, number=1, base_number=0, encoding=encoding)

    def rewrite(self, checksum: str | None, checksums: dict[str, str]) -> None:
        """Say another checksum format in the index, and ``checksums`` in the shard."""
        shard = next(self.delta.glob("*.safetensors"))
        header = read_header(shard, FILES)
        frames = {
            name: Tensor("U8", ref.shape, FILES.read(ref.file, ref.offset, ref.nbytes))
            for name, ref in header.tensors.items()
        }
        write_file(shard, FILES, frames, {**header.metadata, **checksums})
        index = json.loads((self.delta / INDEX_NAME).read_text())
        index["metadata"]["checksum_format"] = checksum
        if checksum is None:
            del index["metadata"]["checksum_format"]
            write_file(shard, FILES, frames, checksums)
        (self.delta / INDEX_NAME).write_text(json.dumps(index))

    def prove(self, base: Checkpoint | None = None) -> tuple[dict[str, tuple[str, str]], str]:
        base = base or self.base
        return prove_delta(DeltaDirectory.open(self.delta, FILES), base, base.table())


@pytest.fixture
def one(tmp_path: Path) -> Step:
    return Step(tmp_path)


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_what_a_delta_does(one: Step, encoding: str) -> None:
    one.write(encoding)
    changed, state = one.prove()
    old, new = table_of(one.old), table_of(one.new)
    assert state == state_digest(new)
    really = {name for name in new if new[name].digest != old[name].digest}
    assert really <= changed.keys()
    assert all(pair == (old[name].digest, new[name].digest) for name, pair in changed.items())


def test_adler32(one: Step) -> None:
    one.write()
    one.rewrite("adler32", {name: f"{zlib.adler32(t.data):08x}" for name, t in one.new.items()})
    assert one.prove()[1] == state_digest(table_of(one.new))
    one.rewrite("adler32", dict.fromkeys(one.new, "00000001"))
    with pytest.raises(
        DeltaError, match=r"tensor .* becomes [0-9a-f]{8} on this base, its checksum promises 00000001"
    ):
        one.prove()


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_c33_a_delta_of_another_base(one: Step, tmp_path: Path, encoding: str) -> None:
    """Every tensor that it names exists, with the same layout; and still it does not fit."""
    one.write(encoding)
    other = Step(tmp_path / "other", seed=1)
    with pytest.raises(DeltaError, match=r"becomes .* on this base, its checksum promises"):
        one.prove(other.base)


def test_c33_without_checksums_nothing_shows_that_it_fits(one: Step) -> None:
    one.write()
    one.rewrite(None, {})
    with pytest.raises(DeltaError, match="has no checksum, so nothing shows that it fits this base"):
        one.prove()


def test_a_checksum_that_cannot_be_checked(one: Step) -> None:
    one.write()
    one.rewrite("blake3", dict.fromkeys(one.new, "0" * 64))
    with pytest.raises(DeltaError, match="has a blake3 checksum, which cannot be checked here: publish with"):
        one.prove()


def test_a_tensor_that_the_base_does_not_have(one: Step) -> None:
    data = bytes(4)
    payload = {"z": (xor.encode(data, b"1234"), "0" * 32)}
    write_delta(one.delta, FILES, payload, number=1, base_number=0)
    with pytest.raises(DeltaError, match="tensor z is extra, the base has none of that name"):
        one.prove()


def test_a_payload_of_another_size(one: Step) -> None:
    payload = {"scale": (xor.encode(bytes(8), bytes(8)), "0" * 32)}
    write_delta(one.delta, FILES, payload, number=1, base_number=0)
    with pytest.raises(
        DeltaError, match="delta: tensor scale: zstd frame holds more bytes than the tensor has"
    ):
        one.prove()


def test_c01_an_index_that_names_nothing_over_a_payload(one: Step) -> None:
    """What shards hold that the version has by a record counts, whatever the index says of it."""
    one.write()
    index = json.loads((one.delta / INDEX_NAME).read_text())
    index["weight_map"] = {}
    (one.delta / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(DeltaError, match=r"model-00000-of-00001\.safetensors"):
        one.prove()
    delta = DeltaDirectory.open(one.delta, FILES, FILES.list(one.delta))
    changed, state = prove_delta(delta, one.base, one.base.table())
    assert changed
    assert state == state_digest(table_of(one.new))
