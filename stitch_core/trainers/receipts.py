"""What a version consists of on several hosts: who uploads which file, and what each file holds.

Ranks on one host see the same files; hosts may share a file system or not. Every file is uploaded once. A
file belongs to the version when the index that rank 0 has names it: other files may lie beside, which an
earlier attempt with more ranks, or with its ranks on other hosts, has left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from ..delta.directory import is_weights, stray_problem
from ..delta.sparse_file import SparseFile
from ..delta.wire import DeltaError
from ..dialects import CHECKSUM_HEX, INDEX_NAME, SPARSE_SUFFIX, Index, read_index
from ..manifest import PayloadFile
from ..ports import Files
from ..safetensors import read_header
from ..state import TensorInfo, TensorTable, state_digest
from ..stores.transfer import file_digest
from .hosts import Mark, host_of, mark_of


@dataclass(frozen=True)
class Listing:
    """What one rank sees of a version's directory. Ranks with one ``host`` see one disk.

    ``sizes`` in bytes and ``marks``, by name. ``named``: the files that the index there names, and itself;
    None where there is no index, or it was not read.
    """

    host: str
    sizes: Mapping[str, int]
    marks: Mapping[str, Mark] = field(default_factory=dict)
    named: frozenset[str] | None = None


@dataclass(frozen=True)
class Duty:
    """What one rank does about the files on its host, by their names.

    ``uploads`` are the version's; ``copies`` have the name of one that another host uploads, and are only
    hashed; ``strays`` are weights that the index does not name, which are looked into.
    """

    uploads: tuple[str, ...] = ()
    copies: tuple[str, ...] = ()
    strays: tuple[str, ...] = ()


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


@dataclass(frozen=True)
class Part:
    """What one rank has done of its duty."""

    receipts: tuple[Receipt, ...]
    copies: tuple[PayloadFile, ...] = ()
    strays: tuple[Receipt, ...] = ()


def list_version(
    directory: Path,
    files: Files,
    *,
    index: bool,
    host: Callable[[Path], str] = host_of,
    mark: Callable[[Path], Mark] = mark_of,
) -> Listing:
    """This rank's view of ``directory``, which need not be there, without hidden and half-written files.

    ``index``: read the index as well. Raises CheckpointError for one that cannot be read.
    """
    if not files.exists(directory):
        return Listing("", {})
    names = [n for n in files.list(directory) if not n.startswith(".") and not n.endswith(".tmp")]
    named = None
    if index and INDEX_NAME in names:
        found = read_index(files.read(directory / INDEX_NAME), str(directory / INDEX_NAME))
        named = frozenset({*found.weight_map.values(), *found.sparse_files, INDEX_NAME})
    return Listing(
        host(directory), {name: files.size(directory / name) for name in names},
        {name: mark(directory / name) for name in names}, named,
    )  # fmt: skip


def assign(listings: Sequence[Listing], where: str) -> list[Duty]:
    """Each rank's duty: the first rank of a host does it for that host, hosts taking turns.

    Raises DeltaError where rank 0 has no index, a file that it names is nowhere, or two hosts have one of
    that name in different sizes.
    """
    named = listings[0].named
    if named is None:
        raise DeltaError(f"{where}: rank 0 has no {INDEX_NAME}: the framework did not finish writing it")
    leaders: dict[str, int] = {}
    for rank, listing in enumerate(listings):
        leaders.setdefault(listing.host, rank)
    uploads: list[list[str]] = [[] for _ in listings]
    copies: list[list[str]] = [[] for _ in listings]
    strays: list[list[str]] = [[] for _ in listings]
    for turn, name in enumerate(sorted(named)):
        # Another host's index is another attempt's: it names nothing, wherever it lies.
        held = [0] if name == INDEX_NAME else [r for r in leaders.values() if name in listings[r].sizes]
        _check_sizes(where, name, held, listings)
        shared = len({listings[rank].marks.get(name) for rank in held}) == 1
        first = held[turn % len(held)] if shared else held[0]
        uploads[first].append(name)
        for rank in held if not shared else ():
            if rank != first:
                copies[rank].append(name)
    seen: set[tuple[str, Mark | None]] = set()
    for rank in leaders.values():
        for name in listings[rank].sizes:
            at = name, listings[rank].marks.get(name)
            if is_weights(name) and name not in named and at not in seen:
                seen.add(at)
                strays[rank].append(name)
    return [Duty(*map(tuple, duty)) for duty in zip(uploads, copies, strays, strict=True)]


def _check_sizes(where: str, name: str, held: Sequence[int], listings: Sequence[Listing]) -> None:
    if not held:
        raise DeltaError(f"{where}/{name}: named by {INDEX_NAME}, and no rank has it")
    size = listings[held[0]].sizes[name]
    for rank in held:
        if listings[rank].sizes[name] != size:
            raise DeltaError(
                f"{where}/{name} has {size} bytes where rank {held[0]} runs, "
                f"{listings[rank].sizes[name]} where rank {rank} runs"
            )


def _check_copies(parts: Sequence[Part], where: str) -> None:
    """DeltaError where hosts have different files under one name: nothing says which is this version's."""
    uploaded = {r.file.name: (rank, r.file) for rank, part in enumerate(parts) for r in part.receipts}
    for rank, part in enumerate(parts):
        for copy in part.copies:
            other, file = uploaded[copy.name]
            if copy.sha256 != file.sha256:
                raise DeltaError(
                    f"{where}/{copy.name} is {file.sha256} where rank {other} runs, {copy.sha256} where rank "
                    f"{rank} runs: an earlier attempt has left one of them; empty the directory on every host"
                )


