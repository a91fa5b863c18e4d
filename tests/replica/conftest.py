import pytest

from tests.replica.scripted import Replica


@pytest.fixture
async def replica() -> Replica:
    """A gate that serves r/weight_v000007 in front of a scripted engine."""
    return Replica()
