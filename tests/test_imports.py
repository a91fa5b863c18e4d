"""Promise 5, independence: the core needs three packages at import, and knows no plugin."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CORE = ROOT / "stitch_core"

# Free to import more, because only those who asked for it load them.
EXEMPT = ("stitch_core.cli", "stitch_core.replica.sidecar", "stitch_core.testing")

# Imports every module it is given; reports what failed, and which imports by the core itself it had to block.
PROBE = """
import importlib, importlib.abc, json, sys, traceback

allowed = {"stitch_core", "numpy", "zstandard", "xxhash"}
allowed |= {"cffi", "_cffi_backend", "pycparser"}  # what zstandard may load in its turn
blocked = []

class OnlyAllowed(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in allowed | sys.stdlib_module_names:
            return None
        frame = sys._getframe(1)
        while "importlib" in frame.f_code.co_filename:
            frame = frame.f_back
        importer = frame.f_globals.get("__name__", "?")
        if importer.partition(".")[0] == "stitch_core":
            blocked.append(f"{importer} imports {name}")
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, OnlyAllowed())
failed = {}
for name in json.load(sys.stdin):
    try:
        importlib.import_module(name)
    except Exception:
        failed[name] = traceback.format_exc(limit=-3)
print(json.dumps({"failed": failed, "blocked": blocked}))
"""


def modules() -> list[str]:
    names = []
    for path in sorted(CORE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return [name for name in names if not any(name == e or name.startswith(e + ".") for e in EXEMPT)]


def test_core_imports_with_three_packages() -> None:
    names = modules()
    assert "stitch_core" in names
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{PROBE}"],
        input=json.dumps(names),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert not result["failed"], "\n".join(result["failed"].values())
    assert not result["blocked"], "optional imports belong inside the function that needs them"


@pytest.mark.parametrize("path", sorted(CORE.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_core_knows_no_plugin(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        plugins = [n for n in names if n.startswith("stitch_") and n.partition(".")[0] != "stitch_core"]
        assert not plugins, f"{path.relative_to(ROOT)}:{node.lineno} imports {plugins}"
