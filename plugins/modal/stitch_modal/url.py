"""What ``modal://volume/prefix?mount=/vol`` says."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlsplit

from stitch_core.stores import BadUrl
from stitch_core.stores.keys import is_key

MAX_PREFIX = 200
OPTIONS = ("mount", "environment")
MOUNT_ENV = "STITCH_MODAL_MOUNT"

# https://modal.com/docs/reference/modal.Volume: alphanumerics, dashes, periods, underscores, under 64.
_NAME = re.compile(r"[A-Za-z0-9._-]{1,63}\Z")


@dataclass(frozen=True)
class Location:
    """``prefix`` is empty or ends with '/'. ``mount``: where this container mounts the Volume, ``none`` for
    not using a mount, None for looking where Modal puts it. ``environment``: None is the profile's.
    """

    volume: str
    prefix: str = ""
    mount: str | None = None
    environment: str | None = None

    def __str__(self) -> str:
        return f"modal://{self.volume}/{self.prefix}"


def parse_url(url: str, environ: Mapping[str, str] = os.environ) -> Location:
    """The location that a URL names; the mount may be in STITCH_MODAL_MOUNT. Raises BadUrl."""
    parts = urlsplit(url)
    if not _NAME.match(parts.netloc):
        raise BadUrl(
            f"{parts.netloc!r} is not the name of a Volume: write modal://volume/prefix, with a name of "
            "A-Z a-z 0-9 . _ -, under 64 characters"
        )
    if parts.fragment:
        raise BadUrl(f"modal://{parts.netloc}: there is a '#' in the URL, which no prefix may have")
    prefix = parts.path.strip("/")
    if prefix and (not is_key(prefix) or len(prefix) > MAX_PREFIX):
        raise BadUrl(
            f"{prefix!r} is not a prefix: parts of A-Z a-z 0-9 . _ - ~ joined by single '/', none starting "
            f"with '.', {MAX_PREFIX} characters in all"
        )
    options = _options(parts.query)
    mount = options.get("mount") or environ.get(MOUNT_ENV) or None
    if mount not in (None, "none") and not mount.startswith("/"):
        raise BadUrl(f"mount={mount!r}: it is the absolute path of the mount in this container, or none")
    return Location(parts.netloc, prefix + "/" if prefix else "", mount, options.get("environment"))


def _options(query: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name not in OPTIONS:
            raise BadUrl(f"{name[:40]!r} is no option of a modal: URL: there are {', '.join(OPTIONS)}")
        if name in found or not value:
            raise BadUrl(f"the option {name} of a modal: URL is given once, with a value")
        found[name] = value
    return found
