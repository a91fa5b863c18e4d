"""Stores by URL. A scheme is a plugin: an entry point in the group ``stitch.stores``."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from urllib.parse import urlsplit

from ..ports import Store, StoreError

GROUP = "stitch.stores"

# So that a clone that was never installed has them; the distribution registers the same two.
BUILT_IN = {"file": "stitch_core.stores.local:open_url", "memory": "stitch_core.stores.memory:open_url"}
EXTRAS = {"s3": "stitch-rl[s3]", "modal": "stitch-rl[modal]"}


class BadUrl(StoreError, ValueError):
    """A store URL that cannot be read, or whose scheme nothing installed here knows."""


def open_store(url: str) -> Store:
    """The store that a URL names, such as ``file:/dir`` or ``s3://bucket/prefix``. No I/O yet.

    Raises BadUrl, which names the known schemes or the extra to install.
    """
    scheme = urlsplit(url).scheme
    if not scheme:
        raise BadUrl(f"{url!r} is not a store URL: a directory is written file:/path, others {_known()}")
    return _factory(scheme, url)(url)


def _factory(scheme: str, url: str) -> Callable[[str], Store]:
    if scheme in BUILT_IN:
        return _load(EntryPoint(scheme, BUILT_IN[scheme], GROUP), url)
    for entry in entry_points(group=GROUP, name=scheme):
        return _load(entry, url)
    if scheme in EXTRAS:
        raise BadUrl(f"{url}: for {scheme} stores install {EXTRAS[scheme]}; installed here: {_known()}")
    raise BadUrl(f"{url}: unknown store scheme {scheme!r}; installed here: {_known()}")


def _load(entry: EntryPoint, url: str) -> Callable[[str], Store]:
    try:
        factory: Callable[[str], Store] = entry.load()
    except ModuleNotFoundError as error:
        extra = EXTRAS.get(entry.name, "the package that brings it")
        raise BadUrl(f"{url}: {entry.name} stores need {error.name}; install {extra}") from error
    return factory


def _known() -> str:
    schemes = {*BUILT_IN, *(entry.name for entry in entry_points(group=GROUP))}
    return ", ".join(f"{scheme}:" for scheme in sorted(schemes))
