"""Records of replicas that are gone, by the dates of an S3 server."""

from __future__ import annotations

import json
import random
import time

import pytest

from stitch_core.hints import abandoned
from stitch_core.retry import Retry
from tests.s3.fake import FakeS3

DAY = 24 * 3600.0


@pytest.mark.parametrize("grace", [3600.0, 3 * DAY])
async def test_by_its_own_dates_and_the_servers(fake: FakeS3, grace: float) -> None:
    store, now = fake.store(), time.time()
    records = {
        "dead": {"time": now - 2 * DAY - 15, "expires": now - 2 * DAY},
        "late": {
            "time": now - 2 * DAY - 15,
            "expires": now - 2 * DAY,
        },  # its clock is, it was written just now
        "alive": {"time": now, "expires": now + 15},
    }
    try:
        for name, record in records.items():
            await store.replace(f"replicas/{name}.json", json.dumps({"id": name, **record}).encode())
        fake.objects["replicas/dead.json"].written -= 2 * DAY
        fake.requests.clear()
        found = await abandoned(
            store, "r", now=now, grace=grace, policy=Retry(attempts=1), rng=random.Random(0)
        )
        # A look at the dates of those alone that look old: nothing more for a fleet that lives.
        assert fake.requests == {"GET": 4, **({"HEAD": 2} if grace < DAY else {})}
    finally:
        await store.close()
    assert list(found) == (["replicas/dead.json"] if grace < DAY else [])
