"""A URL picks a store; what cannot be opened says what to do."""

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import stitch_core.plugins
from stitch_core.stores import BadUrl, open_store
from stitch_core.stores.local import LocalStore
from stitch_core.stores.memory import MemoryStore


@pytest.mark.parametrize(
    ("url", "root"),
    [
        ("file:/data/store", "/data/store"),
        ("file:///data/store/", "/data/store"),
        ("file://localhost/data", "/data"),
        ("file:/with%20blank%23", "/with blank#"),
    ],
)
def test_directories(url: str, root: str) -> None:
    store = open_store(url)
    assert isinstance(store, LocalStore)
    assert store.root == Path(root)


def test_relative_directories_are_fixed_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = open_store("file:out/../store")
    monkeypatch.chdir("/")
    assert isinstance(store, LocalStore)
    assert store.root == tmp_path / "store"


async def test_memory_stores_share_by_name() -> None:
    one, same, other = (open_store(f"memory://{name}") for name in ("test-open", "test-open", "test-other"))
    assert isinstance(one, MemoryStore)
    await one.create("k", b"data")
    assert await same.read("k") == b"data"
    assert await other.list("") == []


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("file://data/store", "write file:/path"),
        ("file:", "write file:/path"),
        ("file:/data?x=1", r"\? and # as %3F"),
        ("file:/data%00", "write file:/path"),
        ("/data/store", "written file:/path"),
        ("", "not a store URL"),
        ("ftp://host/dir", r"there is no store 'ftp' here \(known: .*file, memory"),
    ],
)
def test_bad_urls(url: str, message: str) -> None:
    with pytest.raises(BadUrl, match=message):
        open_store(url)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> list[EntryPoint]:
    entries: list[EntryPoint] = []

    def find(group: str, name: str | None = None) -> list[EntryPoint]:
        assert group == "stitch.stores"
        return [entry for entry in entries if name in (None, entry.name)]

    monkeypatch.setattr(stitch_core.plugins, "entry_points", find)
    return entries


def test_an_extra_that_is_not_installed_is_named(
    registered: list[EntryPoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    scheme = "tape"
    monkeypatch.setitem(stitch_core.plugins.ELSEWHERE, "stitch.stores", (scheme,))
    with pytest.raises(BadUrl, match=rf"no store '{scheme}' here .* it comes with 'stitch-rl\[{scheme}\]'"):
        open_store(f"{scheme}://bucket/prefix")
    registered.append(EntryPoint(scheme, "module_that_nobody_has:open_url", "stitch.stores"))
    with pytest.raises(BadUrl, match=rf"needs module_that_nobody_has: pip install 'stitch-rl\[{scheme}\]'"):
        open_store(f"{scheme}://bucket/prefix")


def test_a_plugin_brings_a_scheme(registered: list[EntryPoint]) -> None:
    registered.append(EntryPoint("mine", "stitch_core.stores.memory:open_url", "stitch.stores"))
    assert isinstance(open_store("mine://x"), MemoryStore)
    with pytest.raises(BadUrl, match=r"known: file, m.*, mine\b"):
        open_store("yours://x")
