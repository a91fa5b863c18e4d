"""The sidecar before a server that has a real one's manners, over real sockets."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stitch_core.checkpoint import Checkpoint
from stitch_core.files import PosixFiles
from stitch_core.ports import EngineError, EngineRefused, EngineUncertain, SystemClock
from stitch_core.replica.activation import ActivationSettings
from stitch_core.replica.admission import Gate
from stitch_core.replica.engines import EngineOptionError
from stitch_core.replica.middleware import StitchMiddleware
from stitch_core.replica.probe_prompt import prompt
from stitch_core.replica.server import listen, serve
from stitch_core.replica.sidecar import HttpEngine, Link, ReverseProxy, open_server
from stitch_core.testing.asgi_client import AsgiClient
from stitch_core.testing.checkpoints import random_tensors, step, write_checkpoint
from stitch_core.testing.engines import Boot, EngineTests, Served, changed
from stitch_core.testing.fake_engine import FakeEngine
from stitch_core.testing.fake_server import FakeServer, Manners
from stitch_core.versions import PolicyVersion
from tests.replica.following import Following

V1, V2 = PolicyVersion("r", 1), PolicyVersion("r", 2)

pytestmark = pytest.mark.usefixtures("quick_ends")


@pytest.fixture
def checkpoints(tmp_path: Path) -> tuple[Path, Path, Path]:
    rng = np.random.default_rng(1)
    tensors = random_tensors(rng)
    paths = (tmp_path / "0", tmp_path / "1", tmp_path / "2")
    for path in paths:
        write_checkpoint(path, PosixFiles(), tensors)
        tensors = step(rng, tensors, 0.05)
    return paths


class Sidecar:
    """A server behind a sidecar, with no reconciler: the test is the one who activates."""

    def __init__(self, boot: Path, link: Link, *, grace: float = 30.0, **manners: Any) -> None:
        self.link = link
        self.fake = FakeEngine(boot, separate=False)
        self.manners = Manners(**manners)
        self.listener = listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.engine = HttpEngine(link, self.url, control_timeout=60, update_timeout=60, vocabulary=256)
        self.proxy = ReverseProxy(link.session, self.url)
        self.gate = Gate(SystemClock(), hold=0.2)
        self.mismatches: list[str] = []
        app = StitchMiddleware(
            self.proxy, self.gate, status=dict, wake=lambda: None, mismatch=self._mismatch,
            abort=self.engine.abort, cache_key=True, grace=0.2, vouch=self.engine.vouch,
        )  # fmt: skip
        self.client = AsgiClient(app)
        self.server = FakeServer(self.fake, self.manners)
        self._grace = grace
        self._listen()

    def _listen(self) -> None:
        self._end = asyncio.Event()
        self._serving = asyncio.ensure_future(serve(self.server, self.listener, self._end, grace=self._grace))

    async def restart(self, checkpoint: Path, label: str) -> None:
        """Another process at the same address, with these weights and this label (``--weight-version``)."""
        await self.close()
        self.fake.boot = checkpoint
        self.fake.restart()
        self.fake.label = label
        self.listener = listen("127.0.0.1", int(self.url.rpartition(":")[2]))
        self._listen()

    def _mismatch(self, reason: str) -> None:
        self.mismatches.append(reason)
        self.gate.forget(reason)

    async def activate(self, checkpoint: Path, version: PolicyVersion, mode: Any = "in_place") -> None:
        await self.engine.prepare(checkpoint, changed(self.fake.boot, checkpoint))
        self.gate.close("activating")
        await self.engine.pause(mode)
        await self.engine.activate(str(version))
        assert (await self.engine.identity()).label == str(version)
        await self.engine.resume()
        self.gate.open(version)

    async def last_tokens(self) -> None:
        """Requests that run end, by length, with tokens under the label that the server has now."""
        for request in list(self.fake.requests):
            await until(lambda request=request: self.fake.label in request.labels)
            request.max_new_tokens = len(request.output) + 1

    async def generate(self, tokens: int = 8, **fields: Any) -> Any:
        body = {"text": "hello", "sampling_params": {"max_new_tokens": tokens}, **fields}
        return await self.client.post("/generate", body)

    async def close(self) -> None:
        self._end.set()
        await self._serving
        self.listener.close()


@pytest.fixture
async def link() -> AsyncIterator[Link]:
    made = Link()
    yield made
    await made.close()


@pytest.fixture
async def sidecar(checkpoints: tuple[Path, ...], link: Link) -> AsyncIterator[Sidecar]:
    made = Sidecar(checkpoints[0], link)
    await made.activate(checkpoints[0], PolicyVersion("r", 0))
    try:
        yield made
    finally:
        await made.close()


@pytest.mark.slow
class TestHttpEngine(EngineTests):
    """The port's promises, kept across HTTP by a server that knows nothing of them."""

    @pytest.fixture
    async def boot(self, link: Link) -> AsyncIterator[Boot]:
        sidecars: list[Sidecar] = []

        async def boot(checkpoint: Path) -> Served:
            sidecars.append(Sidecar(checkpoint, link))
            return Served(sidecars[-1].engine, sidecars[-1].proxy, checkpoint)

        yield boot
        await asyncio.gather(*(made.close() for made in sidecars))

    @pytest.fixture
    def checkpoints(self, checkpoints: tuple[Path, Path, Path]) -> tuple[Path, Path, Path]:
        return checkpoints

    def body(self, label: str, **fields: Any) -> dict[str, Any]:
        return {**fields, "extra_key": label}


