"""The engine inside a replica's process: what `stitch.engines` opens under the name `embedded`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

from stitch_core.replica.engines import EngineOptionError, OpenedEngine

from .engine import EmbeddedEngine, Options
from .selfcheck import SelfCheckError
from .server import Server
from .tokenizer import Tokenizer

KINDS = {"int | None": int, "int": int, "float": float, "str | None": str, "str": str}


async def open_engine(checkpoint: Path, options: Mapping[str, str]) -> OpenedEngine:
    """Load, check and start an engine on the running event loop; `options` are the fields of `Options`.

    Raises EngineOptionError with one line when the checkpoint or an option will not do.
    """
    try:
        parsed = read_options(options)
        engine = await asyncio.to_thread(EmbeddedEngine, checkpoint, parsed)
        tokenizer = await asyncio.to_thread(Tokenizer.of, checkpoint)
    except (ValueError, SelfCheckError) as error:
        raise EngineOptionError(str(error)) from error
    engine.start()
    return OpenedEngine(engine, Server(engine, tokenizer), engine.close)


def read_options(options: Mapping[str, str]) -> Options:
    """`Options` from text, keys with dashes or underscores. Raises ValueError naming the key."""
    kinds = {field.name: KINDS[str(field.type)] for field in fields(Options) if field.name != "label"}
    values: dict[str, object] = {}
    for key, text in options.items():
        name = key.replace("-", "_")
        if name not in kinds:
            raise ValueError(f"the embedded engine has no option {key!r}: it has {', '.join(sorted(kinds))}")
        try:
            values[name] = kinds[name](text)
        except ValueError:
            raise ValueError(f"option {key}: {text!r} is not {kinds[name].__name__}") from None
    return Options(**values)  # type: ignore[arg-type]
