"""``python -m stitch_core.cli`` is ``stitch``."""

import sys

from .main import main

sys.exit(main())
