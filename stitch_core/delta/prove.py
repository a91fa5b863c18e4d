"""What a delta that came without digests of the whole does to a proven base: found out, or as it promises."""

from __future__ import annotations

import zlib

from ..checkpoint import Checkpoint
from ..ports import Buffer
from ..safetensors import as_bytes
from ..state import TensorInfo, TensorTable, state_digest
from .directory import DeltaDirectory
from .one_pass import apply_in_place
from .wire import DeltaError


def prove_delta(
    delta: DeltaDirectory, base: Checkpoint, table: TensorTable
) -> tuple[dict[str, tuple[str, str]], str]:
    """Old and new xxh3-128 of each tensor in ``delta``, and the state that results on ``base``.

    ``table`` is the base's. Raises DeltaError, naming the tensor, when the delta does not fit or does
    not give the bytes that its own checksums promise.
    """
    result = dict(table)
    changed: dict[str, tuple[str, str]] = {}
    for name, payload in delta.payloads.items():
        info = _info(delta, table, name)
        new = as_bytes(bytearray(base.read(name)))
        try:
            digest = apply_in_place(new, name, [delta])
        except DeltaError as error:
            raise DeltaError(f"{delta.path}: tensor {name}: {error}") from error
        _check_promise(delta, name, payload.checksum, new.data, digest)
        changed[name] = info.digest, digest
        result[name] = TensorInfo(info.dtype, info.shape, digest)
    return changed, state_digest(result)


def promised_by(delta: DeltaDirectory, table: TensorTable) -> tuple[dict[str, tuple[str, str]], str] | None:
    """As ``prove_delta``, by what the delta says of itself; None if that is not enough.

    Nothing is proven yet: whoever applies it must verify these digests, as a host checkpoint does before its
    first write. Raises DeltaError for a tensor that the base has not.
    """
    if delta.index.checksum != "xxh3-128":
        return None
    result = dict(table)
    changed: dict[str, tuple[str, str]] = {}
    for name, payload in delta.payloads.items():
        info = _info(delta, table, name)
        if payload.checksum is None:
            return None
        changed[name] = info.digest, payload.checksum
        result[name] = TensorInfo(info.dtype, info.shape, payload.checksum)
    return changed, state_digest(result)


def _info(delta: DeltaDirectory, table: TensorTable, name: str) -> TensorInfo:
    if name not in table:
        raise DeltaError(f"{delta.path}: tensor {name} is extra, the base has none of that name")
    return table[name]


def _check_promise(delta: DeltaDirectory, name: str, promised: str | None, new: Buffer, xxh3: str) -> None:
    where = f"{delta.path}: tensor {name}"
    kind = delta.index.checksum
    if promised is None:
        raise DeltaError(f"{where} has no checksum, so nothing shows that it fits this base")
    if kind == "xxh3-128":
        got = xxh3
    elif kind == "adler32":
        got = f"{zlib.adler32(new):08x}"
    else:
        raise DeltaError(
            f"{where} has a {kind} checksum, which cannot be checked here: publish with xxh3-128 or adler32"
        )
    if got != promised:
        raise DeltaError(f"{where} becomes {got} on this base, its checksum promises {promised}")
