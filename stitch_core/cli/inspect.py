"""``stitch inspect``: what a version, a key of a store, a file or a directory is."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..chain import ChainReader, NoHead
from ..checkpoint import Checkpoint
from ..delta.directory import DeltaDirectory
from ..dialects import read_index
from ..files import PosixFiles
from ..head import CHANNEL_FORMAT, HEAD_FORMAT, Channel, Head
from ..host_marker import FORMAT as HOST_FORMAT
from ..host_marker import Marker
from ..manifest import MANIFEST_FORMAT, FormatError, Manifest, Representation, run_prefix
from ..pins import PIN_FORMAT, Pin
from ..ports import NotFound, Store
from ..records import FULL_FORMAT, SPAN_FORMAT, Place, Record, list_records
from ..safetensors import TensorRef, load_json_object, read_header
from ..stores.keys import is_key
from .common import (
    Commands,
    UsageError,
    absolute_path,
    add_command,
    age_text,
    check_given,
    emit,
    opened_store,
    size_text,
)
from .publish import is_delta_directory
from .target import HELP, Target, resolve
from .versions import describe

KEY, RUN = "key:", "run:"
KEY_ROOTS = ("runs/", "channels/", "replicas/", "pins/")
CONSUMERS_FORMAT = "stitch.consumers/1"
"""Of what gateways read, and ``stitch consumer`` writes, which knows what it means."""
LARGEST = 10


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands, "inspect", run, "say what a version, a key, a file or a directory is",
        "Say what WHAT is: its kind, sizes, encoding, place on the chain, and in what other forms the\n"
        "store has it. Reads headers and small documents, no weights; 'stitch verify' reads every byte.\n\n"
        "  stitch inspect my-run --store file:/data/stitch          # a run's newest version\n"
        "  stitch inspect my-run/120 --store file:/data/stitch      # one version\n"
        "  stitch inspect runs/my-run/head --store file:/data/stitch  # a key: head, manifest, channel,\n"
        "                                                             # record, payload file's size\n"
        "  stitch inspect key:consumers --store file:/data/stitch     # any key\n"
        "  stitch inspect model-00001-of-00004.safetensors          # a shard\n"
        "  stitch inspect /updates/weight_v000007                   # checkpoint, delta, host checkpoint\n\n"
        "With --store WHAT is a key if it begins with key: (which is left out), runs/, channels/,\n"
        "replicas/ or pins/, and a version otherwise; run:pins/7 is version 7 of a run called pins.",
    )  # fmt: skip
    parser.add_argument(
        "what", metavar="WHAT", help=f"{HELP}; key:KEY; or, without --store, a file or directory"
    )
    parser.add_argument("--store", metavar="URL", help="the store, for a version or a key")


async def run(options: argparse.Namespace) -> int:
    check_given(options.what, "WHAT")
    if options.store is None:
        path = absolute_path(options.what)
        result = await asyncio.to_thread(inspect_path, path)
    else:
        async with opened_store(options.store) as store:
            result = await _inspect_stored(store, options.what)
    emit(result, options.json, lambda: as_text(result))
    return 0


async def _inspect_stored(store: Store, what: str) -> dict[str, Any]:
    """A key or a version, as the help says. Raises as ``inspect_key`` and ``inspect_version`` do."""
    if what.startswith((KEY, *KEY_ROOTS)):
        return await inspect_key(store, what.removeprefix(KEY))
    try:
        return await inspect_version(store, Target.parse(what.removeprefix(RUN)))
    except NoHead as error:
        with contextlib.suppress(NotFound):
            if is_key(what):
                await store.size(what)
                raise UsageError(f"{error}; for the key of that name write {KEY}{what}") from None
        raise


def as_text(value: Mapping[str, Any], indent: str = "") -> str:
    """Nested mappings as lines of ``name: value``."""
    lines = []
    for name, item in value.items():
        if isinstance(item, Mapping):
            lines += [f"{indent}{name}:", as_text(item, indent + "  ")] if item else []
        elif isinstance(item, list):
            rows = ["  ".join(map(str, r.values())) if isinstance(r, Mapping) else str(r) for r in item]
            lines += [f"{indent}{name}:", *(f"{indent}  {row}" for row in rows)] if rows else []
        elif item is not None:
            shown = size_text(item) if name.endswith("bytes") else item
            lines.append(f"{indent}{name}: {age_text(item) if name == 'time' and item else shown}")
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------ store


async def inspect_version(store: Store, target: Target) -> dict[str, Any]:
    """A version on its chain. Raises as ``resolve`` does."""
    reader = ChainReader(store)
    manifest, newest = await resolve(reader, target)
    head, _ = await reader.head(manifest.run)
    boot = await reader.boot(manifest)
    floor = newest.floor.number if newest.floor else newest.number
    return {
        "is": "version", **describe(manifest), "key": run_prefix(manifest.run) + manifest.key,
        "representation": _representation(manifest.representation),
        "chain": {
            "head": newest.number, "head_epoch": head.epoch,
            "parent": manifest.parent.number if manifest.parent else None,
            "floor": manifest.floor.number if manifest.floor else manifest.number, "head_floor": floor,
            "may_be_collected": 0 < manifest.number < floor,
            "boot": boot.representation.source, "boot_state": boot.state,
        },
        "also": await _others(store, manifest),
        "metadata": dict(manifest.metadata),
    }  # fmt: skip


async def _others(store: Store, manifest: Manifest) -> list[dict[str, Any]]:
    """The fulls of a version, and the spans that end at it or lead over it."""
    found = await list_records(store, manifest.run)
    return [
        {"kind": _kind(place), "bytes": place.bytes, "complete": place.key is not None, "key": place.key}
        for place in found
        if place.number == manifest.number
        or (place.since is not None and place.since <= manifest.number <= place.number)
    ]


def _kind(place: Place) -> str:
    return "full" if place.since is None else f"span {place.since}-{place.number}"


def _representation(r: Representation) -> dict[str, Any]:
    return {
        "kind": r.kind, "bytes": r.bytes,
        "files": [{"file": f.name, "size": f.size, "sha256": f.sha256} for f in r.files],
        "base": r.base, "encoding": r.encoding, "tensors": len(r.changed) if r.kind == "delta" else None,
        "source": r.source,
    }  # fmt: skip


async def inspect_key(store: Store, key: str) -> dict[str, Any]:
    """One object. Raises UsageError if it is not there."""
    if not is_key(key):
        raise UsageError(f"{key!r} is not a key")
    try:
        size = await store.size(key)
        document = (
            key.endswith((".json", "/head")) or key.startswith(("channels/", "pins/")) or "/" not in key
        )
        if size > 1 << 26 or not document:
            return {"is": "file", "key": key, "bytes": size}
        data = (await store.load(key)).data
    except NotFound:
        raise UsageError(f"there is no {key} in the store") from None
    return {"key": key, **inspect_document(data, key)}


# ----------------------------------------------------------------------------------------------- documents


def inspect_document(data: bytes, where: str) -> dict[str, Any]:
    """A JSON document of Stitch, or any other. Raises FormatError, CheckpointError."""
    value = load_json_object(data, where)
    found = value.get("format")
    if found == HEAD_FORMAT:
        return {"is": "head", **_fields(Head.decode(data, where))}
    if found == CHANNEL_FORMAT:
        channel = Channel.decode(data, where)
        return {
            "is": "channel",
            "run": channel.run,
            "follows": channel.exact if channel.exact is not None else "newest",
        }
    if found == PIN_FORMAT:
        pin = Pin.decode(data, where)
        return {"is": "pin", "version": str(pin.version), "manifest": pin.digest, "time": pin.time}
    if found == MANIFEST_FORMAT:
        manifest = Manifest.decode(data, where)
        return {
            "is": "manifest", **describe(manifest),
            "representation": _representation(manifest.representation),
            "parent": manifest.parent.number if manifest.parent else None, "history": len(manifest.history),
            "floor": manifest.floor.number if manifest.floor else manifest.number,
            "metadata": dict(manifest.metadata),
        }  # fmt: skip
    if found in (FULL_FORMAT, SPAN_FORMAT):
        record = Record.decode(data, span=found == SPAN_FORMAT, where=where)
        return {
            "is": "full" if record.since is None else "span", "version": str(record.version),
            "since": record.since, "state": record.state,
            "representation": _representation(record.representation),
        }  # fmt: skip
    if found == HOST_FORMAT:
        return {"is": "marker of a host checkpoint", **_marker(Marker.decode(data, where))}
    if "weight_map" in value:
        index = read_index(data, where)
        return {
            "is": f"index of a {index.kind}", "version": index.version, "base_version": index.base_version,
            "encoding": index.encoding, "compression": index.compression, "checksum": index.checksum,
            "tensors": len(index.weight_map), "files": sorted(set(index.weight_map.values())),
        }  # fmt: skip
    if found == CONSUMERS_FORMAT:
        return {"is": "consumers", "consumers": value.get("consumers")}
    if found is not None and str(found).startswith("stitch."):
        raise FormatError(f"{where}: format {found!r} is not known here: a newer Stitch wrote it")
    return {"is": "JSON", "value": {name: json.dumps(item)[:200] for name, item in value.items()}}


def _fields(head: Head) -> dict[str, Any]:
    return {
        "number": head.number, "epoch": head.epoch, "manifest": head.key, "digest": head.digest,
        "writer": head.writer[:8], "time": head.time,
        "abandoned": [f"{first} to {last}" for first, last in head.abandoned],
    }  # fmt: skip


def _marker(marker: Marker) -> dict[str, Any]:
    held, target = marker.held, marker.target
    return {
        "holds": None if target else str(held.version), "state": None if target else held.state,
        "interrupted": f"between {held.version} and {target.version}" if target else None,
        "data": marker.data,
    }  # fmt: skip


# -------------------------------------------------------------------------------------- files, directories


def inspect_path(path: Path) -> dict[str, Any]:
    """A file or a directory. Raises UsageError, CheckpointError, DeltaError, FormatError, OSError."""
    files = PosixFiles()
    if path.is_dir():
        return {"path": str(path), **_directory(path, files)}
    if not path.exists():
        raise UsageError(f"there is no {path}; to look at a version, give --store")
    if path.name.endswith(".safetensors"):
        header = read_header(path, files)
        return {
            "path": str(path), "is": "safetensors file", "file_bytes": files.size(path),
            **_tensors(header.tensors), "metadata": _checksums(header.metadata),
        }  # fmt: skip
    if files.size(path) > 1 << 26:
        raise UsageError(f"{path} is neither a safetensors file nor a document of Stitch")
    return {"path": str(path), **inspect_document(files.read(path), str(path))}


def _directory(path: Path, files: PosixFiles) -> dict[str, Any]:
    if (path / "marker.json").exists():
        marker = Marker.decode(files.read(path / "marker.json"), str(path / "marker.json"))
        inner = _directory(path / marker.data, files) if marker.target is None else {}
        return {"is": "host checkpoint", **_marker(marker), "checkpoint": inner}
    if is_delta_directory(path, files):
        delta = DeltaDirectory.open(path, files)
        i, names = delta.index, {payload.frame.file for payload in delta.payloads.values()}
        return {
            "is": "delta", "version": i.version, "base_version": i.base_version, "encoding": i.encoding,
            "compression": i.compression, "checksum": i.checksum,
            "files": len(names), "bytes": sum(files.size(name) for name in names),
            "tensors": len(delta.payloads), "changes": _changes(delta),
        }  # fmt: skip
    if (path / "latest").is_file() and (path / "updates").is_dir():
        pointer = (path / "latest").read_text(errors="replace").strip()
        count = sum(1 for name in files.list(path / "updates") if name.startswith("weight_v"))
        return {"is": "root of the public reference", "pointer": pointer, "versions": count}
    if (path / ".stitch").is_dir() and (path / "runs").is_dir():
        return {
            "is": "store",
            "runs": files.list(path / "runs"),
            "look_with": f"stitch status --store file:{path}",
        }
    checkpoint = Checkpoint.open(path, files)
    return {
        "is": "checkpoint", "files": len(checkpoint.weight_files), "index": checkpoint.index is not None,
        **_tensors(checkpoint.tensors),
    }  # fmt: skip


def _changes(delta: DeltaDirectory) -> int | None:
    """Elements that a sparse delta changes; the other encodings do not say."""
    found = {file.path: file.changes for file in delta.sparse.values()}
    return sum(found.values()) if found else None


def _tensors(tensors: Mapping[str, TensorRef]) -> dict[str, Any]:
    """How many, of which dtypes, and the largest."""
    sizes: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for ref in tensors.values():
        sizes[ref.dtype] += ref.nbytes
        counts[ref.dtype] += 1
    largest = sorted(tensors.items(), key=lambda item: -item[1].nbytes)[:LARGEST]
    return {
        "tensors": len(tensors), "tensor_bytes": sum(sizes.values()),
        "dtypes": {d: f"{counts[d]} tensors, {size_text(size)}" for d, size in sizes.most_common()},
        "largest": [
            {"name": name, "dtype": ref.dtype, "shape": list(ref.shape), "size": ref.nbytes}
            for name, ref in largest
        ],
    }  # fmt: skip


def _checksums(metadata: Mapping[str, str]) -> dict[str, str]:
    """A shard's own words; of a delta's many checksums the first few."""
    shown = dict(list(metadata.items())[:LARGEST])
    if len(metadata) > LARGEST:
        shown["..."] = f"{len(metadata) - LARGEST} more"
    return shown