# ------------------------------------------------------------------------------------------- the proxy


async def test_answers_and_streams_come_through(sidecar: Sidecar) -> None:
    call = await sidecar.generate(rid="mine")
    meta = call.json()["meta_info"]
    assert (meta["id"], meta["weight_version"], meta["run"]) == ("mine", "0", "r")
    stream = await sidecar.generate(stream=True)
    *_, final, done = stream.events()
    assert done == "[DONE]"
    assert final["output_ids"] == call.json()["output_ids"]
    assert final["meta_info"]["weight_versions"] == [{"version": 0, "start": 0, "end": 8}]
    batch = (await sidecar.generate(text=["a", "b"])).json()
    assert len(batch) == 2
    chat = await sidecar.client.post("/v1/chat/completions", {"messages": [], "n": 2, "max_tokens": 3})
    assert chat.json()["metadata"]["weight_versions"] == [[{"version": 0, "start": 0, "end": 3}]] * 2
    assert (await sidecar.client.get("/v1/models")).json()["data"][0]["id"] == "fake"
    info = (await sidecar.client.get("/server_info")).json()
    assert (info["version"], info["weight_version"], info["run"]) == ("fake", "0", "r")


async def test_C11_spans_come_through(sidecar: Sidecar, checkpoints: tuple[Path, ...]) -> None:
    stream = sidecar.client.start(
        "POST", "/generate", {"text": "x", "stream": True, "sampling_params": {"max_new_tokens": 10**6}}
    )
    await stream.until(lambda call: b"\n\n" in call.body)
    await sidecar.activate(checkpoints[1], V1)
    await sidecar.last_tokens()
    await stream.finished()
    meta = stream.events()[-2]["meta_info"]
    assert (meta["weight_version_start"], meta["weight_version_end"], meta["weight_version"]) == (0, 1, "0")
    assert meta["kv"] == "mixed"


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_C12_no_kv_crosses_versions(sidecar: Sidecar, checkpoints: tuple[Path, ...], mode: str) -> None:
    for _ in range(2):
        assert (await sidecar.generate()).status == 200
    await sidecar.activate(checkpoints[1], V1, mode)
    after = (await sidecar.generate()).json()
    fresh = FakeEngine(checkpoints[1])
    expected = await AsgiClient(FakeServer(fresh)).post(
        "/generate", {"text": "hello", "sampling_params": {"max_new_tokens": 8}}
    )
    assert after["output_ids"] == expected.json()["output_ids"]
    await fresh.close()


async def test_C12_the_fake_server_does_reuse_kv_where_nobody_parts_versions(
    sidecar: Sidecar, checkpoints: tuple[Path, ...]
) -> None:
    """The test above can fail."""
    sidecar.client.app._cache_key = False  # type: ignore[attr-defined]
    before = (await sidecar.generate()).json()
    await sidecar.activate(checkpoints[1], V1)
    after = (await sidecar.generate()).json()
    assert after["meta_info"]["cached_tokens"] > 0
    assert after["output_ids"] != before["output_ids"]
    fresh = FakeEngine(checkpoints[1])
    expected = await AsgiClient(FakeServer(fresh)).post(
        "/generate", {"text": "hello", "sampling_params": {"max_new_tokens": 8}}
    )
    assert after["output_ids"] != expected.json()["output_ids"]
    await fresh.close()
    # An engine that tells the versions of its KV would be found out.
    sidecar.manners.kv_versions = True
    assert (await sidecar.generate()).status == 503
    assert "older than r/weight_v000001" in sidecar.mismatches[0]


