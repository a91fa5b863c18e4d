"""What a key is, for every store alike, so that what works on one store works on all."""

from __future__ import annotations

import re

from ..ports import StoreError

MAX_KEY = 800
"""Characters in a key: leaves room for a bucket prefix below S3's 1,024 bytes."""

MAX_SEGMENT = 200
"""Characters between two '/': leaves room below the 255 bytes of a file name."""

_SEGMENT = rf"(?!\.)[A-Za-z0-9._~-]{{1,{MAX_SEGMENT}}}"
_KEY = re.compile(rf"{_SEGMENT}(?:/{_SEGMENT})*\Z")
_PREFIX = re.compile(rf"(?:{_SEGMENT}/)*(?:{_SEGMENT})?\Z")


class BadKey(StoreError, ValueError):
    """A key, prefix or range that no store takes, or one that this store cannot hold beside another."""


def is_key(key: object) -> bool:
    return isinstance(key, str) and len(key) <= MAX_KEY and bool(_KEY.match(key))


def check_key(key: str) -> str:
    """``key`` if it is one, else BadKey."""
    if not is_key(key):
        raise BadKey(
            f"{key!r} is not a key: segments of A-Z a-z 0-9 . _ - ~ joined by '/', none of them empty, "
            f"starting with '.' or longer than {MAX_SEGMENT}, {MAX_KEY} characters in all"
        )
    return key


def check_prefix(prefix: str) -> str:
    """``prefix`` if a key can start with it, else BadKey. The empty one is every key's."""
    if not isinstance(prefix, str) or len(prefix) > MAX_KEY or not _PREFIX.match(prefix):
        raise BadKey(f"{prefix!r} is not the beginning of a key")
    return prefix


def check_range(start: int, length: int | None) -> None:
    """BadKey for a range that counts from the end or backwards."""
    if start < 0 or (length is not None and length < 0):
        raise BadKey(f"a range cannot start at {start} and have {length} bytes")
