"""Reads ``model.safetensors.index.json`` as every public trainer and publisher writes it.

slime, Miles and the public reference share one dialect: ``metadata`` with ``version``, ``base_version``,
``delta_encoding``, ``compression_format``, ``checksum_format``; the others restrict or respell it. A
directory is a delta if and only if the metadata has ``delta_encoding``. Versions are opaque labels here:
what a delta fits is decided by digests, never by these.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from .safetensors import CheckpointError, load_json_object

INDEX_NAME = "model.safetensors.index.json"
SPARSE_SUFFIX = ".sparse"

CHECKSUMS = {"xxh3128": "xxh3-128", "adler32": "adler32", "alder32": "adler32", "blake3": "blake3"}
"""Spellings, lower case and without '-' and '_', to the normal one. 'alder32' is what one vendor writes."""

CHECKSUM_HEX = {"xxh3-128": 32, "adler32": 8, "blake3": 64}

_NUMBER = re.compile(r"(?:[^/]+/)?(?:weight_v)?([0-9]{1,18})\Z")


@dataclass(frozen=True)
class Index:
    """An index file; ``checksum`` is "xxh3-128", "adler32", "blake3" or None.

    ``sparse_files`` are the files of a delta in the encoding ``sparse``, whose tensors no index names.
    """

    kind: Literal["full", "delta"]
    version: str | None
    base_version: str | None
    encoding: str | None
    compression: str | None
    checksum: str | None
    weight_map: Mapping[str, str]
    sparse_files: tuple[str, ...] = ()


def read_index(data: bytes, where: str) -> Index:
    """Read and check an index; CheckpointError names ``where``.

    Ints and text are both taken as versions, text as it stands ("000007", "run/weight_v000007", any id).
    """
    value = load_json_object(data, where)
    metadata, weight_map = value.get("metadata"), value.get("weight_map")
    if metadata is None:
        metadata = {}
    if not isinstance(metadata, dict):
        raise CheckpointError(f"{where}: metadata must be an object")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{where}: weight_map must map tensor names to files")
    for name, file in weight_map.items():
        check_shard_name(file, f"{where}: tensor {name}")
    return Index(
        "delta" if "delta_encoding" in metadata else "full",
        _label(metadata, "version", where),
        _label(metadata, "base_version", where),
        _text(metadata, "delta_encoding", where),
        _text(metadata, "compression_format", where),
        _checksum(_text(metadata, "checksum_format", where), where),
        weight_map,
        _sparse_files(metadata, where),
    )


def version_number(label: str | None) -> int | None:
    """The number in "7", "000007", "weight_v000007" or "run/weight_v000007"; None for an opaque id.

    For showing and ordering only.
    """
    match = _NUMBER.match(label) if label is not None else None
    return int(match[1]) if match else None


def check_shard_name(name: object, where: str, suffix: str = ".safetensors") -> str:
    """``name`` if it is a plain file name with ``suffix``; CheckpointError for a path or anything else."""
    if (
        not isinstance(name, str)
        or not name.endswith(suffix)
        or name.startswith(".")
        or any(c in "/\\" or ord(c) < 32 for c in name)
    ):
        raise CheckpointError(
            f"{where}: {name!r} is not the name of a {suffix[1:]} file in the same directory"
        )
    return name


def _sparse_files(metadata: dict[str, Any], where: str) -> tuple[str, ...]:
    names = metadata.get("sparse_files", [])
    if not isinstance(names, list):
        raise CheckpointError(f"{where}: sparse_files must be a list of file names")
    return tuple(check_shard_name(name, f"{where}: sparse_files", SPARSE_SUFFIX) for name in names)


def _label(metadata: dict[str, Any], key: str, where: str) -> str | None:
    value = metadata.get(key)
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return str(value)
    return _text(metadata, key, where)


def _text(metadata: dict[str, Any], key: str, where: str) -> str | None:
    value = metadata.get(key)
    if value is None and key != "delta_encoding":
        return None
    if key not in metadata:
        return None
    if not isinstance(value, str) or not value:
        raise CheckpointError(f"{where}: {key} must be text, not {value!r}")
    return value


def _checksum(text: str | None, where: str) -> str | None:
    if text is None:
        return None
    normal = CHECKSUMS.get(text.lower().replace("-", "").replace("_", ""))
    if normal is None:
        raise CheckpointError(
            f"{where}: unknown checksum_format {text!r}: known are xxh3-128, adler32, blake3"
        )
    return normal
