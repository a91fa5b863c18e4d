"""Every symbol of SGLang that the plugin relies on, in the pinned release."""

from __future__ import annotations

import importlib.metadata
import re

import pytest

from recipes.local.sglang_server import ROOT
from stitch_sglang import plugin, symbols

pytestmark = pytest.mark.real


@pytest.mark.parametrize("symbol", [*symbols.HOOKED, *symbols.USED], ids=lambda symbol: symbol.target)
def test_is_there_with_the_signature_that_is_relied_on(symbol: symbols.Symbol) -> None:
    symbols.check([symbol])


def test_the_pinned_release_is_the_one_that_was_run() -> None:
    pinned = re.search(r"^sglang==(\S+)", (ROOT / "requirements/sglang-no-deps.txt").read_text(), re.M)
    assert pinned is not None
    assert pinned[1] == symbols.RELEASE == importlib.metadata.version("sglang")


def test_a_missing_symbol_is_named() -> None:
    with pytest.raises(symbols.Changed, match=r"scheduler\.Scheduler\.activate_stitch is not there"):
        symbols.check([symbols.Symbol(f"{symbols.SCHEDULER}.activate_stitch")])


def test_a_changed_signature_is_named() -> None:
    with pytest.raises(symbols.Changed, match=r"Scheduler\.pause_generation has changed"):
        symbols.check([symbols.Symbol(f"{symbols.SCHEDULER}.pause_generation", ("self", "mode"))])


def test_the_document_lists_every_hook() -> None:
    text = (ROOT / "SGLANG_FORK.md").read_text()
    assert [one.target for one in symbols.HOOKED if f"`{one.target}`" not in text] == []


def test_without_settings_no_hook_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    monkeypatch.setattr("sys.argv", ["sglang", "serve"])
    for name in ("STITCH_STORE", "STITCH_RECEIVE"):
        monkeypatch.delenv(name, raising=False)
    plugin.register()
    assert not HookRegistry._hooks
