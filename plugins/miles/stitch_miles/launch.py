"""``python -m stitch_miles.launch train.py ...``: a script of Miles, as it is, on replicas of a gateway.

Revision 31f1ca961 counts no GPU for external engines and then looks for the one that their actor lies on.
Here it lies beside the trainer's first rank, as colocated engines' actors do: it asks for a fifth of a GPU
and uses none.
"""

from __future__ import annotations

import importlib
import runpy
import sys
from pathlib import Path
from typing import Any

PLACEMENT = "miles.ray.placement_group"


def place_external_engines() -> None:
    """Nothing where Miles places its groups in another way."""
    placement: Any = importlib.import_module(PLACEMENT)
    stock = getattr(placement, "_get_placement_group_layout", None)
    if stock is None:
        return

    def layout(args: Any) -> tuple[int, int]:
        gpus, offset = stock(args)
        return gpus, 0 if args.rollout_external else offset

    placement._get_placement_group_layout = layout


def main(argv: list[str]) -> None:
    """Run the script with its own arguments, as `python SCRIPT` does."""
    if not argv or not Path(argv[0]).is_file():
        sys.exit(f"{__doc__}\n{argv[0] if argv else 'no script'} is not a file here; run it where Miles lies")
    place_external_engines()
    sys.argv = argv
    sys.path.insert(0, str(Path(argv[0]).resolve().parent))
    runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