def describe(path: Path, files: Files) -> Receipt:
    """A receipt for a file on this host. Raises CheckpointError for a file that is wrong in itself."""
    file = _listed(path, files)
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


def _listed(path: Path, files: Files) -> PayloadFile:
    size = files.size(path)
    return PayloadFile(path.name, size, file_digest(files, path, size))


def carry_out(duty: Duty, directory: Path, files: Files) -> Part:
    """All of a duty but the uploading itself. Raises CheckpointError, OSError."""
    return Part(
        tuple(describe(directory / name, files) for name in duty.uploads),
        tuple(_listed(directory / name, files) for name in duty.copies),
        tuple(describe(directory / name, files) for name in duty.strays),
    )


@dataclass(frozen=True)
class Verdict:
    """What a delta directory does to a base: ``table`` and ``state`` result."""

    encoding: str
    changed: Mapping[str, tuple[str, str]]
    table: TensorTable
    state: str


def judge(
    parts: Sequence[Part],
    base: TensorTable,
    where: str,
    *,
    proven: Mapping[str, tuple[str, str]] | None = None,
    encoded: str | None = None,
) -> Verdict:
    """Check what ranks, in their order, have of a delta against its index and the base that it was made from.

    ``proven`` are the old and new xxh3-128 of its tensors where it was applied to a proven base: then no
    dialect has to tell them. ``encoded`` is the state that the encoders have, where that is known.
    Raises DeltaError, which names the tensor or file.
    """
    _check_copies(parts, where)
    receipts = [receipt for part in parts for receipt in part.receipts]
    shards = {
        r.file.name: r.frames for r in receipts if r.file.name.endswith((".safetensors", SPARSE_SUFFIX))
    }
    indexes = [r.index for r in receipts if r.index is not None]
    if not indexes:
        raise DeltaError(f"{where}: no rank has {INDEX_NAME}: the framework did not finish writing it")
    index = indexes[0]
    encoding = _check_dialect(index, where, proven is not None)
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
            _check_copy(f"{where}/{shard}", name, frame, *seen.setdefault(name, (shard, frame)))
            changed[name] = base[name].digest, checksum
            table[name] = TensorInfo(base[name].dtype, base[name].shape, checksum)
    _check_strays([receipt for part in parts for receipt in part.strays], seen, where)
    state = state_digest(table)
    if encoded not in (None, state):
        raise DeltaError(
            f"{where}: its files give {state}, and what was encoded is {encoded}: another process has "
            "written there"
        )
    return Verdict(encoding, changed, table, state)


def _check_dialect(index: Index, where: str, proven: bool) -> str:
    """The encoding, if a manifest can say what such a delta does."""
    if index.kind != "delta":
        raise DeltaError(f"{where}: a full checkpoint, not a delta")
    if index.encoding not in ("xor", "overwrite", "sparse") or index.compression != "zstd":
        raise DeltaError(
            f"{where}: {index.encoding} with {index.compression}; set --update-weight-delta-encoding xor"
        )
    if index.checksum != "xxh3-128" and not proven:
        raise DeltaError(
            f"{where}: checksums are {index.checksum}, which do not name the weights: set "
            "--update-weight-delta-checksum xxh3-128, or stitch_prove: true, which applies each delta here"
        )
    return index.encoding


def _check_strays(strays: Sequence[Receipt], seen: Mapping[str, tuple[str, Frame]], where: str) -> None:
    unknown = sorted({r.file.name for r in strays if not r.frames.keys() <= seen.keys()})
    if unknown:
        raise DeltaError(stray_problem(where, unknown))
    for receipt in strays:
        for name, frame in receipt.frames.items():
            _check_copy(f"{where}/{receipt.file.name}", name, frame, *seen[name])


def _check_copy(where: str, name: str, frame: Frame, other: str, first: Frame) -> None:
    """Pipeline stages each write a tensor that they share: equal, or the stages have drifted apart."""
    if first != frame:
        raise DeltaError(f"{where}: tensor {name} is also in {other}, with another payload")
