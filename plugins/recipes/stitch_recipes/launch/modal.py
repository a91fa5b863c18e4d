"""Modal: an app to read and to run, and the recipe and the site beside it."""

from __future__ import annotations

import re
from importlib import resources

from .. import training
from ..errors import RecipeError
from ..schema import Recipe
from ..site import Site
from .common import alone, dumped, together
from .files import File

RESERVED = ("/", "/root", "/tmp")


def render(recipe: Recipe, site: Site) -> list[File]:
    """app.py and run.yaml. Raises RecipeError for what Modal refuses."""
    if site.store.startswith("file:"):
        raise RecipeError(f"{site.store} is a directory, which containers do not share: use modal: or s3:")
    places = {"models": site.models, "data": site.data, "saves": site.saves}
    for field, place in places.items():
        if place in RESERVED:
            raise RecipeError(f"the site's {field} = {place!r}: Modal mounts no Volume there")
    if len(set(places.values())) < len(places):
        raise RecipeError("the site's models, data and saves are Volumes, each at a place of its own")
    training.environment(recipe, site)  # what the site lacks is told here, not in a container
    text = (resources.files(__package__) / "scripts" / "app.py.txt").read_text("utf-8")
    text = _part(text, "open", site.modal_proxy_secret is None)
    text = _part(text, "closed", site.modal_proxy_secret is not None)
    text = _part(text, "compactor", recipe.versions.compact)
    text = _part(text, "convert", any(step.gpus for step in alone(recipe, site)))
    text = _part(text, "together", bool(together(recipe, site)))
    text = _part(text, "trainer", recipe.trainer is not None)
    text = _part(text, "serving", recipe.trainer is None)
    run = {
        "recipe": recipe.model_dump(mode="json", exclude_none=True),
        "site": site.model_dump(exclude_none=True),
    }
    note = (
        "# What app.py reads, here and in every container: the recipe with its blocks merged, and the site.\n"
    )
    return [File("app.py", text), File("run.yaml", note + dumped(run))]


def _part(text: str, name: str, wanted: bool) -> str:
    """Between its two marks, with or without them."""
    inner = r"\2" if wanted else ""
    return re.sub(rf"( *)# <{name}>\n(.*?)\1# </{name}>\n", inner, text, flags=re.DOTALL)