async def test_C20_disconnect_reaches_the_server(sidecar: Sidecar) -> None:
    for stream in (True, False):
        call = sidecar.client.start(
            "POST", "/generate", {"text": "x", "stream": stream, "sampling_params": {"max_new_tokens": 10**6}}
        )
        await until(lambda: len(sidecar.fake.requests) == 1)
        call.disconnect()
        await call.finished()
        await until(lambda: not sidecar.fake.requests)
        assert sidecar.gate.active == 0


async def test_C20_deaf_server_is_told_by_abort(sidecar: Sidecar) -> None:
    sidecar.manners.deaf = True
    one = sidecar.client.start(
        "POST", "/generate", {"text": "x", "rid": "req-1", "sampling_params": {"max_new_tokens": 10**6}}
    )
    other = sidecar.client.start(
        "POST", "/generate", {"text": "x", "rid": "req-10", "sampling_params": {"max_new_tokens": 10**6}}
    )
    await until(lambda: len(sidecar.fake.requests) == 2)
    await sidecar.engine.abort("~~req-1~")
    await until(lambda: len(sidecar.fake.requests) == 1)
    await one.finished()
    assert one.json()["meta_info"]["finish_reason"]["type"] == "abort"
    await sidecar.last_tokens()
    await other.finished()
    assert other.json()["meta_info"]["finish_reason"]["type"] == "length"


async def test_C83_a_drain_waits_for_the_server_and_not_for_a_client_that_reads_nothing(
    sidecar: Sidecar,
) -> None:
    body = {"text": "x", "stream": True, "sampling_params": {"max_new_tokens": 50}}
    call = sidecar.client.start(
        "POST", "/generate", {**body, "weight_version": {"exact_version": 0, "run": "r"}}
    )
    call.stop_reading()
    await until(lambda: sidecar.gate.active == 1)
    async with asyncio.timeout(60):
        assert await sidecar.gate.drain(SystemClock().monotonic() + 3600, pins_only=True) == []
    assert (sidecar.fake.requests, call.body) == ([], b"")
    call.read_on()
    await call.finished()
    *_, final, done = call.events()
    assert (len(final["output_ids"]), final["meta_info"]["weight_version"], done) == (50, "0", "[DONE]")


async def test_C22_restarted_server_is_found_out(sidecar: Sidecar, checkpoints: tuple[Path, ...]) -> None:
    await sidecar.activate(checkpoints[1], V1)
    instance = (await sidecar.engine.identity()).instance
    sidecar.fake.restart()
    identity = await sidecar.engine.identity()
    assert identity.instance != instance
    assert identity.label == "default"
    for fields in ({}, {"stream": True}, {"tokens": 0}):
        sidecar.gate.open(V1)
        call = await sidecar.generate(**fields)
        text = bytes(call.body).decode()
        assert "EngineUnavailable" in text
        assert '"weight_version":"1"' not in text
        assert not sidecar.gate.ready
    assert len(sidecar.mismatches) == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_C76_server_that_comes_back_under_the_label_it_had(
    sidecar: Sidecar, checkpoints: tuple[Path, ...], stream: bool
) -> None:
    """What it says of itself is no proof of its weights: nothing that it computed is handed out."""
    for _ in range(3):
        assert (await sidecar.generate()).json()["meta_info"]["weight_version"] == "0"
    await sidecar.restart(checkpoints[2], str(PolicyVersion("r", 0)))
    calls = await asyncio.gather(*(sidecar.generate(stream=stream) for _ in range(4)))
    for call in calls:
        assert call.status == 503
        assert call.json()["error"]["type"] == "EngineUnavailable"
    assert sidecar.mismatches
    assert not sidecar.gate.ready
    assert sidecar.fake.tokens > 3 * 8  # it did answer
    # Activated anew it is what it says.
    await sidecar.engine.identity()
    await sidecar.activate(checkpoints[0], PolicyVersion("r", 0))
    assert (await sidecar.generate()).json()["meta_info"]["weight_version"] == "0"


async def test_C76_the_test_above_can_fail(sidecar: Sidecar, checkpoints: tuple[Path, ...]) -> None:
    """The label alone would pass these weights off as version 0."""
    sidecar.client.app._vouch = None  # type: ignore[attr-defined]
    before = (await sidecar.generate()).json()
    await sidecar.restart(checkpoints[2], str(PolicyVersion("r", 0)))
    after = (await sidecar.generate()).json()
    assert after["meta_info"]["weight_version"] == before["meta_info"]["weight_version"] == "0"
    assert after["output_ids"] != before["output_ids"]


