"""``stitch recipe profile``: one update of a recipe's model, measured here and projected to full size."""
