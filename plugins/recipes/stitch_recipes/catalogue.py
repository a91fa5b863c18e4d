"""The recipes that there are, composed from ``recipes/models/*.toml``.

A file describes one model: ``[model]``, ``[checkpoints.<name>]``, and ``[recipes.<name>]`` for each recipe.
What several recipes say alike is a block, ``[blocks.<name>]`` of ``recipes/blocks.toml`` or the file itself.
A recipe or a block names its blocks in ``uses``; they are merged in that order, then its own tables: tables
key by key, all else replaced.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from .errors import RecipeError, describe
from .schema import Recipe

SHARED = "blocks.toml"
LARGEST = 4 << 20
"""Bytes of a file that is read."""


def home() -> Path:
    """The directory ``recipes``: the package's own copy where it is installed, the clone's otherwise."""
    packaged = Path(str(resources.files(__package__))) / "recipes"
    return packaged if packaged.is_dir() else Path(__file__).parents[3] / "recipes"


def names() -> list[str]:
    """Every recipe, as <file>/<table>."""
    return [name for file in sorted((home() / "models").glob("*.toml")) for name in _names(file)]


def load(name: str) -> Recipe:
    """The recipe of that name; or ``PATH.toml/<table>``: a file of one's own; or a rendered ``run.yaml``.

    Raises RecipeError.
    """
    if name.endswith(".yaml"):
        return rendered(Path(name))
    if name.endswith(".toml"):
        there = ", ".join(_names(Path(name))) or "none"
        raise RecipeError(f"{name} is a file of recipes: name one of them as {name}/NAME; there are: {there}")
    file, _, table = name.rpartition("/")
    if not file:
        raise RecipeError(f"{name!r} is not <model>/<recipe>; there are: {', '.join(names())}")
    path = Path(file) if file.endswith(".toml") else home() / "models" / f"{file}.toml"
    if file.endswith(".toml") and not path.is_file():
        raise RecipeError(f"{path}: there is no such file")
    if not path.is_file():
        raise RecipeError(f"there is no recipe {name}; there are: {', '.join(names())}")
    return of_document(read_toml(path), read_toml(home() / SHARED), table, path)


def rendered(path: Path) -> Recipe:
    """The recipe in a file that ``stitch recipe render --for modal`` made. Raises RecipeError."""
    try:
        document = yaml.safe_load(_read(path))
    except (UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise RecipeError(f"{path}: {error}") from error
    if not isinstance(document, dict) or "recipe" not in document:
        raise RecipeError(f"{path}: no recipe in it: is it the run.yaml of a rendered Modal app?")
    try:
        return Recipe.model_validate(document["recipe"])
    except ValidationError as error:
        raise RecipeError(describe(f"{path} recipe", error)) from error


def of_document(document: Mapping[str, Any], shared: Mapping[str, Any], table: str, path: Path) -> Recipe:
    """The recipe ``table`` of a model's file that was read from ``path``. Raises RecipeError."""
    recipes = _tables(document, "recipes", str(path))
    if table not in recipes:
        raise RecipeError(f"{path} has no recipe {table!r}; it has: {', '.join(recipes) or 'none'}")
    composed = compose(document, shared, table, str(path))
    try:
        return Recipe.model_validate({**composed, "name": f"{path.stem}/{table}"})
    except ValidationError as error:
        raise RecipeError(describe(f"{path} [recipes.{table}]", error)) from error


def compose(document: Mapping[str, Any], shared: Mapping[str, Any], table: str, where: str) -> dict[str, Any]:
    """The recipe ``table`` of a file's document as one tree, blocks merged. Raises RecipeError."""
    unknown_keys = set(document) - {"model", "checkpoints", "blocks", "recipes"}
    if unknown_keys:
        raise RecipeError(f"{where}: {', '.join(sorted(unknown_keys))}: no such table in a model's file")
    blocks = {**_tables(shared, "blocks", SHARED), **_tables(document, "blocks", where)}
    base: dict[str, Any] = {key: document[key] for key in ("model", "checkpoints") if key in document}
    own = _tables(document, "recipes", where)[table]
    return merged(base, _expanded(own, blocks, f"{where} [recipes.{table}]", ()))


def _expanded(
    own: Mapping[str, Any], blocks: Mapping[str, Any], where: str, above: tuple[str, ...]
) -> dict[str, Any]:
    """A recipe or a block with all blocks that it uses below it."""
    tree: dict[str, Any] = {}
    uses = own.get("uses", [])
    if not isinstance(uses, list) or not all(isinstance(name, str) for name in uses):
        raise RecipeError(f"{where}: uses = {uses!r}: a list of names of blocks is meant")
    for name in uses:
        if name not in blocks or name in above:
            raise RecipeError(f"{where} uses {name!r}: " + ("itself" if name in above else "no such block"))
        tree = merged(tree, _expanded(blocks[name], blocks, f"{where} > {name}", (*above, name)))
    return merged(tree, {key: value for key, value in own.items() if key != "uses"})


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """``above`` over ``below``: tables key by key, all else replaced."""
    result = dict(below)
    for key, value in above.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merged(result[key], value) if both else value
    return result


def _names(file: Path) -> Iterator[str]:
    return (f"{file.stem}/{table}" for table in _tables(read_toml(file), "recipes", str(file)))


def _tables(document: Mapping[str, Any], key: str, where: str) -> dict[str, dict[str, Any]]:
    """Tables by name, which may be left out. Raises RecipeError for anything else there."""
    tables = document.get(key, {})
    if not isinstance(tables, dict):
        raise RecipeError(f"{where}: {key} = {tables!r}: tables [{key}.NAME] are meant")
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise RecipeError(f"{where}: {key}.{name} = {table!r}: a table is meant")
    return tables


def read_toml(path: Path) -> dict[str, Any]:
    """A document, with or without the mark that some editors put first. Raises RecipeError with the file."""
    try:
        return tomllib.loads(_read(path))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise RecipeError(f"{path}: {error}") from error


def _read(path: Path) -> str:
    """A file's text. Raises RecipeError for one that cannot be read, or that is too long to be a recipe."""
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST + 1)
    except OSError as error:
        raise RecipeError(f"{path}: {error.strerror}") from error
    if len(content) > LARGEST:
        raise RecipeError(f"{path}: more than {LARGEST >> 20} MiB, which is no recipe")
    return content.decode("utf-8-sig")