async def test_C76_the_server_is_asked_who_it_is_for_new_connections_only(sidecar: Sidecar) -> None:
    looks: list[str] = []
    real = sidecar.engine._call

    async def call(method: str, path: str, *rest: Any) -> tuple[int, Any]:
        looks.append(path)
        return await real(method, path, *rest)

    sidecar.engine._call = call  # type: ignore[method-assign]
    await asyncio.gather(*(sidecar.generate() for _ in range(8)))
    asked, made = len(looks), sidecar.link.made
    assert set(looks) == {"/server_info"}
    for _ in range(5):
        await sidecar.generate()
    assert len(looks) - asked <= sidecar.link.made - made


async def test_C76_server_that_restarts_between_two_calls_is_not_relabelled(
    sidecar: Sidecar, checkpoints: tuple[Path, ...]
) -> None:
    """No tensor was to change, and its label is what it was; its weights are not."""
    await sidecar.engine.prepare(checkpoints[0], [])
    await sidecar.restart(checkpoints[2], str(PolicyVersion("r", 0)))
    await sidecar.engine.pause("in_place")
    with pytest.raises(EngineRefused):
        await sidecar.engine.activate(str(V1))
    assert sidecar.fake.label == str(PolicyVersion("r", 0))


async def test_C76_server_that_comes_back_on_another_model_at_version_0(tmp_path: Path, link: Link) -> None:
    """Followed by the reconciler: it is loaded with version 0, not given its name."""
    f = Following(tmp_path)
    made = Sidecar(f.trainer.boot, link)
    f.engine, f.settings = made.engine, ActivationSettings()  # type: ignore[assignment]
    f.start()
    await f.claim()
    write_checkpoint(tmp_path / "other", PosixFiles(), f.trainer.learn())
    for boot in (f.trainer.boot, tmp_path / "other", tmp_path / "other"):
        await made.restart(boot, "default")
        await f.catch_up()
        assert f.gate.serving == f.versions[0].version
        assert (made.fake.label, made.fake.state) == (str(f.versions[0].version), f.versions[0].state)
    await made.close()


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_C78_server_that_compresses_when_it_may(
    sidecar: Sidecar, checkpoints: tuple[Path, ...], encoding: Any
) -> None:
    """Nothing is asked for that cannot be read, also where a client would take it compressed."""
    sidecar.manners.encoding = encoding
    await sidecar.activate(checkpoints[1], V1)
    body = {"text": "hello", "sampling_params": {"max_new_tokens": 8}}
    accepts = {"accept-encoding": "gzip, deflate, br"}
    whole = await sidecar.client.post("/generate", body, headers=accepts)
    assert whole.json()["meta_info"]["weight_version"] == "1"
    stream = await sidecar.client.post("/generate", {**body, "stream": True}, headers=accepts)
    assert stream.events()[-2]["meta_info"]["weight_version"] == "1"
    info = await sidecar.client.get("/server_info", headers=accepts)
    assert info.json()["version"] == "fake"
    # What is passed on as it comes, comes as the client wants it.
    models = await sidecar.client.get("/v1/models", headers=accepts)
    assert models.headers["content-encoding"] == encoding
    assert (await sidecar.client.get("/v1/models")).json()["data"][0]["id"] == "fake"


@pytest.mark.parametrize("stream", [False, True])
async def test_C78_server_that_compresses_whatever_is_asked(sidecar: Sidecar, stream: bool) -> None:
    sidecar.manners.encoding, sidecar.manners.stubborn = "gzip", True
    with pytest.raises(EngineError, match="gzip"):
        await sidecar.engine.identity()
    sidecar.client.app._vouch = None  # type: ignore[attr-defined]
    call = await sidecar.generate(stream=stream)
    assert (call.status, call.json()["error"]["type"]) == (502, "VersionUnreported")


@pytest.mark.parametrize("stream", [False, True])
async def test_C22_server_that_dies_under_a_request(sidecar: Sidecar, stream: bool) -> None:
    body = {"text": "x", "stream": stream, "sampling_params": {"max_new_tokens": 10**6}}
    call = sidecar.client.start("POST", "/generate", body)
    await until(lambda: len(sidecar.fake.requests) == 1)
    if stream:
        await call.until(lambda c: b"\n\n" in c.body)
    sidecar.fake.restart()
    await call.finished()
    assert "EngineUnavailable" in bytes(call.body).decode()
    assert call.complete
    assert call.status == (200 if stream else 503)
    # What is begun to be answered after the restart comes from another instance than the request went to.
    assert len(sidecar.mismatches) == (not stream)


