"""The public kit and the state machine on the Modal store, through the real SDK."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from stitch_core.ports import Store
from stitch_core.testing.store_machine import store_machine
from stitch_core.testing.stores import StoreTests
from stitch_modal.store import ModalStore
from tests.modal.fake import Cloud


class TestTwoContainers(StoreTests):
    writers = 4

    @pytest.fixture
    async def store(self, cloud: Cloud) -> AsyncIterator[ModalStore]:
        cloud.write({"elsewhere/k": b"not of this store"})
        store = cloud.store("a", prefix="x/y/", visible_after=0.02)
        yield store
        await store.close()
        assert cloud.committed()["elsewhere/k"] == b"not of this store"

    @pytest.fixture
    async def second_store(self, store: ModalStore, cloud: Cloud) -> AsyncIterator[ModalStore]:
        second = cloud.store("b", prefix="x/y/", visible_after=0.02)
        yield second
        await second.close()


@pytest.mark.slow
class TestBadManners(TestTwoContainers):
    """Late commits, ones that nobody asked for, lost answers, and repeated puts that are told "no"."""

    @pytest.fixture
    async def store(self, cloud: Cloud) -> AsyncIterator[ModalStore]:
        manners = cloud.manners
        manners.visible_after, manners.background, manners.skip_reload = 0.04, 0.01, False
        manners.lost_replies, manners.dedupe, manners.put_seconds = 0.05, False, 0.01
        store = cloud.store("a", visible_after=0.12)
        yield store
        await store.close()

    @pytest.fixture
    async def second_store(self, store: ModalStore, cloud: Cloud) -> AsyncIterator[ModalStore]:
        second = cloud.store("b", visible_after=0.12)
        yield second
        await second.close()


@pytest.mark.slow
class TestFromOutside(TestTwoContainers):
    """The trainer mounts the Volume, and the other handle is a machine that does not."""

    @pytest.fixture
    async def second_store(self, store: ModalStore, cloud: Cloud) -> AsyncIterator[ModalStore]:
        second = cloud.store("b", prefix="x/y/", mounted=False)
        yield second
        await second.close()


@pytest.mark.long
class TestOnlyFromOutside(TestTwoContainers):
    @pytest.fixture
    async def store(self, cloud: Cloud) -> AsyncIterator[ModalStore]:
        store = cloud.store("c", mounted=False)
        yield store
        await store.close()

    @pytest.fixture
    async def second_store(self, store: ModalStore, cloud: Cloud) -> AsyncIterator[ModalStore]:
        second = cloud.store("d", mounted=False)
        yield second
        await second.close()


@pytest.mark.parametrize(
    ("mounted", "examples"),
    [pytest.param(mounted, examples, marks=mark)
     for examples, mark in ((2, pytest.mark.slow), (30, pytest.mark.long)) for mounted in (True, False)],
)  # fmt: skip
def test_machine(cloud: Cloud, mounted: bool, examples: int) -> None:
    @contextlib.contextmanager
    def make() -> Iterator[Store]:
        cloud.reset()
        cloud.manners.background = 0.01
        yield cloud.store("a", mounted=mounted, visible_after=0.005)

    run_state_machine_as_test(
        store_machine(make),
        settings=settings(
            max_examples=examples, stateful_step_count=20, deadline=None, database=None,
            phases=[Phase.generate], suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip


# ------------------------------------------------------------------------------------- negative controls


@pytest.mark.parametrize("test", ["test_create_race_has_one_winner", "test_swap_race_has_one_winner"])
async def test_kit_catches_a_dict_without_conditions(cloud: Cloud, tmp_path: Path, test: str) -> None:
    # Puts that take effect all at once would look as if one had won: the claims are read back.
    cloud.manners.conditions, cloud.manners.put_seconds = False, 0.02
    stores = [cloud.store(name) for name in "ab"]
    method = getattr(StoreTests(), test)
    given = dict(zip(list(inspect.signature(method).parameters), stores, strict=True))
    with pytest.raises(AssertionError):
        await method(**given)
    for store in stores:
        await store.close()
