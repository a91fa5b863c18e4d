"""The names in slime and Miles that the plugins rely on, in every revision that is said to be supported."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

from stitch_core.trainers.signatures import FrameworkChanged, Symbol, probe, require, table
from stitch_miles import symbols as miles
from stitch_slime import symbols as slime

ROOT = Path(__file__).resolve().parents[2]
FRAMEWORKS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("frameworks.json").read_text())
NEEDED = [
    ("slime:624b824a8", (slime.TRAINER, slime.ROLLOUT), slime.FLAGS),
    (
        "miles:31f1ca961",
        (miles.COMMON, miles.DELTA, miles.ROLLOUT, miles.BUFFER, miles.SESSION_SERVER),
        (*miles.FLAGS, *miles.DELTA_FLAGS, *miles.SESSION_FLAGS),
    ),
    ("miles:0.0.2", (miles.COMMON, miles.GATHER, miles.ROLLOUT), miles.FLAGS),
]
# How the frameworks call each hook: positional arguments, then keywords.
CALLS = [
    ("stitch_core.trainers.hooks:post_write", 3, ()),
    ("stitch_core.trainers.hooks:before_train_step", 6, ()),
    ("stitch_slime.hooks:megatron_init", 1, ()),
    ("stitch_miles.hooks:megatron_init", 1, ()),
    ("stitch_slime.rollout:generate_rollout", 3, ("evaluation",)),
    ("stitch_slime.rollout:generate", 3, ("evaluation",)),
    ("stitch_slime.rollout:record_version", 2, ("rollout_id", "evaluation")),
    ("stitch_miles.rollout:generate_rollout", 3, ("evaluation",)),
    ("stitch_miles.rollout:generate", 1, ()),
    ("stitch_miles.session:postprocess", 2, ()),
]


@pytest.mark.parametrize(("name", "groups", "flags"), NEEDED, ids=[name for name, _, _ in NEEDED])
def test_symbols_and_flags_are_there(name: str, groups: Any, flags: tuple[str, ...]) -> None:
    framework = FRAMEWORKS[name]
    for symbol in (symbol for group in groups for symbol in group):
        found = framework["parameters"][symbol.path]
        assert found is not None, f"{name} has no {symbol.path}"
        if symbol.parameters is not None:
            assert tuple(found[: len(symbol.parameters)]) == symbol.parameters, symbol.path
    assert set(flags) <= set(framework["flags"])


@pytest.mark.parametrize(("path", "positional", "keywords"), CALLS)
def test_hooks_take_what_the_frameworks_pass(path: str, positional: int, keywords: tuple[str, ...]) -> None:
    module, _, name = path.partition(":")
    package = module.partition(".")[0]
    folder = ROOT if package == "stitch_core" else ROOT / "plugins" / package.removeprefix("stitch_")
    tree = ast.parse((folder / (module.replace(".", "/") + ".py")).read_text())
    function = next(node for node in tree.body if getattr(node, "name", None) == name)
    assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
    places = [a.arg for a in function.args.args]
    required = len(places) - len(function.args.defaults)
    assert required <= positional <= len(places)
    assert set(keywords) <= {*places[positional:], *(a.arg for a in function.args.kwonlyargs)}


def test_a_changed_or_missing_symbol_is_named_in_one_table() -> None:
    symbols = [
        Symbol("stitch_core.trainers.record:load_record", ("load", "rollout_id"), "fine"),
        Symbol("stitch_core.trainers.record:save_record", ("other",), "renamed"),
        Symbol("stitch_core.trainers.record:gone", None, "missing"),
        Symbol("stitch_core.nowhere:gone", None, "extra", optional=True),
    ]
    findings = probe(symbols)
    assert [finding.status for finding in findings] == ["ok", "changed", "absent", "absent"]
    text = table("plugin", findings)
    assert "renamed  changed stitch_core.trainers.record:save_record  takes (save, record, files)" in text
    assert "extra    off     stitch_core.nowhere:gone" in text
    with pytest.raises(FrameworkChanged) as caught:
        require("plugin", findings)
    first = str(caught.value).splitlines()[0]
    assert "record:save_record" in first
    assert "record:gone" in first
    assert "nowhere" not in first
    require("plugin", findings[:1])


@pytest.mark.parametrize(
    ("heading", "framework", "flags"),
    [
        ("## slime", "slime", slime.FLAGS),
        ("## Miles", "miles", (*miles.FLAGS, *miles.DELTA_FLAGS)),
    ],
)
def test_the_launch_scripts_in_the_docs_use_flags_and_functions_that_are_there(
    heading: str, framework: str, flags: tuple[str, ...]
) -> None:
    text = (ROOT / "docs" / "trainers.md").read_text().partition(f"{heading}\n")[2].partition("\n## ")[0]
    added = [line[1:] for line in text.splitlines() if line.startswith("+")]
    assert len(added) > 5
    written = {word for line in added for word in re.findall(r"--[a-z-]+", line)}
    assert written - {"--rollout-num-gpus"} <= set(flags)
    names = set(re.findall(rf"(?<!python -m )stitch_{framework}\.[a-z_.]+[A-Za-z]*", text))
    assert len(names) > 4
    for name in names:
        module, _, function = name.rpartition(".")
        tree = ast.parse((ROOT / "plugins" / framework / (module.replace(".", "/") + ".py")).read_text())
        targets = [node.targets[0] for node in tree.body if isinstance(node, ast.Assign)]
        found = {getattr(node, "name", None) for node in tree.body} | {
            getattr(t, "id", None) for t in targets
        }
        assert function in found, name