async def test_server_that_is_not_there(link: Link) -> None:
    engine = HttpEngine(link, "http://127.0.0.1:1")
    with pytest.raises(EngineError, match="no answer"):
        await engine.identity()
    call = await AsgiClient(ReverseProxy(link.session, "http://127.0.0.1:1")).get("/v1/models")
    assert (call.status, call.json()["error"]["type"]) == (503, "EngineUnavailable")


async def test_openai_streams_of_a_stock_server_are_not_vouched_for(sidecar: Sidecar) -> None:
    sidecar.manners.one_choice = True
    call = await sidecar.client.post("/v1/completions", {"prompt": "x", "stream": True, "max_tokens": 3})
    assert call.events()[-1]["error"]["type"] == "VersionUnreported"
    whole = await sidecar.client.post("/v1/completions", {"prompt": "x", "max_tokens": 3})
    assert whole.json()["weight_version_start"] == 0
    assert not sidecar.mismatches


# ------------------------------------------------------------------------------------- the engine port


@pytest.mark.parametrize("fault", ["success_false", "changed_400", "dropped"])
async def test_C04_failed_update_is_uncertain(
    sidecar: Sidecar, checkpoints: tuple[Path, ...], fault: Any
) -> None:
    sidecar.manners.update = fault
    with pytest.raises(EngineUncertain):
        await sidecar.activate(checkpoints[1], V1)
    assert not sidecar.gate.ready


async def test_C04_update_that_was_done_although_the_connection_broke(
    sidecar: Sidecar, checkpoints: tuple[Path, ...]
) -> None:
    sidecar.manners.update = "changed_dropped"
    await sidecar.activate(checkpoints[1], V1)
    assert (await sidecar.engine.identity()).label == str(V1)
    assert sidecar.fake.state == Checkpoint.open(checkpoints[1], PosixFiles()).state()


async def test_C04_update_that_never_answers(checkpoints: tuple[Path, ...], link: Link) -> None:
    made = Sidecar(checkpoints[0], link, grace=0.1)
    made.engine = HttpEngine(link, made.url, update_timeout=0.1)
    made.manners.update = "hangs"
    with pytest.raises(EngineUncertain):
        await made.activate(checkpoints[1], V1)
    await made.close()


async def test_C23_flush_that_is_refused_after_the_weights_changed(
    sidecar: Sidecar, checkpoints: tuple[Path, ...]
) -> None:
    sidecar.client.start("POST", "/generate", {"text": "x", "sampling_params": {"max_new_tokens": 10**6}})
    await until(lambda: any(request.rows for request in sidecar.fake.requests))
    await sidecar.engine.prepare(checkpoints[1], ["scale"])
    await sidecar.engine.pause("in_place")
    sidecar.engine._mode = "retract"  # asks for a flush that running requests forbid
    with contextlib.suppress(EngineUncertain):
        await sidecar.engine.activate(str(V1))
        pytest.fail("the server said no")
    sidecar.fake.abort_prefix("")


async def test_C04_server_without_the_route_is_as_it_was(
    sidecar: Sidecar, checkpoints: tuple[Path, ...]
) -> None:
    await sidecar.engine.prepare(checkpoints[1], changed(checkpoints[0], checkpoints[1]))
    sidecar.engine._base += "/v9"
    with pytest.raises(EngineError):
        await sidecar.engine.identity()
    sidecar.engine._base = sidecar.url
    before = sidecar.fake.state
    answers = {"/update_weights_from_disk": (404, {"detail": "Not Found"})}
    real = sidecar.engine._call

    async def call(method: str, path: str, *rest: Any) -> tuple[int, Any]:
        return answers.get(path) or await real(method, path, *rest)

    sidecar.engine._call = call  # type: ignore[method-assign]
    with pytest.raises(EngineRefused):
        await sidecar.engine.activate(str(V1))
    answers["/update_weights_from_disk"] = (
        400,
        {"success": False, "message": "Online weight updates are not supported"},
    )
    with pytest.raises(EngineRefused):
        await sidecar.engine.activate(str(V1))
    answers["/update_weights_from_disk"] = (200, {"success": True})
    with pytest.raises(EngineUncertain):
        await sidecar.engine.activate(str(V1))
    assert sidecar.fake.state == before


