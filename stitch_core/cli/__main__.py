"""``python -m stitch_core.cli`` is ``stitch``."""

from __future__ import annotations

import sys


def entry() -> int:
    """Run ``stitch``; the exit code. The imports take a moment: an interrupt then is a quiet end, too."""
    try:
        from .main import main

        return main()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(entry())
