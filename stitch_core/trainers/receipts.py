"""What lies in a version's directory on several hosts: who uploads which file, and what each file holds.

Ranks on one host see the same files; hosts may share a file system or not. Every file is uploaded once.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from ..delta.sparse_file import SparseFile
from ..delta.wire import DeltaError
from ..dialects import CHECKSUM_HEX, INDEX_NAME, SPARSE_SUFFIX, Index, read_index
from ..manifest import PayloadFile
from ..ports import Files
from ..safetensors import read_header
from ..state import TensorInfo, TensorTable, state_digest
from ..stores.transfer import file_digest

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Listing:
    """What one rank sees of a version's directory: names and sizes. Ranks with one ``host`` see one disk."""

    host: str
    sizes: Mapping[str, int]


@dataclass(frozen=True)
class Frame:
    """One tensor's delta in a shard: the frame's own digest, and the checksum of the new bytes.

    In a sparse file the digest is the file's, which also tells the ``old`` xxh3-128.
    """

    digest: str
    checksum: str | None
    old: str | None = None


@dataclass(frozen=True)
class Receipt:
    """A file that was uploaded. ``index`` is read from the index file, ``frames`` from a shard's header."""

    file: PayloadFile
    index: Index | None
    frames: Mapping[str, Frame]


def list_version(directory: Path, files: Files) -> Listing:
    """This rank's view of ``directory``, which need not be there, without hidden and half-written files."""
    if not files.exists(directory):
        return Listing("", {})
    names = [n for n in files.list(directory) if not n.startswith(".") and not n.endswith(".tmp")]
    return Listing(host_of(directory), {name: files.size(directory / name) for name in names})


def host_of(directory: Path) -> str:
    """Names the host that ``directory`` is on: ranks with one name see one disk there."""
    status = os.stat(directory)
    boot = BOOT_ID.read_text().strip() if BOOT_ID.exists() else ""
    # Containers of one machine may mount different disks under one path: the inode tells them apart.
    return f"{socket.gethostname()} {boot} {status.st_dev}:{status.st_ino}"


def assign(listings: Sequence[Listing]) -> dict[str, int]:
    """The rank that uploads each file: the first rank of a host that has it, hosts taking turns.

    Raises DeltaError when two hosts have files of one name and different sizes.
    """
    leaders: dict[str, int] = {}
    for rank, listing in enumerate(listings):
        leaders.setdefault(listing.host, rank)
    holders: dict[str, list[int]] = {}
    for rank in leaders.values():
        for name, size in listings[rank].sizes.items():
            held = holders.setdefault(name, [])
            if held and listings[held[0]].sizes[name] != size:
                raise DeltaError(
                    f"{name} has {listings[held[0]].sizes[name]} bytes where rank {held[0]} runs, "
                    f"{size} where rank {rank} runs"
                )
            held.append(rank)
    return {name: ranks[turn % len(ranks)] for turn, (name, ranks) in enumerate(sorted(holders.items()))}


def describe(path: Path, files: Files) -> Receipt:
    """A receipt for a file on this host. Raises CheckpointError for a file that is wrong in itself."""
    size = files.size(path)
    file = PayloadFile(path.name, size, file_digest(files, path, size))
    if path.name == INDEX_NAME:
        return Receipt(file, read_index(files.read(path), str(path)), {})
    if path.name.endswith(SPARSE_SUFFIX):
        rows = SparseFile(path, files).tensors
        return Receipt(file, None, {n: Frame(file.sha256, row.new, row.old) for n, row in rows.items()})
    if not path.name.endswith(".safetensors"):
        return Receipt(file, None, {})
    header = read_header(path, files)
    frames = {
        name: Frame(
            xxhash.xxh3_128_hexdigest(files.read(path, ref.offset, ref.nbytes)), header.metadata.get(name)
        )
        for name, ref in header.tensors.items()
    }
    return Receipt(file, None, frames)


@dataclass(frozen=True)
class Verdict:
    """What a delta directory does to a base: ``table`` and ``state`` result."""

    encoding: str
    changed: Mapping[str, tuple[str, str]]
    table: TensorTable
    state: str


def judge(
    receipts: Sequence[Receipt],
    base: TensorTable,
    where: str,
    proven: Mapping[str, tuple[str, str]] | None = None,
) -> Verdict:
    """Check the receipts of a delta directory against its index and against the base that it was made from.

    ``proven`` are the old and new xxh3-128 of its tensors where it was applied to a proven base: then no
    dialect has to tell them. Raises DeltaError, which names the tensor or file.
    """
    shards = {
        r.file.name: r.frames for r in receipts if r.file.name.endswith((".safetensors", SPARSE_SUFFIX))
    }
    indexes = [r.index for r in receipts if r.index is not None]
    if not indexes:
        raise DeltaError(f"{where}: no rank has {INDEX_NAME}: the framework did not finish writing it")
    index = indexes[0]
    if index.kind != "delta":
        raise DeltaError(f"{where}: a full checkpoint, not a delta")
    if index.encoding not in ("xor", "overwrite", "sparse") or index.compression != "zstd":
        raise DeltaError(
            f"{where}: {index.encoding} with {index.compression}; set --update-weight-delta-encoding xor"
        )
    if index.checksum != "xxh3-128" and proven is None:
        raise DeltaError(
            f"{where}: checksums are {index.checksum}, which do not name the weights: set "
            "--update-weight-delta-checksum xxh3-128, or stitch_prove: true, which applies each delta here"
        )
    for shard in sorted({n for n in shards if n.endswith(SPARSE_SUFFIX)} ^ set(index.sparse_files)):
        word = "not named by the index" if shard in shards else f"named by {INDEX_NAME}, and no rank has it"
        raise DeltaError(f"{where}/{shard}: {word}")
    for name, shard in index.weight_map.items():
        if name not in shards.get(shard, {}):
            raise DeltaError(f"{where}: tensor {name} is named in {shard}, and no rank has it there")
    table = dict(base)
    changed: dict[str, tuple[str, str]] = {}
    seen: dict[str, tuple[str, Frame]] = {}
    for shard, frames in sorted(shards.items()):
        for name, frame in frames.items():
            if name not in base:
                raise DeltaError(f"{where}/{shard}: tensor {name} is extra, version 0 has none of that name")
            checksum = (frame.checksum or "") if proven is None else proven[name][1]
            if len(checksum) != CHECKSUM_HEX["xxh3-128"]:
                raise DeltaError(f"{where}/{shard}: tensor {name} has checksum {checksum!r}")
            if frame.old not in (None, base[name].digest):
                raise DeltaError(
                    f"{where}/{shard}: tensor {name} must be {frame.old} before it, "
                    f"but is {base[name].digest}"
                )
            # Pipeline stages each write a tensor that they share: equal, or the stages have drifted apart.
            other, first = seen.setdefault(name, (shard, frame))
            if first != frame:
                raise DeltaError(f"{where}/{shard}: tensor {name} is also in {other}, with another payload")
            changed[name] = base[name].digest, checksum
            table[name] = TensorInfo(base[name].dtype, base[name].shape, checksum)
    return Verdict(index.encoding, changed, table, state_digest(table))
