"""Stores by URL. A scheme is a plugin of the group ``stitch.stores``."""

from __future__ import annotations

from urllib.parse import urlsplit

from .. import plugins
from ..ports import Store, StoreError

GROUP = "stitch.stores"


class BadUrl(StoreError, ValueError):
    """A store URL that cannot be read, or whose scheme nothing installed here knows."""


def open_store(url: str) -> Store:
    """The store that a URL names, such as ``file:/dir``. No I/O yet.

    Raises BadUrl, which names the known schemes or the extra to install.
    """
    scheme = urlsplit(url).scheme
    if not scheme:
        known = ", ".join(f"{name}:" for name in plugins.names(GROUP))
        raise BadUrl(f"{url!r} is not a store URL: a directory is written file:/path, others {known}")
    try:
        store: Store = plugins.load(GROUP, scheme)(url)
    except plugins.PluginMissing as error:
        raise BadUrl(f"{url}: {error}") from error
    return store
