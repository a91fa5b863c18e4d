"""``stitch diff``: in which tensors two versions or checkpoints differ, and by how much."""

from __future__ import annotations

import argparse
import asyncio
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..chain import ChainReader
from ..checkout import checkout
from ..checkpoint import Checkpoint
from ..files import PosixFiles
from ..ports import Store
from ..state import TensorInfo, TensorTable, state_digest
from ..values import element_bytes, to_float64
from .checkout import boot_directory
from .common import (
    Commands,
    UsageError,
    absolute_path,
    add_command,
    check_given,
    emit,
    opened_store,
    positive,
    say,
    scratch,
    size_text,
    table,
)
from .target import HELP, Target, resolve

CHUNK = 8 << 20  # a multiple of every element's size


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands, "diff", run, "compare two versions or checkpoint directories, tensor by tensor",
        "Compare the weights of A and B: which tensors differ, in how many bytes and elements, and how far\n"
        "apart their values are (max, and mean over the elements that differ; bf16 and fp8 are decoded).\n"
        "Versions are rebuilt from the store, verified, in --work, which takes two checkpoints of room.\n\n"
        "Exit code 0 if the weights are the same, 1 if they differ.\n\n"
        "  stitch diff my-run/7 my-run/8 --store file:/data/stitch\n"
        "  stitch diff my-run/120 /ckpt/exported --store file:/data/stitch --base /models/base\n"
        "  stitch diff /models/a /models/b --json",
    )  # fmt: skip
    for name in ("a", "b"):
        parser.add_argument(name, metavar=name.upper(), help=f"{HELP}; or a checkpoint directory")
    parser.add_argument("--store", metavar="URL", help="the store, if A or B is a version")
    parser.add_argument(
        "--base", type=absolute_path, metavar="DIR", help="version 0 of the run, as for 'stitch checkout'"
    )
    parser.add_argument(
        "--work", type=absolute_path, metavar="DIR", help="scratch space (default: a temporary directory)"
    )
    parser.add_argument(
        "--top", type=positive, default=20, metavar="N", help="show the N that differ most (20)"
    )


async def run(options: argparse.Namespace) -> int:
    with scratch(options.work) as work:
        a, b = [await _directory(options, side, work) for side in ("a", "b")]
        result = await asyncio.to_thread(compare, a, b)
    result = {"a": options.a, "b": options.b, **result}
    emit(result, options.json, lambda: _text(result, options.top))
    return 0 if result["same"] else 1


async def _directory(options: argparse.Namespace, side: str, work: Path) -> Path:
    """Where the weights of one side lie."""
    text = check_given(getattr(options, side), side.upper())
    path = Path(text)
    if await asyncio.to_thread(path.is_dir):
        return await asyncio.to_thread(path.absolute)
    if options.store is None:
        raise UsageError(f"{text} is not a directory; if it is a version, give --store")
    target, directory = Target.parse(text), work / side
    async with opened_store(options.store) as store:
        return await _rebuilt(store, target, directory, options.base)


async def _rebuilt(store: Store, target: Target, directory: Path, base: Path | None) -> Path:
    reader = ChainReader(store)
    manifest, _ = await resolve(reader, target)
    say(f"rebuilding {manifest.version}")
    await asyncio.to_thread(PosixFiles().remove_tree, directory)  # of an earlier run with the same --work
    base = base or await boot_directory(reader, manifest)
    await checkout(store, manifest.run, manifest.number, directory, files=PosixFiles(), base=base)
    return directory


# -------------------------------------------------------------------------------------------- comparing


@dataclass
class Difference:
    """How far one tensor of A is from that of B.

    ``elements`` differ, of ``of``; None where the dtype's elements are no whole bytes. ``max_abs`` and
    ``mean_abs`` (over the elements that differ) are of finite values only; ``not_finite`` counts the others.
    """

    name: str
    dtype: str
    bytes: int = 0
    elements: int | None = None
    of: int | None = None
    max_abs: float | None = None
    mean_abs: float | None = None
    not_finite: int = 0


def compare(a: Path, b: Path) -> dict[str, Any]:
    """Compare two checkpoint directories, in bounded memory. Raises CheckpointError, OSError."""
    files = PosixFiles()
    left, right = Checkpoint.open(a, files), Checkpoint.open(b, files)
    tables = left.table(), right.table()
    same_layout, layout = _layout(*tables)
    changed = [_compare(left, right, name) for name in same_layout if tables[0][name] != tables[1][name]]
    states = [state_digest(table) for table in tables]
    return {
        "same": states[0] == states[1], "state_a": states[0], "state_b": states[1],
        "tensors": len(same_layout), "changed": len(changed),
        "bytes": sum(left.tensors[name].nbytes for name in same_layout),
        "changed_bytes": sum(difference.bytes for difference in changed),
        "layout": layout, "by_dtype": _by_dtype(changed), "differences": [asdict(d) for d in changed],
    }  # fmt: skip


