"""Writes tests/trainers/frameworks.json: names in slime and Miles that the plugins rely on.

    python scripts/trainer_fixture.py slime:REVISION=CHECKOUT miles:REVISION=CHECKOUT ...

Read from the source text, without importing it: parameters of functions, and flags. A new
revision is added by running it again with every framework that is to stay in the file.
"""

import ast
import importlib
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "tests" / "trainers" / "frameworks.json"


def parameters(checkout: Path, path: str) -> list[str] | None:
    """The parameters of ``module:Class.name`` or ``module:name``; [] for a class, None if it is not there."""
    module, _, names = path.partition(":")
    file = checkout / (module.replace(".", "/") + ".py")
    if not file.exists():
        return None
    body: list[ast.stmt] = ast.parse(file.read_text()).body
    found: ast.stmt | None = None
    for name in names.split("."):
        found = next((node for node in body if getattr(node, "name", None) == name), None)
        if found is None:
            return [] if _imported(body, name) else None
        body = getattr(found, "body", [])
    if isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef):
        arguments = found.args
        return [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return []


def _imported(body: list[ast.stmt], name: str) -> bool:
    imports = [node for node in body if isinstance(node, ast.ImportFrom)]
    return any(name == (alias.asname or alias.name) for node in imports for alias in node.names)


def flags(checkout: Path, package: str, wanted: set[str]) -> list[str]:
    """Those of ``wanted`` that the package's own argument modules add or change."""
    found: set[str] = set()
    for file in sorted((checkout / package).rglob("arguments.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call):
                found.update(str(a.value) for a in node.args if isinstance(a, ast.Constant))
    return sorted(found & wanted)


def describe(package: str, checkout: Path) -> dict[str, object]:
    symbols = importlib.import_module(f"stitch_{package}.symbols")
    paths = {symbol.path for group in symbols.GROUPS for symbol in group}
    lists = ("FLAGS", "DELTA_FLAGS", "SESSION_FLAGS")
    wanted = {flag for name in lists for flag in getattr(symbols, name, ())}
    return {
        "flags": flags(checkout, package, wanted),
        "parameters": {path: parameters(checkout, path) for path in sorted(paths)},
    }


def main() -> None:
    sys.path[:0] = [str(ROOT), *(str(ROOT / "plugins" / name) for name in ("slime", "miles"))]
    result = {}
    for word in sys.argv[1:]:
        name, _, checkout = word.partition("=")
        result[name] = describe(name.partition(":")[0], Path(checkout))
    if not result:
        sys.exit(__doc__)
    TARGET.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
