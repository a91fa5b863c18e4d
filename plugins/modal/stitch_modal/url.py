"""What ``modal://volume/prefix?mount=/vol`` says."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from stitch_core.stores import BadUrl
from stitch_core.stores.urls import url_options, url_prefix

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
    prefix = url_prefix(parts)
    options = url_options(parts, OPTIONS)
    mount = options.get("mount") or environ.get(MOUNT_ENV) or None
    if mount not in (None, "none") and not mount.startswith("/"):
        raise BadUrl(f"mount={mount!r}: it is the absolute path of the mount in this container, or none")
    return Location(parts.netloc, prefix, mount, options.get("environment"))