def _layout(a: TensorTable, b: TensorTable) -> tuple[list[str], list[str]]:
    """The tensors of equal dtype and shape in both, and in words what is not so."""
    both, words = [], []
    for name in sorted(a.keys() | b.keys()):
        if name not in b or name not in a:
            words.append(f"{name} is only in {'A' if name in a else 'B'}")
        elif (a[name].dtype, a[name].shape) != (b[name].dtype, b[name].shape):
            words.append(f"{name} is {_kind(a[name])} in A, {_kind(b[name])} in B")
        else:
            both.append(name)
    return both, words


def _kind(info: TensorInfo) -> str:
    return f"{info.dtype} {list(info.shape)}"


def _compare(a: Checkpoint, b: Checkpoint, name: str) -> Difference:
    dtype = a.tensors[name].dtype
    width = element_bytes(dtype)
    result = Difference(name, dtype)
    if width is not None:
        result.elements, result.of = 0, a.tensors[name].nbytes // width
    total, compared = 0.0, 0
    for left, right in _pairs(a, b, name):
        differs = np.frombuffer(left, np.uint8) != np.frombuffer(right, np.uint8)
        result.bytes += int(differs.sum())
        if width is None or result.elements is None:
            continue
        chosen = differs.reshape(-1, width).any(axis=1)
        result.elements += int(chosen.sum())
        values = to_float64(dtype, left), to_float64(dtype, right)
        if values[0] is None or values[1] is None:
            continue
        x, y = values[0][chosen], values[1][chosen]
        finite = np.isfinite(x) & np.isfinite(y)
        result.not_finite += int((~finite).sum())
        apart = np.abs(x[finite] - y[finite])
        if apart.size:
            result.max_abs = max(result.max_abs or 0.0, float(apart.max()))
            total, compared = total + float(apart.sum()), compared + apart.size
    result.mean_abs = total / compared if compared else None
    return result


def _pairs(a: Checkpoint, b: Checkpoint, name: str) -> Iterator[tuple[bytes, bytes]]:
    return zip(a.chunks(name, CHUNK), b.chunks(name, CHUNK), strict=True)


def _by_dtype(changed: list[Difference]) -> dict[str, dict[str, Any]]:
    result: dict[str, dict[str, Any]] = {}
    for d in changed:
        row = result.setdefault(
            d.dtype, {"tensors": 0, "bytes": 0, "elements": 0, "max_abs": None, "mean_abs": None}
        )
        known = row["elements"]
        row["tensors"] += 1
        row["bytes"] += d.bytes
        row["elements"] += d.elements or 0
        if d.max_abs is not None and d.mean_abs is not None and d.elements:
            row["max_abs"] = max(row["max_abs"] or 0.0, d.max_abs)
            before = (row["mean_abs"] or 0.0) * known
            row["mean_abs"] = (before + d.mean_abs * d.elements) / row["elements"]
    return result


# ---------------------------------------------------------------------------------------------- showing


def _text(result: dict[str, Any], top: int) -> str:
    if result["same"]:
        size = size_text(result["bytes"])
        return f"the same weights: {result['tensors']} tensors, {size}, {result['state_a']}"
    share = result["changed_bytes"] / max(1, result["bytes"])
    parts = [
        f"{result['changed']} of {result['tensors']} tensors differ, in "
        f"{size_text(result['changed_bytes'])} of {size_text(result['bytes'])} ({share:.3%})\n"
        f"A is {result['state_a']}\nB is {result['state_b']}"
    ]
    if result["layout"]:
        parts.append("\n".join(["the layout differs:", *(f"  {line}" for line in result["layout"][:top])]))
    if result["changed"]:
        parts.append(table(
            ("dtype", "tensors", "bytes", "elements", "max", "mean"),
            [(dtype, r["tensors"], r["bytes"], r["elements"], _number(r["max_abs"]), _number(r["mean_abs"]))
             for dtype, r in result["by_dtype"].items()],
        ))  # fmt: skip
        rows = sorted(result["differences"], key=lambda d: -(d["max_abs"] or 0.0) or -d["bytes"])[:top]
        parts.append(table(
            ("tensor", "dtype", "bytes", "elements", "of", "max", "mean"),
            [(d["name"], d["dtype"], d["bytes"], d["elements"], d["of"], _number(d["max_abs"]),
              _number(d["mean_abs"])) for d in rows],
        ))  # fmt: skip
        if len(rows) < result["changed"]:
            parts.append(f"and {result['changed'] - len(rows)} more (--top, --json)")
    return "\n\n".join(parts)


def _number(value: float | None) -> str | None:
    return None if value is None or math.isnan(value) else f"{value:.3g}"
