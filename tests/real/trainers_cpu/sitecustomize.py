"""Loads the stand-ins in processes that ask for them: Ray workers, not its slow agents."""

import os

if os.environ.get("STITCH_CPU_TRAINER") == "1":
    import missing_modules

    missing_modules.install()
    import cuda_calls

    cuda_calls.install()
    import framework

    framework.install()
