"""Flags of the functions that ours call, so that Miles' parser knows them too.

Miles asks a function that its flags name for flags of its own (``add_arguments``) before anything is parsed.
Ours call another one, whose name is a setting: it is read here from where that setting will come from.
"""

from __future__ import annotations

import argparse
import base64
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from stitch_core.trainers.flags import add_flags
from stitch_core.trainers.settings import PREFIX, SettingsError

INLINE = "base64:"


def adding(setting: str, default: str) -> Callable[[argparse.ArgumentParser], None]:
    """``add_arguments`` of a function of ours that calls what ``setting`` names, else ``default``."""

    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Add Stitch's flags, and the inner function's. Raises SettingsError."""
        add_flags(parser)
        path = named(setting, sys.argv[1:])
        own = getattr(_load(setting, path or default), "add_arguments", None)
        if callable(own):
            own(parser)

    return add_arguments


def named(setting: str, argv: Sequence[str]) -> str | None:
    """What the command line says of a setting: the YAML goes before the flag, as with Miles itself.

    Raises SettingsError where the YAML cannot be read, or the value is no name.
    """
    key = PREFIX + setting
    reader = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    reader.add_argument("--custom-config-path", nargs="?")
    reader.add_argument(f"--{key}".replace("_", "-"), dest="flag", nargs="?")
    given, _ = reader.parse_known_args(argv)
    values = _document(given.custom_config_path) if given.custom_config_path else {}
    path = values.get(key, given.flag)
    if path is not None and not isinstance(path, str):
        raise SettingsError(f"{key} is {path!r}: expected the dotted name of a function")
    return path


def _document(where: str) -> dict[str, Any]:
    import yaml

    try:
        inline = where.startswith(INLINE)
        text = (
            base64.b64decode(where[len(INLINE) :], validate=True).decode()
            if inline
            else Path(where).read_text(encoding="utf-8")
        )
        values = yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise SettingsError(f"--custom-config-path {where[:200]} cannot be read: {error}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise SettingsError(f"--custom-config-path {where[:200]} holds no settings, but {values!r:.80}")
    return values


def _load(setting: str, path: str) -> Any:
    from miles.utils.misc import load_function

    try:
        return load_function(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise SettingsError(
            f"{PREFIX}{setting} names {path}, which cannot be loaded: {error}; is its module on PYTHONPATH?"
        ) from error
