"""What the URLs of stores with a prefix and options have in common. No message repeats an option's value."""

from __future__ import annotations

from collections.abc import Collection
from urllib.parse import SplitResult, parse_qsl

from . import BadUrl
from .keys import is_key

MAX_PREFIX = 200
"""Characters; with the 800 of a key below S3's 1,024 bytes."""


def url_prefix(parts: SplitResult) -> str:
    """The path of a URL as the beginning of names: empty, or ending with '/'. Raises BadUrl."""
    if parts.fragment:
        raise BadUrl(f"{parts.scheme}://{parts.netloc}: there is a '#' in the URL, which no prefix may have")
    prefix = parts.path.strip("/")
    if prefix and (not is_key(prefix) or len(prefix) > MAX_PREFIX):
        raise BadUrl(
            f"{prefix!r} is not a prefix: parts of A-Z a-z 0-9 . _ - ~ joined by single '/', none starting "
            f"with '.', {MAX_PREFIX} characters in all"
        )
    return prefix + "/" if prefix else ""


def url_options(parts: SplitResult, known: Collection[str]) -> dict[str, str]:
    """The options of a URL, each of ``known`` at most once and not empty. Raises BadUrl."""
    found: dict[str, str] = {}
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name not in known:
            raise BadUrl(f"{name[:40]!r} is no option of {parts.scheme}: URLs: there are {', '.join(known)}")
        if name in found or not value:
            raise BadUrl(f"the option {name} of {parts.scheme}: URLs is given once, with a value")
        found[name] = value
    return found
