"""Wait until a gateway has replicas: the gate before training, which stands still without them.

    python3 -m stitch_recipes.launch.ready http://gateway:30000 --replicas 4 --seconds 7200

Needs nothing but Python, so that it runs on any of the images. Exits with 1 when the time is over.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
import urllib.request

POLL_SECONDS = 5.0


def replicas(url: str) -> int:
    """Of a gateway: how many replicas are ready; 0 where it does not answer."""
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=10) as answer:
            return int(json.load(answer)["replicas"])
    except (OSError, ValueError, KeyError, TypeError):  # 503, not listening, not a gateway
        return 0


def wait(url: str, count: int, seconds: float) -> bool:
    """Whether so many were ready within so long."""
    until, last = time.monotonic() + seconds, -1
    while True:
        found = replicas(url)
        if found != last:
            print(f"{found} of {count} replicas ready at {url}", file=sys.stderr, flush=True)
        if found >= count:
            return True
        if time.monotonic() >= until:
            print(
                f"not {count} after {seconds:g} s: {url}/status says why each is out", file=sys.stderr
            )  # fmt: skip
            return False
        last = found
        time.sleep(POLL_SECONDS * random.uniform(0.8, 1.2))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url", metavar="URL", help="the gateway")
    parser.add_argument("--replicas", type=int, default=1, metavar="N", help="how many to wait for (1)")
    parser.add_argument("--seconds", type=float, default=7200, metavar="S", help="and for how long (7200)")
    options = parser.parse_args()
    return 0 if wait(options.url.rstrip("/"), options.replicas, options.seconds) else 1


if __name__ == "__main__":
    sys.exit(main())
