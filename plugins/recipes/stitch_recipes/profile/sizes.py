"""Full sizes of a recipe's checkpoint and images, published or by the layout."""

from __future__ import annotations

from ..layout.formats import totals
from ..schema import Recipe
from .projection import GB, Sizes


def sizes_of(recipe: Recipe) -> Sizes:
    """Bytes; what is not published is said in ``assumed``. Raises LayoutError."""
    served, ranks = recipe.served, recipe.engine.gpus
    assumed = []
    if served.canonical_gb is not None:
        canonical = served.canonical_gb * GB
    else:
        canonical = float(totals(recipe.model.geometry, served)[1])
        assumed.append("the checkpoint's bytes are the layout's")
    if served.image_gb is not None and served.image_ranks == ranks:
        image = served.image_gb * GB
    else:
        image = canonical / ranks
        assumed.append(
            "a rank's image is as large as the checkpoint"
            if ranks == 1
            else f"a rank's image is the checkpoint's share of {ranks} ranks, nothing repeated"
        )
    return Sizes(canonical, image, ranks, tuple(assumed))
