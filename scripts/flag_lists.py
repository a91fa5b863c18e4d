"""Writes recipes/flags/<program>-<revision>.json: the flags that its own parser takes.

    python scripts/flag_lists.py slime|miles REVISION CHECKOUT MEGATRON MEGATRON-REVISION
    python scripts/flag_lists.py sglang RELEASE

The first in the environment of miles-rl, with checkouts of the framework and of the Megatron-LM that its
image builds (patched as its Dockerfile does): the framework builds its parsers, and what has no GPU is put in
its place as in tests/real/trainers_cpu. The second in that of SGLang, with tests/real/sglang_cpu on
PYTHONPATH. Nothing is guessed from source text.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "recipes" / "flags"
Table = dict[str, dict[str, Any]]


def of_trainer(framework: str, checkout: str, megatron: str) -> Table:
    """What the framework's parsers take, in all of its passes."""
    cpu = ROOT / "tests" / "real" / "trainers_cpu"
    sys.path[:0] = [checkout, megatron, str(ROOT), str(cpu)]
    os.environ.update(SLIME_ACCELERATOR="cputest", CUDA_DEVICE_MAX_CONNECTIONS="1")
    for name in ("missing_modules", "cuda_calls", "framework"):
        importlib.import_module(name).install()
    arguments = importlib.import_module(f"{framework}.utils.arguments")
    table: Table = {}
    stock = argparse.ArgumentParser.parse_known_args

    def parse(parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        table.update(described(parser))
        return stock(parser, *args, **kwargs)

    sys.argv = ["train.py", "--rollout-batch-size", "1"]
    argparse.ArgumentParser.parse_known_args = parse  # type: ignore[method-assign,assignment]
    said = "it ended"
    try:
        arguments.parse_args()
    except (Exception, SystemExit) as error:  # what it validates afterwards does not matter here
        said = repr(error)
    if missing := {"hf-checkpoint", "tensor-model-parallel-size"} - set(table):
        sys.exit(f"its parsers did not come to --{', --'.join(sorted(missing))}: {said}")
    # Flags of engines that the trainer would start itself: there are none.
    ours = ("sglang-router-", "sglang-server-concurrency")
    return {name: entry for name, entry in table.items() if "sglang-" not in name or name.startswith(ours)}


def of_functions(framework: str) -> dict[str, Table]:
    """Flags that the framework's own generate functions add to its parser, by the function's path."""
    if framework != "miles":
        return {}
    found = {}
    for name in ("agentic_tool_call", "multi_turn"):
        module = f"miles.rollout.generate_hub.{name}"
        parser = argparse.ArgumentParser(add_help=False)
        importlib.import_module(module).generate.add_arguments(parser)
        found[f"{module}.generate"] = described(parser)
    return found


def of_engine() -> Table:
    """What ``sglang serve`` takes."""
    parser = argparse.ArgumentParser()
    importlib.import_module("sglang.srt.server_args").ServerArgs.add_cli_args(parser)
    return described(parser)


def described(parser: argparse.ArgumentParser) -> Table:
    """Each option with how many values it takes, their type, and their choices where it has some."""
    table: Table = {}
    for action in parser._actions:
        entry: dict[str, Any] = {"nargs": 1 if action.nargs is None else action.nargs}
        if action.type is not None:
            entry["type"] = getattr(action.type, "__name__", "function")
        if action.choices is not None:
            entry["choices"] = sorted((getattr(choice, "name", choice) for choice in action.choices), key=str)
        table.update({option[2:]: entry for option in action.option_strings if option.startswith("--")})
    return table


def compact(head: dict[str, Any], table: Table) -> str:
    """JSON with one flag a line, so that a new revision shows as a diff of flags."""
    flags = ",\n".join(f"  {json.dumps(name)}: {json.dumps(table[name])}" for name in sorted(table))
    said = "".join(f" {json.dumps(key)}: {json.dumps(value)},\n" for key, value in head.items())
    return f'{{\n{said} "flags": {{\n{flags}\n }}\n}}\n'


def main(program: str, revision: str, *paths: str) -> None:
    head: dict[str, Any] = {"program": program, "revision": revision}
    if program == "sglang":
        table = of_engine()
    else:
        checkout, megatron, megatron_revision = paths
        table = of_trainer(program, checkout, megatron)
        head["megatron"] = megatron_revision
        head["functions"] = of_functions(program)
        head["model_scripts"] = sorted(path.stem for path in Path(checkout, "scripts/models").glob("*.*"))
    file = TARGET / f"{program}-{revision}.json"
    file.write_text(compact(head, table))
    print(f"{file}: {len(table)} flags")


if __name__ == "__main__":
    if len(sys.argv) not in (3, 6):
        sys.exit(__doc__)
    main(*sys.argv[1:])
