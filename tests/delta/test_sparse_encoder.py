"""The encoder and delta directories in the encoding ``sparse``: what it writes and counts, and its undo."""

import errno
import json
from pathlib import Path

import numpy as np
import pytest

from stitch_core.checkpoint import Checkpoint, CheckpointError
from stitch_core.delta import DeltaDirectory, DeltaEncoder, DeltaError
from stitch_core.delta.one_pass import apply_in_place
from stitch_core.delta.prove import prove_delta
from stitch_core.dialects import INDEX_NAME
from stitch_core.files import PosixFiles
from stitch_core.host_checkpoint import HostCheckpoint
from stitch_core.lineage import Plan, Undo
from stitch_core.manifest import FormatError, Manifest
from stitch_core.policy_publisher import PolicyPublisher
from stitch_core.safetensors import Tensor
from stitch_core.state import state_digest
from stitch_core.testing.checkpoints import random_tensors, step, table_of, write_checkpoint
from stitch_core.testing.runs import RunBuilder

from .test_encoder import held, plain

FILES = PosixFiles()


def test_what_is_encoded_is_a_directory_that_applies_both_ways(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    old = random_tensors(rng)
    new = step(rng, old, 0.1)
    encoder = DeltaEncoder(old, "sparse")
    encoded = encoder.encode(new, tmp_path / "v", FILES, number=7, base_number=6)
    stock = DeltaEncoder(old).encode(new, tmp_path / "x", FILES, number=7, base_number=6)
    assert (encoded.base, encoded.state, encoded.changed) == (stock.base, stock.state, stock.changed)
    assert encoded.encoding == "sparse"
    assert (encoded.changed_elements, encoded.elements) == (stock.changed_elements, stock.elements)
    assert (encoded.changed_bytes, encoded.bytes) == (stock.changed_bytes, stock.bytes)
    assert encoded.files == ("model-00000.sparse", INDEX_NAME)
    assert encoded.payload_bytes == (tmp_path / "v" / "model-00000.sparse").stat().st_size
    assert json.loads((tmp_path / "v" / INDEX_NAME).read_text()) == {
        "metadata": {"version": "000007", "base_version": "000006", "delta_encoding": "sparse",
                     "compression_format": "zstd", "checksum_format": "xxh3-128",
                     "sparse_files": ["model-00000.sparse"]},
        "weight_map": {},
    }  # fmt: skip
    delta = DeltaDirectory.open(tmp_path / "v", FILES)
    assert delta.changed == encoded.changed
    assert {name: p.checksum for name, p in delta.payloads.items()} == {
        n: new for n, (_, new) in encoded.changed.items()
    }
    for a, b in ((old, new), (new, old)):
        for name in encoded.changed:
            data = np.frombuffer(bytearray(a[name].data), np.uint8)
            assert apply_in_place(data, name, [delta]) == table_of(b)[name].digest
            assert data.tobytes() == b[name].data


def test_packed_elements_are_counted_one_by_one(tmp_path: Path) -> None:
    scale = Tensor("U8", (2,), bytes(2))
    old = {"a": Tensor("F4", (6,), bytes(3)), "a.scale": scale, "b": Tensor("F4", (2,), bytes(1))}
    new = old | {"a": Tensor("F4", (6,), b"\x11\x10\x00"), "a.scale": scale._replace(data=b"\0\x11")}
    encoded = DeltaEncoder(old, "sparse").encode(new, tmp_path / "v", FILES, number=1, base_number=0)
    assert (encoded.elements, encoded.changed_elements, encoded.changed_bytes) == (10, 4, 3)


def test_a_step_that_changes_nothing_is_an_index_alone(tmp_path: Path) -> None:
    tensors = random_tensors(np.random.default_rng(0))
    encoder = DeltaEncoder(tensors, "sparse")
    encoded = encoder.encode(tensors, tmp_path / "v", FILES, number=1, base_number=0)
    assert (encoded.base, encoded.changed, encoded.payload_bytes) == (encoded.state, {}, 0)
    assert (encoded.files, DeltaDirectory.open(tmp_path / "v", FILES).payloads) == ((INDEX_NAME,), {})


def test_C04_a_failed_write_leaves_the_base(tmp_path: Path) -> None:
    tensors = random_tensors(np.random.default_rng(0))
    encoder = DeltaEncoder(tensors, "sparse")
    (tmp_path / ".v.model.undo").write_text("in the way")
    with pytest.raises(OSError, match="undo"):
        encoder.encode(
            step(np.random.default_rng(1), tensors), tmp_path / "v", FILES, number=1, base_number=0
        )
    assert (held(encoder), encoder.outstanding, encoder.table) == (plain(tensors), 0, table_of(tensors))


@pytest.mark.parametrize("missing", [errno.EPERM, errno.EOPNOTSUPP])
def test_without_hard_links_the_undo_is_a_copy(tmp_path: Path, missing: int) -> None:
    """FAT and most FUSE mounts have none."""

    class NoLinks(PosixFiles):
        def link(self, source: Path, target: Path) -> None:
            raise OSError(missing, "no links", str(source), None, str(target))

    rng = np.random.default_rng(0)
    old = random_tensors(rng)
    encoder = DeltaEncoder(old, "sparse")
    for number in (1, 2):
        new = step(rng, old, 0.1)
        encoder.encode(new, tmp_path / f"v{number}", NoLinks(), number=number, base_number=number - 1)
        FILES.remove_tree(tmp_path / f"v{number}")  # what was published is gone by then
        assert held(encoder) == plain(new)
    encoder.undo()
    assert (held(encoder), encoder.table) == (plain(old), table_of(old))
    assert FILES.list(tmp_path) == []


def test_an_undo_that_cannot_be_kept_for_another_reason_fails_the_encode(tmp_path: Path) -> None:
    class Full(PosixFiles):
        def link(self, source: Path, target: Path) -> None:
            raise OSError(errno.ENOSPC, "no room", str(target))

    old = random_tensors(np.random.default_rng(0))
    encoder = DeltaEncoder(old, "sparse")
    with pytest.raises(OSError, match="no room"):
        encoder.encode(step(np.random.default_rng(1), old), tmp_path / "v", Full(), number=1, base_number=0)
    assert (held(encoder), encoder.outstanding) == (plain(old), 0)


# ------------------------------------------------------------------------------------------ directories


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    old = random_tensors(rng)
    DeltaEncoder(old, "sparse").encode(step(rng, old, 0.1), tmp_path / "v", FILES, number=1, base_number=0)
    return tmp_path / "v"


def edit_index(directory: Path, files: object) -> None:
    value = json.loads((directory / INDEX_NAME).read_text())
    value["metadata"]["sparse_files"] = files
    (directory / INDEX_NAME).write_text(json.dumps(value))


def test_files_that_are_missing_extra_or_twice_are_named(directory: Path) -> None:
    file = directory / "model-00000.sparse"
    (directory / "more.sparse").write_bytes(file.read_bytes())
    with pytest.raises(DeltaError, match=r"more.sparse is not named by"):
        DeltaDirectory.open(directory, FILES)
    edit_index(directory, ["model-00000.sparse", "more.sparse"])
    with pytest.raises(DeltaError, match=r"more.sparse: tensor .* is also in model-00000.sparse"):
        DeltaDirectory.open(directory, FILES)
    (directory / "more.sparse").unlink()
    with pytest.raises(DeltaError, match=r"more.sparse: named by the index"):
        DeltaDirectory.open(directory, FILES)
    for names in ("model-00000.sparse", ["../model-00000.sparse"], [7]):
        edit_index(directory, names)
        with pytest.raises(CheckpointError, match="sparse_files"):
            DeltaDirectory.open(directory, FILES)


def test_a_directory_is_proven_against_a_base(tmp_path: Path, directory: Path) -> None:
    old = random_tensors(np.random.default_rng(0))
    write_checkpoint(tmp_path / "c", FILES, old)
    base = Checkpoint.open(tmp_path / "c", FILES)
    delta = DeltaDirectory.open(directory, FILES)
    changed, _ = prove_delta(delta, base, base.table())
    assert changed == delta.changed
    write_checkpoint(tmp_path / "other", FILES, random_tensors(np.random.default_rng(5)))
    other = Checkpoint.open(tmp_path / "other", FILES)
    with pytest.raises(DeltaError, match="its checksum promises"):
        prove_delta(delta, other, other.table())


# ---------------------------------------------------------------------------------------------- on a host


def test_a_host_applies_plans_of_all_encodings_forwards_and_backwards(tmp_path: Path) -> None:
    run = RunBuilder(tmp_path / "run", FILES)
    for encoding in ("sparse", "sparse", "xor", "sparse", "xor"):
        run.delta(encoding=encoding)
    assert run.versions[1].representation.changed == {}
    host = HostCheckpoint(tmp_path / "host", FILES)
    host.open()
    host.seed(run.boot, run.versions[0])

    def go(target: Manifest, *deltas: Manifest | Undo) -> None:
        base = host.holding.state if host.holding else None

        def directory_of(source: object) -> Path:
            return run.directory_of(source.source if isinstance(source, Undo) else source)  # type: ignore[arg-type]

        host.apply(Plan(target, base, None, deltas), directory_of)
        assert host.table == table_of(run.tensors[target.number])

    v = run.versions
    go(v[3], *v[1:4])
    go(v[1], Undo(v[3]), Undo(v[2]))
    go(v[5], *v[2:6])
    host.close()


def test_manifests_of_sparse_deltas_name_no_tensors(tmp_path: Path) -> None:
    run = RunBuilder(tmp_path, FILES)
    manifest = run.delta(encoding="sparse")
    assert Manifest.decode(manifest.encode()) == manifest
    bad = manifest.encode().replace(b'"changed":{}', b'"changed":{"a":["%s","%s"]}' % (b"0" * 32, b"1" * 32))
    with pytest.raises(FormatError, match="changed is empty where the encoding is sparse"):
        Manifest.decode(bad)


def test_a_trainer_publishes_sparse_deltas_by_choice(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    versions = [random_tensors(rng)]
    write_checkpoint(tmp_path / "boot", FILES, versions[0])
    store = f"file:{tmp_path}/store"
    with PolicyPublisher.start(
        store, "r", tmp_path / "boot", tmp_path / "work", encoding="sparse"
    ) as publisher:
        for number in (1, 2, 3):
            versions.append(step(rng, versions[-1], 0.1))
            published = publisher.publish(versions[-1]).result(30)
            how = published.manifest.representation
            assert (published.number, how.encoding, how.changed) == (number, "sparse", {})
            assert published.delta.changed_elements > 0
            assert published.manifest.state == state_digest(table_of(versions[-1]))
    assert [p.name for p in (tmp_path / "work").iterdir()] == []
    with pytest.raises(DeltaError, match="no encoder for 'zip'"):
        PolicyPublisher.start(store, "r", tmp_path / "boot", tmp_path / "work", encoding="zip")
