"""The synchronous face of publishing, for trainer loops: encode here, publish behind the next step.

The trainer's thread owns the encoder; a thread of this module's owns the event loop, the store and the
claim. Between them go jobs, at most one running and one waiting, and futures.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import random
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .checkout import base_row, checkout
from .checkpoint import Checkpoint
from .compacting import CompactorProcess
from .delta.encoder import DeltaEncoder, EncodedDelta
from .files import PosixFiles
from .manifest import Manifest
from .pipeline import Pipeline
from .ports import Store, SystemClock
from .publisher import Boot, Payload, Publisher, PublishError
from .safetensors import Tensor
from .scratch import own_directory
from .stores import open_store
from .stores.bounded import BoundedStore
from .threads import LoopThread
from .waking import Waker


@dataclass(frozen=True)
class Published:
    """One version that the head names, and what it took. ``seconds`` of publishing, encoding not included."""

    manifest: Manifest
    delta: EncodedDelta
    seconds: float

    @property
    def number(self) -> int:
        return self.manifest.number


class PolicyPublisher:
    """Publishes a trainer's policy as deltas from its boot checkpoint. Used by one thread.

    A publish that fails fails the one that waits behind it, and the next ``publish`` encodes against the
    version that the head last took, so nothing has to be repaired by hand.
    """

    def __init__(
        self,
        open_store: Callable[[], Store],
        run: str,
        boot: Path,
        work: Path,
        *,
        producer: Mapping[str, Any],
        encoding: str = "xor",
        saved: int | None = None,
        override: bool = False,
        wake: Sequence[str] = (),
    ) -> None:
        """See ``start``."""
        self._waker = Waker.given(wake)
        self._files, self._clock = PosixFiles(), SystemClock()
        self._encoder = DeltaEncoder.from_checkpoint(Checkpoint.open(boot, self._files), encoding)
        self._turn = asyncio.Lock()
        self._store: Store | None = None
        self._compacting: CompactorProcess | None = None
        self._held = contextlib.ExitStack()
        self._work = self._held.enter_context(own_directory(work, self._files))
        self._loop = LoopThread("stitch-publish")
        try:
            claiming = self._claim(open_store, run, boot, producer, saved, override)
            self._publisher, base = self._loop.run(claiming)
            if base is not None:
                self._encoder = DeltaEncoder.from_checkpoint(Checkpoint.open(base, self._files), encoding)
                self._files.remove_tree(base)
        except BaseException:
            self._end_thread()
            raise
        self._pipeline: Pipeline[Published] = Pipeline(self._encoder, self._publisher.head.number)
        atexit.register(self._warn)

    @classmethod
    def start(
        cls,
        store: str,
        run: str,
        boot: Path,
        work: Path,
        *,
        producer: Mapping[str, Any] | None = None,
        encoding: str = "xor",
        saved: int | None = None,
        override: bool = False,
        compact: bool = False,
        wake: Sequence[str] = (),
    ) -> PolicyPublisher:
        """Claim ``run`` in the store at URL ``store``.

        ``boot`` is the HF checkpoint directory that is version 0; ``work`` is scratch space for deltas;
        ``encoding`` "xor", which stock receivers read, or "sparse", half as large. A trainer that resumes
        says in ``saved`` at which version its checkpoint was saved, and with ``override`` that it means one
        which a rollback gave up; what it publishes first is a delta from a version that was proven here.
        ``compact`` runs ``stitch compact`` beside it, for replicas that join a long run. ``wake`` are URLs of
        gateways or replicas that are told of each version, in the background, so that replicas need not wait
        for their next look; STITCH_WAKE_TOKEN (or a file, STITCH_WAKE_TOKEN_FILE) is for those with tokens.
        Raises PublishError (ClaimRefused when ``boot`` is not the run's version 0, when the run has gone on
        from it and ``saved`` is not given, or was given up), CheckpointError, StoreError, FormatError,
        CheckoutRefused, BadWakeUrl, BadTokens, OSError.
        """
        publisher = cls(
            lambda: open_store(store), run, boot, work, producer=producer or {}, encoding=encoding,
            saved=saved, override=override, wake=wake,
        )  # fmt: skip
        if compact:
            publisher._compacting = CompactorProcess(store, run, boot, work)
            publisher._compacting.ensure()
        return publisher

    def __enter__(self) -> PolicyPublisher:
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for what is outstanding, and raise what failed."""
        self.close()

    @property
    def head(self) -> int:
        """The newest number that the head names, as far as this writer knows."""
        return self._publisher.head.number

    def publish(
        self, tensors: Mapping[str, Tensor], *, step: int | None = None, timeout: float = 600.0
    ) -> Future[Published]:
        """Encode ``tensors`` now and publish them in the background.

        They are the whole policy in the boot checkpoint's layout. While two publishes are outstanding it
        waits, TimeoutError after ``timeout`` seconds. The future raises PublishError. Raises DeltaError
        when the layout differs, and PublishError when the claim is lost.
        """
        if self._loop.closed:
            raise PublishError("this publisher is closed")
        self._pipeline.make_room(timeout)
        self._settle()
        number = self._loop.run(self._reserve())
        directory = self._work / f"delta-{number:06d}"
        try:
            self._files.remove_tree(directory)
            delta = self._encoder.encode(
                tensors, directory, self._files, number=number, base_number=self._pipeline.encoded
            )
        except BaseException:
            self._files.remove_tree(directory)
            raise
        future: Future[Published] = Future()
        future.set_running_or_notify_cancel()  # a version that is half published cannot be called back
        self._loop.start(self._finish(future, delta, directory, number, step))
        self._pipeline.queued(number, future)
        return future

    def flush(self, timeout: float = 600.0) -> None:
        """Wait until nothing is outstanding; TimeoutError after ``timeout`` seconds.

        Raises the PublishError of a publish that failed since the last ``publish`` or ``flush``.
        """
        outstanding = self._pipeline.outstanding()
        late = wait(outstanding, timeout).not_done
        self._settle()
        for future in outstanding:
            if future in late:
                raise TimeoutError(f"{len(late)} publishes are not done after {timeout:g} s")
            future.result()

    def close(self, timeout: float = 600.0) -> None:
        """Wait for what is outstanding and end the thread; what is not done by then is cut off.

        Raises as ``flush`` does. Closing twice is fine.
        """
        if self._loop.closed:
            return
        try:
            self.flush(timeout)
        finally:
            self._end_thread()

    def _settle(self) -> None:
        """Tell the encoder how finished publishes ended, in their order. Their futures have the failures."""
        while ended := self._pipeline.ended():
            self._pipeline.settle(ended)

    def _warn(self) -> None:
        lost = self._pipeline.unfinished
        if lost:
            print(
                f"stitch: the process ends with {lost} versions of run {self._publisher.run} not published: "
                "close the publisher, or use it in a with statement",
                file=sys.stderr,
            )

    def _end_thread(self) -> None:
        atexit.unregister(self._warn)
        if self._compacting is not None:
            self._compacting.close()
        self._loop.run(self._end())
        self._waker.flush()
        self._loop.close()
        self._held.close()

    # ------------------------------------------------------------------- on the publishing thread's loop

    async def _claim(
        self,
        open_store: Callable[[], Store],
        run: str,
        boot: Path,
        producer: Mapping[str, Any],
        saved: int | None,
        override: bool,
    ) -> tuple[Publisher, Path | None]:
        """The publisher, and a checkpoint to build on where that is not ``boot``."""
        self._store = BoundedStore(open_store(), 60.0)
        publisher = Publisher(
            self._store, run, files=self._files, clock=self._clock, rng=random.Random(),
            nonce=lambda: secrets.token_hex(16), run_blocking=asyncio.to_thread, producer=producer,
            raise_floor=True,
        )  # fmt: skip
        state = self._encoder.state
        head = await publisher.claim(
            Boot(str(boot), state), resume=state if saved is None else None, saved=saved, override=override
        )
        row = base_row(head, saved)
        if row is None:
            return publisher, None
        base = self._work / "base"
        await checkout(self._store, run, row.number, base, files=self._files, base=boot)
        return publisher, base

    async def _reserve(self) -> int:
        return self._publisher.reserve()

    async def _finish(
        self, future: Future[Published], delta: EncodedDelta, directory: Path, number: int, step: int | None
    ) -> None:
        """Publish, and put the outcome into ``future``."""
        try:
            future.set_result(await self._publish(delta, directory, number, step))
        except asyncio.CancelledError:
            future.set_exception(PublishError(f"version {number}: the publisher was closed before the end"))
            raise
        except Exception as error:
            future.set_exception(error)

    async def _publish(
        self, delta: EncodedDelta, directory: Path, number: int, step: int | None
    ) -> Published:
        payload = Payload(
            "delta", delta.state, directory, delta.files, delta.base, delta.encoding, delta.changed, step
        )
        try:
            async with self._turn:
                with self._pipeline.turn(number):
                    began = self._clock.monotonic()
                    manifest = await self._publisher.publish(payload, number)
                    self._waker.wake()
                return Published(manifest, delta, self._clock.monotonic() - began)
        finally:
            with contextlib.suppress(OSError):  # only room on a disk
                await asyncio.to_thread(self._files.remove_tree, directory)

    async def _end(self) -> None:
        """Cut off what still runs, and let go of the store."""
        running = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        if self._store is not None:
            await self._store.close()