async def test_relabelling_touches_no_weights(sidecar: Sidecar, checkpoints: tuple[Path, ...]) -> None:
    running = sidecar.client.start(
        "POST", "/generate", {"text": "x", "sampling_params": {"max_new_tokens": 10**6}}
    )
    await until(lambda: len(sidecar.fake.requests) == 1)
    before = sidecar.fake.state
    await sidecar.activate(checkpoints[0], V1)
    assert sidecar.fake.state == before
    await sidecar.last_tokens()
    await running.finished()
    assert running.json()["meta_info"]["weight_version_end"] == 1  # relabelled, not aborted
    del sidecar.server.routes["POST /update_weight_version"]
    await sidecar.activate(checkpoints[0], V2)
    assert (await sidecar.engine.identity()).label == str(V2)
    assert sidecar.fake.state == before
    await sidecar.engine.prepare(checkpoints[0], [])
    sidecar.fake.label = "default"

    real = sidecar.engine._call

    async def broken(*args: Any) -> tuple[int, Any]:
        return await real(*args) if args[0] == "GET" else (500, "oops")

    sidecar.engine._call = broken  # type: ignore[method-assign]
    with pytest.raises(EngineRefused):
        await sidecar.engine.activate(str(V2))


async def test_prepare_checks_the_directory(
    sidecar: Sidecar, checkpoints: tuple[Path, ...], tmp_path: Path
) -> None:
    for directory, names in ((tmp_path / "none", []), (checkpoints[1], ["no.such"])):
        with pytest.raises(EngineRefused):
            await sidecar.engine.prepare(directory, names)
    assert EngineTests.truncated(checkpoints[1], tmp_path / "short").exists()
    with pytest.raises(EngineRefused):
        await sidecar.engine.prepare(tmp_path / "short", [])


async def test_a_probe_is_a_request_of_its_own(sidecar: Sidecar) -> None:
    """Under an id and a cache key that no client has; the same weights answer it alike."""
    seen: list[Any] = []
    add = sidecar.fake.add
    sidecar.fake.add = lambda request: (seen.append(request), add(request))[1]  # type: ignore[method-assign]
    one, other = await sidecar.engine.probe(), await sidecar.engine.probe()
    assert one == other is not None
    assert len({request.rid for request in seen}) == len({request.cache_key for request in seen}) == 2
    assert {request.prompt for request in seen} == {tuple(prompt(256))}
    assert [request.cached_tokens for request in seen] == [0, 0]


async def test_a_server_that_gives_no_logprobs_cannot_be_probed(sidecar: Sidecar) -> None:
    sidecar.manners.logprobs = False
    assert await sidecar.engine.probe() is None


async def test_a_probe_that_is_aborted_or_lost_is_no_answer(sidecar: Sidecar) -> None:
    """It is not taken for a server that cannot tell."""
    for end in (lambda: sidecar.fake.abort_prefix("stitch-probe-"), sidecar.fake.restart):
        await sidecar.engine.pause("in_place")
        probing = asyncio.ensure_future(sidecar.engine.probe())
        await until(lambda: sidecar.fake.requests)
        end()
        with pytest.raises(EngineError):
            await probing


@pytest.mark.parametrize(
    ("config", "able"),
    [
        ('{"vocab_size": 256}', True), ('{"text_config": {"vocab_size": 256}}', True), ("{", False),
        ("[]", False), ('{"vocab_size": "256"}', False), ("{}", False), (None, False),
    ],
)  # fmt: skip
async def test_the_vocabulary_is_the_checkpoints(
    sidecar: Sidecar, tmp_path: Path, config: str | None, able: bool
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    opened = await open_server(sidecar.url, {}, tmp_path)
    assert (await opened.engine.probe() is not None) == able
    await opened.close()


async def test_open_server(sidecar: Sidecar) -> None:
    opened = await open_server(sidecar.url + "/", {"control_timeout": "3"})
    assert opened.cache_key
    assert (await opened.engine.identity()).label == "r/weight_v000000"
    await opened.close()
    opened = await open_server(sidecar.url, {"update_timeout": "1200"})
    assert opened.engine.bounds.activate > 1200  # type: ignore[attr-defined]
    await opened.close()
    for options in ({"x": "1"}, {"control_timeout": "soon"}):
        with pytest.raises(EngineOptionError):
            await open_server(sidecar.url, options)


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - the fake engine has no event for it
            await asyncio.sleep(0.005)
