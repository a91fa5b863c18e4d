"""EngineTests: what ``ports.Engine`` promises, for the author of an engine to inherit.

    class TestMyEngine(EngineTests):
        @pytest.fixture
        async def boot(self):         # async (checkpoint directory) -> Served, freshly booted from it
            ...

        @pytest.fixture
        def checkpoints(self, tmp_path):   # three directories, one layout, three different sets of weights
            ...

An engine comes with the ASGI app of its HTTP face (``/generate`` of SGLang); nothing of Stitch is in front
of it. Needs pytest and pytest-asyncio.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ..checkpoint import Checkpoint, marks_of
from ..files import PosixFiles
from ..ports import Engine, EngineRefused, ProbeAnswer, write_atomic
from ..replica.asgi import App
from ..replica.probe import difference, noise_of, tolerance
from ..state import changed_tensors
from .asgi_client import AsgiClient, Call

BOOT_LABEL = "default"
V1, V2 = "run/weight_v000001", "run/weight_v000002"


@dataclass(frozen=True)
class Served:
    """A booted engine and its HTTP face. ``boot`` is the checkpoint that it came up with."""

    engine: Engine
    app: App
    boot: Path

    @property
    def client(self) -> AsgiClient:
        return AsgiClient(self.app)


Boot = Callable[[Path], Awaitable[Served]]


def changed(old: Path, new: Path) -> list[str]:
    """The names of the tensors that differ, as the reconciler works them out."""
    files = PosixFiles()
    return changed_tensors(Checkpoint.open(old, files).table(), Checkpoint.open(new, files).table())


@pytest.mark.asyncio
class EngineTests:
    """Inherit, and give the fixtures ``boot`` and ``checkpoints``.

    Greedy outputs of ``prompt`` must differ between the three checkpoints, and the engine must be slow
    enough that a stream of ``tokens`` tokens can be stopped in its midst.
    """

    prompt: tuple[int, ...] = (1, 2, 3, 4, 5)
    tokens = 48
    patience = 30.0
    """Seconds that anything may take."""

    @pytest.fixture
    def boot(self) -> Boot:
        """Boots an engine from a checkpoint directory."""
        raise NotImplementedError("give a fixture `boot`: async (checkpoint) -> Served")

    @pytest.fixture
    def checkpoints(self) -> tuple[Path, Path, Path]:
        """Three checkpoint directories of one layout."""
        raise NotImplementedError("give a fixture `checkpoints`: three checkpoint directories")

    def body(self, label: str, **fields: Any) -> dict[str, Any]:
        """A request as it would come under ``label``; override if caches are kept apart by a field."""
        return fields

    # ---------------------------------------------------------------------------------- what it serves

    async def test_boots_under_the_boot_label(self, boot: Boot, checkpoints: tuple[Path, ...]) -> None:
        served = await boot(checkpoints[0])
        identity = await served.engine.identity()
        assert identity.label == BOOT_LABEL
        assert identity == await served.engine.identity()
        assert (await self.generate(served))["weight_versions"] == [self.span(BOOT_LABEL, 0)]
        assert (await (await boot(checkpoints[0])).engine.identity()).instance != identity.instance

    async def test_C77_what_it_tells_of_its_boot_checkpoint_is_from_before_the_load(
        self, boot: Boot, checkpoints: tuple[Path, ...]
    ) -> None:
        """Or it tells nothing, which is right for an engine that others start."""
        before = marks_of(checkpoints[0], PosixFiles())
        served = await boot(checkpoints[0])
        assert (await served.engine.identity()).boot_marks in (None, before)
        write_atomic(
            PosixFiles(), checkpoints[0] / "config.json", (checkpoints[0] / "config.json").read_bytes()
        )
        assert marks_of(checkpoints[0], PosixFiles()) != before
        assert (await served.engine.identity()).boot_marks in (None, before)

    async def test_prepare_alone_changes_nothing(self, boot: Boot, checkpoints: tuple[Path, ...]) -> None:
        served = await boot(checkpoints[0])
        before = await self.generate(served)
        await self.prepare(served, checkpoints[1])
        after = await self.generate(served)
        assert after["output_ids"] == before["output_ids"]
        assert after["weight_versions"] == before["weight_versions"]
        assert (await served.engine.identity()).label == BOOT_LABEL

    async def test_activation_serves_the_new_weights(self, boot: Boot, checkpoints: tuple[Path, ...]) -> None:
        served = await boot(checkpoints[0])
        instance = (await served.engine.identity()).instance
        old = await self.generate(served)
        await self.update(served, checkpoints[1], V1)
        new = await self.generate(served, V1)
        assert new["output_ids"] == (await self.outputs(boot, checkpoints[1]))
        assert new["output_ids"] != old["output_ids"]
        assert new["weight_versions"] == [self.span(V1, 0)]
        identity = await served.engine.identity()
        assert (identity.instance, identity.label) == (instance, V1)

    async def test_later_activation_copies_onto_the_first(
        self, boot: Boot, checkpoints: tuple[Path, ...]
    ) -> None:
        served = await boot(checkpoints[0])
        await self.update(served, checkpoints[1], V1)
        await served.engine.prepare(checkpoints[2], changed(checkpoints[1], checkpoints[2]))
        await self.activate(served, V2)
        assert (await self.generate(served, V2))["output_ids"] == await self.outputs(boot, checkpoints[2])

    async def test_last_prepare_counts(self, boot: Boot, checkpoints: tuple[Path, ...]) -> None:
        served = await boot(checkpoints[0])
        await self.prepare(served, checkpoints[1])
        await self.prepare(served, checkpoints[2])
        await self.activate(served, V2)
        assert (await self.generate(served, V2))["output_ids"] == await self.outputs(boot, checkpoints[2])

    async def test_nothing_changed_only_relabels(self, boot: Boot, checkpoints: tuple[Path, ...]) -> None:
        served = await boot(checkpoints[0])
        before = await self.generate(served)
        await served.engine.prepare(checkpoints[0], [])
        await self.activate(served, V1)
        after = await self.generate(served, V1)
        assert after["output_ids"] == before["output_ids"]
        assert after["weight_versions"] == [self.span(V1, 0)]

    async def test_C12_no_kv_of_the_old_weights_is_reused(
        self, boot: Boot, checkpoints: tuple[Path, ...]
    ) -> None:
        served = await boot(checkpoints[0])
        for _ in range(2):
            await self.generate(served)
        running = await self.streaming(served)
        await self.prepare(served, checkpoints[1])
        await self.activate(served, V1, "in_place")
        fresh = await self.outputs(boot, checkpoints[1])
        assert (await self.generate(served, V1))["output_ids"] == fresh
        await running.finished(self.patience)
        assert (await self.generate(served, V1))["output_ids"] == fresh

    # ---------------------------------------------------------------------------------- all or nothing

    async def test_refused_prepare_leaves_it_as_it_was(
        self, boot: Boot, checkpoints: tuple[Path, ...], tmp_path: Path
    ) -> None:
        served = await boot(checkpoints[0])
        before = await self.generate(served)
        running = await self.streaming(served)
        names = changed(checkpoints[0], checkpoints[1])
        for directory, wanted in (
            (tmp_path / "missing", names),
            (checkpoints[1], [*names, "no.such.tensor"]),
            (self.truncated(checkpoints[1], tmp_path / "truncated"), names),
        ):
            with pytest.raises(EngineRefused):
                await served.engine.prepare(directory, wanted)
        assert (await self.final(running))["output_ids"] == before["output_ids"]
        assert (await self.generate(served))["output_ids"] == before["output_ids"]
        assert (await served.engine.identity()).label == BOOT_LABEL
        await self.update(served, checkpoints[1], V1)
        assert (await self.generate(served, V1))["output_ids"] == await self.outputs(boot, checkpoints[1])

    # ------------------------------------------------------------------------------------- the pause

    @pytest.mark.parametrize("mode", ["in_place", "retract"])
    async def test_no_token_comes_in_a_pause(
        self, boot: Boot, checkpoints: tuple[Path, ...], mode: Any
    ) -> None:
        served = await boot(checkpoints[0])
        undisturbed = await self.generate(served)
        running = await self.streaming(served)
        await served.engine.pause(mode)
        waiting = self.start(served)
        await asyncio.sleep(0.05)  # what was sent before the pause may still be on its way
        seen = len(running.body)
        await asyncio.sleep(0.2)
        assert len(running.body) == seen
        assert not waiting.body
        await served.engine.resume()
        assert (await self.final(running))["output_ids"] == undisturbed["output_ids"]
        assert (await self.final(waiting))["output_ids"] == undisturbed["output_ids"]

    async def test_resume_without_a_pause_does_nothing(
        self, boot: Boot, checkpoints: tuple[Path, ...]
    ) -> None:
        served = await boot(checkpoints[0])
        await served.engine.resume()
        await served.engine.pause("in_place")
        await served.engine.resume()
        await served.engine.resume()
        await self.generate(served)

    @pytest.mark.parametrize("mode", ["in_place", "retract"])
    async def test_C11_spans_over_an_activation(
        self, boot: Boot, checkpoints: tuple[Path, ...], mode: Any
    ) -> None:
        served = await boot(checkpoints[0])
        old = (await self.generate(served))["output_ids"]
        running = await self.streaming(served)
        await self.prepare(served, checkpoints[1])
        await served.engine.pause(mode)
        late = self.start(served, V1)
        await served.engine.activate(V1)
        await served.engine.resume()
        answer = await self.final(running)
        first, second = answer["weight_versions"]
        cut = first["end"]
        assert 0 < cut < self.tokens, "the stream was not stopped in its midst: make the engine slower"
        assert first == {"version": BOOT_LABEL, "start": 0, "end": cut}
        assert second == self.span(V1, cut)
        assert answer["output_ids"][:cut] == old[:cut]
        assert (await self.final(late))["weight_versions"] == [self.span(V1, 0)]
        if mode == "retract":
            # Every later token is what the new weights make of all that came before it.
            fresh = await boot(checkpoints[1])
            prompt = [*self.prompt, *old[:cut]]
            rest = await self.generate(fresh, prompt=prompt, tokens=self.tokens - cut)
            assert answer["output_ids"][cut:] == rest["output_ids"]

    # ------------------------------------------------------------------------------------------ probe

    async def test_a_probe_is_of_the_weights(self, boot: Boot, checkpoints: tuple[Path, ...]) -> None:
        """Other weights, other numbers; once they are back the same, beside others too, with any cache."""
        served = await boot(checkpoints[0])
        first = await served.engine.probe()
        if first is None:  # this engine cannot tell
            return
        most = tolerance(0.0)
        assert difference(first.logprobs, (await self.probed(served)).logprobs) <= most
        await self.update(served, checkpoints[1], V1)
        other = await self.probed(served)
        assert other.signature == first.signature
        assert difference(first.logprobs, other.logprobs) > 0
        await served.engine.prepare(checkpoints[0], changed(checkpoints[0], checkpoints[1]))
        await self.activate(served, V2)
        running = await self.streaming(served)
        several = await asyncio.gather(*(self.probed(served) for _ in range(4)))
        assert max(difference(first.logprobs, one.logprobs) for one in several) <= most
        await running.finished(self.patience)
        assert difference(first.logprobs, other.logprobs) > noise_of([one.logprobs for one in several])

    async def test_a_probe_waits_out_a_pause(self, boot: Boot, checkpoints: tuple[Path, ...]) -> None:
        served = await boot(checkpoints[0])
        await served.engine.pause("in_place")
        probing = asyncio.ensure_future(served.engine.probe())
        await asyncio.sleep(0.1)
        assert not probing.done() or probing.result() is None
        await served.engine.resume()
        async with asyncio.timeout(self.patience):
            await probing

    # ------------------------------------------------------------------------------------------ abort

    async def test_abort_ends_a_request(self, boot: Boot, checkpoints: tuple[Path, ...]) -> None:
        served = await boot(checkpoints[0])
        await served.engine.abort("not there")
        running = await self.streaming(served, rid="the-one~")
        other = await self.streaming(served, rid="another~")
        await served.engine.abort("the-one~")
        answer = await self.final(running)
        assert answer["finish_reason"]["type"] == "abort"
        assert len(answer["output_ids"]) < self.tokens
        assert len((await self.final(other))["output_ids"]) == self.tokens

    async def test_abort_works_in_a_pause(self, boot: Boot, checkpoints: tuple[Path, ...]) -> None:
        served = await boot(checkpoints[0])
        running = await self.streaming(served, rid="the-one~")
        await served.engine.pause("in_place")
        await served.engine.abort("the-one~")
        await served.engine.resume()
        assert (await self.final(running))["finish_reason"]["type"] == "abort"
        assert len((await self.generate(served))["output_ids"]) == self.tokens

    async def test_C20_disconnect_ends_a_request(self, boot: Boot, checkpoints: tuple[Path, ...]) -> None:
        served = await boot(checkpoints[0])
        running = await self.streaming(served)
        running.disconnect()
        await running.finished(self.patience)
        assert len((await self.generate(served))["output_ids"]) == self.tokens

    # ------------------------------------------------------------------------------------------ helpers

    async def probed(self, served: Served) -> ProbeAnswer:
        answer = await served.engine.probe()
        assert answer is not None
        return answer

    def span(self, label: str, start: int) -> dict[str, Any]:
        return {"version": label, "start": start, "end": self.tokens}

    def start(self, served: Served, label: str = BOOT_LABEL, **fields: Any) -> Call:
        """Begin a greedy request."""
        prompt, tokens = fields.pop("prompt", self.prompt), fields.pop("tokens", self.tokens)
        params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        body = self.body(label, input_ids=list(prompt), sampling_params=params, **fields)
        return served.client.start("POST", "/generate", body)

    async def generate(self, served: Served, label: str = BOOT_LABEL, **fields: Any) -> dict[str, Any]:
        """A whole greedy answer: its output_ids and meta_info in one."""
        return await self.final(self.start(served, label, **fields))

    async def streaming(self, served: Served, **fields: Any) -> Call:
        """A stream of which something has come."""
        call = self.start(served, stream=True, **fields)
        return await call.until(lambda c: b"\n\n" in c.body, self.patience)

    async def final(self, call: Call) -> dict[str, Any]:
        await call.finished(self.patience)
        assert call.status == 200, bytes(call.body)
        if call.headers["content-type"].startswith("text/event-stream"):
            *_, value, done = call.events()
            assert done == "[DONE]"
        else:
            value = call.json()
        return {"output_ids": value["output_ids"], **value["meta_info"]}

    async def outputs(self, boot: Boot, checkpoint: Path) -> Any:
        """What an engine says that has never had other weights than these."""
        return (await self.generate(await boot(checkpoint)))["output_ids"]

    async def prepare(self, served: Served, checkpoint: Path) -> None:
        await served.engine.prepare(checkpoint, changed(served.boot, checkpoint))

    async def activate(self, served: Served, label: str, mode: Any = "retract") -> None:
        await served.engine.pause(mode)
        await served.engine.activate(label)
        await served.engine.resume()

    async def update(self, served: Served, checkpoint: Path, label: str) -> None:
        await self.prepare(served, checkpoint)
        await self.activate(served, label)

    @staticmethod
    def truncated(checkpoint: Path, target: Path) -> Path:
        """A copy whose every weight file lacks its last byte."""
        target.mkdir()
        for path in checkpoint.iterdir():
            data = path.read_bytes()
            (target / path.name).write_bytes(data[:-1] if path.suffix == ".safetensors" else data)
        return target
