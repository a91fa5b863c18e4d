"""A wake is a hint: whatever becomes of it, the version is published, and nobody waits for it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from stitch_core.policy_publisher import PolicyPublisher
from stitch_core.ports import Store, StoreError
from stitch_core.replica.auth import BadTokens
from stitch_core.stores.memory import MemoryStore
from stitch_core.waking import FILE_VARIABLE, VARIABLE, BadWakeUrl, Waker, wake_urls
from tests.small_run import FaultyStore, Trainer
from tests.woken import Woken

LONG = 600.0
TOKEN = "wake-token-0123456789"


@pytest.fixture
def server() -> Iterator[Woken]:
    with Woken().running() as running:
        yield running


@pytest.fixture
def hung() -> Iterator[Woken]:
    with Woken(hangs=True).running() as running:
        yield running


def finished(waker: Waker) -> None:
    for bell in waker._bells:
        assert bell.idle.wait(60)


@pytest.mark.parametrize(
    ("given", "urls"),
    [
        ([], ()),
        ("http://a:1", ("http://a:1",)),
        ("http://a:1, https://b/pool/", ("http://a:1", "https://b/pool")),
        (["http://a:1/wake", "http://[::1]:2", "http://a:1"], ("http://a:1", "http://[::1]:2")),
    ],
)
def test_urls(given: object, urls: tuple[str, ...]) -> None:
    assert wake_urls(given) == urls


@pytest.mark.parametrize(
    "given",
    [
        "",
        "gw:30000",
        "http://",
        "http://a:99999",
        "ftp://a",
        "http://a b",
        "http://a?x=1",
        "http://a,",
        7,
        [7],
        {},
    ],
)
def test_what_is_no_url_is_refused(given: object) -> None:
    with pytest.raises(BadWakeUrl, match=r"cannot be woken: expected the URL of a gateway"):
        wake_urls(given)


def test_a_password_in_a_url_is_refused_and_not_repeated() -> None:
    with pytest.raises(BadWakeUrl, match=f"put the token into {VARIABLE}") as caught:
        wake_urls("http://me:secret@a:1")
    assert "secret" not in str(caught.value)


def test_the_token_of_the_environment_and_of_a_file_that_changes(server: Woken, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}-file\n")
    for waker in (
        Waker.given([server.url], environ={}),
        Waker.given([server.url], environ={VARIABLE: TOKEN}),
        Waker.given([server.url], environ={VARIABLE: TOKEN, FILE_VARIABLE: str(file)}),
        Waker.given([f"{server.url}/pool"], file, {}),
    ):
        waker.wake()
        finished(waker)
    assert server.calls == [
        ("/wake", None), ("/wake", f"Bearer {TOKEN}"), ("/wake", f"Bearer {TOKEN}-file"),
        ("/pool/wake", f"Bearer {TOKEN}-file"),
    ]  # fmt: skip


def test_a_token_that_cannot_be_one_is_refused_at_start(tmp_path: Path) -> None:
    with pytest.raises(BadTokens, match=VARIABLE):
        Waker.given(["http://a:1"], environ={VARIABLE: "short"})
    with pytest.raises(OSError, match="nothing"):
        Waker.given(["http://a:1"], tmp_path / "nothing", {})
    Waker.given([], environ={VARIABLE: "short"})  # nobody is shown it


def test_wakes_that_come_while_one_is_under_way_are_one_more(hung: Woken) -> None:
    waker = Waker([hung.url], seconds=LONG)
    waker.wake()
    hung.until(lambda: len(hung.calls) == 1)
    for _ in range(5):
        waker.wake()
    hung.go.set()
    finished(waker)
    assert len(hung.calls) == 2


@pytest.mark.parametrize(
    ("status", "why"),
    [(401, f"it answered 401, it wants a token of the role generate: {VARIABLE}"), (500, "it answered 500")],
)
def test_a_server_that_refuses_is_said_once(status: int, why: str, caplog: pytest.LogCaptureFixture) -> None:
    with Woken(status).running() as server:
        waker = Waker([server.url])
        for wanted in (1, 1, 1, 2):
            if wanted == 2:  # it took one, and refuses again: that is news
                server.status = 202
                waker.wake()
                finished(waker)
                server.status = status
            waker.wake()
            finished(waker)
            assert caplog.text.count(f"{server.url} is not woken by new versions") == wanted
        assert why in caplog.text
        assert {record.levelno for record in caplog.records} == {logging.WARNING}


def test_nobody_listens_hangs_or_speaks_tls(hung: Woken, caplog: pytest.LogCaptureFixture) -> None:
    gone = Woken()
    with gone.running():
        pass
    waker = Waker([gone.url, hung.url, hung.url.replace("http:", "https:")], seconds=0.2)
    waker.wake()
    finished(waker)
    assert len(caplog.records) == 3
    assert "refused" in caplog.text
    assert "timed out" in caplog.text


# --------------------------------------------------------------------------------------- the publisher


def publisher(trainer: Trainer, *urls: str, store: Store | None = None) -> PolicyPublisher:
    return PolicyPublisher(
        lambda: store or MemoryStore(),
        trainer.run,
        trainer.boot,
        trainer.root / "work",
        producer={},
        wake=urls,
    )


def test_every_version_wakes(tmp_path: Path, server: Woken) -> None:
    trainer = Trainer(tmp_path)
    with publisher(trainer, server.url) as publishing:
        for number in (1, 2, 3):
            assert publishing.publish(trainer.learn()).result(60).number == number
            server.until(lambda number=number: len(server.calls) == number)  # type: ignore[misc]
    assert set(server.calls) == {("/wake", None)}


def test_a_server_that_hangs_delays_no_publish(tmp_path: Path, server: Woken, hung: Woken) -> None:
    trainer = Trainer(tmp_path)
    with publisher(trainer) as publishing:
        publishing._waker = waker = Waker([hung.url, server.url], seconds=LONG)
        for number in (1, 2, 3):
            assert publishing.publish(trainer.learn()).result(60).number == number
            server.until(lambda number=number: len(server.calls) == number)  # type: ignore[misc]
        assert len(hung.calls) == 1
        assert not waker._bells[0].idle.is_set()
        hung.go.set()


def test_no_publish_fails_for_a_server_that_is_gone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = Trainer(tmp_path)
    with publisher(trainer, "http://127.0.0.1:1") as publishing:
        assert publishing.publish(trainer.learn()).result(60).number == 1
        publishing.flush()
    assert "http://127.0.0.1:1 is not woken by new versions" in caplog.text


def test_the_store_is_asked_no_more(tmp_path: Path, server: Woken) -> None:
    calls = []
    for urls in ((), (server.url,)):
        trainer, store = Trainer(tmp_path / str(len(urls))), FaultyStore(MemoryStore())
        with publisher(trainer, *urls, store=store) as publishing:
            for _ in range(3):
                publishing.publish(trainer.learn()).result(60)
        calls.append(sorted(store.calls))
    assert calls[0] == calls[1]
    assert server.calls


def test_nothing_wakes_for_a_publish_that_fails(tmp_path: Path, server: Woken) -> None:
    trainer, store = Trainer(tmp_path), FaultyStore(MemoryStore())
    with publisher(trainer, server.url, store=store) as publishing:
        store.fail = lambda index, name, key: StoreError("disk full") if "v000001" in key else None
        assert publishing.publish(trainer.learn()).exception(60) is not None
        assert publishing.publish(trainer.learn()).result(60).number == 2
        publishing._waker.flush()
    assert len(server.calls) == 1


def test_what_is_no_url_is_refused_before_the_claim(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    with pytest.raises(BadWakeUrl, match="'gateway' cannot be woken"):
        PolicyPublisher.start(
            f"file:{tmp_path}/store", "r", trainer.boot, tmp_path / "work", wake=["gateway"]
        )
    assert not (tmp_path / "store").exists()
