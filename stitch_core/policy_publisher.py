"""The synchronous face of publishing, for trainer loops: encode here, publish behind the next step.

The trainer's thread owns the encoder; a thread of this module's owns the event loop, the store and the
claim. Between them go jobs, at most one running and one waiting, and futures.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from . import leaving
from .checkout import base_row, checkout
from .checkpoint import Checkpoint
from .compacting import CompactorProcess
from .delta.encoder import DeltaEncoder, EncodedDelta
from .files import PosixFiles
from .manifest import Manifest, Row
from .pipeline import Pipeline
from .ports import Store, SystemClock
from .publisher import Boot, Payload, Publisher, PublishError
from .safetensors import Tensor
from .scratch import own_directory
from .stores import open_store
from .stores.bounded import BoundedStore
from .threads import LoopThread
from .waking import Waker

logger = logging.getLogger("stitch")


@dataclass(frozen=True)
class Published:
    """One version that the head names, and what it took. ``seconds`` of publishing, encoding not included."""

    manifest: Manifest
    delta: EncodedDelta
    seconds: float

    @property
    def number(self) -> int:
        return self.manifest.number


class Outcome(Future[Published]):
    """How a publish ends. ``told``: somebody has asked, once it had ended."""

    told = False

    def result(self, timeout: float | None = None) -> Published:
        try:
            return super().result(timeout)
        finally:
            self.told = self.told or self.done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        try:
            return super().exception(timeout)
        finally:
            self.told = self.told or self.done()


class PolicyPublisher:
    """Publishes a trainer's policy as deltas from its boot checkpoint. Used by one thread.

    A publish that fails fails the one that waits behind it, and the next ``publish`` encodes against the
    version that the head last took, so nothing has to be repaired by hand.

    A process that ends, by its last line, ``sys.exit`` or an exception, waits for what is on its way. Where
    the newest version is not published in the end, and nobody has asked its future, ``flush`` or ``close``,
    one line on stderr says so and the exit code is 120. Each call of a publish has a deadline of its own (60
    s and one more for each MB, six tries), so that every wait here ends where no timeout is given.
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
        self._newest: Outcome | None = None
        self._cut_off = False
        self._turn = asyncio.Lock()
        self._store: Store | None = None
        self._compacting: CompactorProcess | None = None
        self._held = contextlib.ExitStack()
        self._work = self._held.enter_context(own_directory(work, self._files))
        self._loop = LoopThread("stitch-publish")
        try:
            self._publisher = self._loop.run(self._open(open_store, run, producer))
            self._claim(boot, encoding, saved, override)
        except BaseException:
            self._end_thread()
            raise
        self._pipeline: Pipeline[Published] = Pipeline(self._encoder, self._publisher.head.number)
        leaving.watch(self)

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Wait for what is outstanding, and raise what failed.

        An exception of the body goes on once what was queued is published, since those are whole versions;
        what fails of them is a note of it. With SystemExit, which shows none, the end of the process tells.
        """
        newest = self._newest
        try:
            self.close()
        except (Exception, KeyboardInterrupt) as failed:
            if error is None:
                raise
            error.add_note(f"stitch: {failed}")
            self._newest = newest
        if isinstance(error, SystemExit):
            leaving.watch(self)

    @property
    def head(self) -> int:
        """The newest number that the head names, as far as this writer knows."""
        return self._publisher.head.number

    def publish(
        self, tensors: Mapping[str, Tensor], *, step: int | None = None, timeout: float | None = None
    ) -> Future[Published]:
        """Encode ``tensors`` now and publish them in the background.

        They are the whole policy in the boot checkpoint's layout. While two publishes are outstanding it
        waits, TimeoutError after ``timeout`` seconds. The future raises PublishError. Raises DeltaError
        when the layout differs, and PublishError when the claim is lost.
        """
        if self._loop.closed:
            raise PublishError("this publisher is closed")
        try:
            return self._queue(tensors, step, timeout)
        except Exception:
            raise
        except BaseException:  # such as SystemExit, of a signal's handler
            self._cut_off = True
            raise

    def _queue(
        self, tensors: Mapping[str, Tensor], step: int | None, timeout: float | None
    ) -> Future[Published]:
        self._pipeline.make_room(timeout)
        failure = self._settle()
        if failure is not None and self._newest is not None and not self._newest.told:
            logger.warning("%s; the next version has its weights", failure)
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
        future = Outcome()
        future.set_running_or_notify_cancel()  # a version that is half published cannot be called back
        self._loop.start(self._finish(future, delta, directory, number, step))
        self._pipeline.queued(number, future)
        self._newest, self._cut_off = future, False
        return future

    def flush(self, timeout: float | None = None) -> None:
        """Wait until nothing is outstanding; TimeoutError after ``timeout`` seconds.

        Raises the PublishError of a publish that failed since the last ``publish`` or ``flush``.
        """
        outstanding = self._pipeline.outstanding()
        if timeout is None:
            self.finish()
        late = wait(outstanding, timeout).not_done
        self._settle()
        for future in outstanding:
            if future in late:
                raise TimeoutError(f"{len(late)} publishes are not done after {timeout:g} s")
            if (failure := Future.exception(future)) is not None:
                self._newest = None  # whoever called knows by now
                raise failure

    def close(self, timeout: float | None = None) -> None:
        """Wait for what is outstanding and end the thread; what is not done by then is cut off.

        Raises as ``flush`` does. Closing twice is fine.
        """
        if self._loop.closed:
            return
        try:
            self.flush(timeout)
        except Exception:
            self._newest = None
            raise
        finally:
            self._end_thread()

    def finish(self) -> None:
        """Wait for what is outstanding, and say so where that takes long. Raises nothing of how it ends."""
        self._pipeline.finish(f"of run {self._publisher.run}")

    def lost(self) -> str | None:
        """Why the newest version is not published, if nobody has asked; see ``leaving``."""
        run, newest = self._publisher.run, self._newest
        if self._cut_off:
            return f"the newest version of run {run} was not published: it was cut off before it was queued"
        if newest is None or newest.told:
            return None
        if not newest.done():
            return f"version {self._pipeline.encoded} of run {run} was not published: the process ended"
        failure = Future.exception(newest)
        return None if failure is None else str(failure)

    def _settle(self) -> BaseException | None:
        """Tell the encoder how finished publishes ended, in their order; the last failure."""
        failure = None
        while ended := self._pipeline.ended():
            failure = self._pipeline.settle(ended) or failure
        return failure

    def _end_thread(self) -> None:
        if not self._cut_off:
            leaving.forget(self)
        if self._compacting is not None:
            self._compacting.close()
        self._loop.run(self._end())
        self._waker.flush()
        self._loop.close()
        self._held.close()

    def _claim(self, boot: Path, encoding: str, saved: int | None, override: bool) -> None:
        """Become the writer, with an encoder on what the next delta builds on.

        That is made before the claim, which fences the writer before, and again only if the floor rose
        above it meanwhile.
        """
        publisher = self._publisher
        version0 = Boot(str(boot), self._encoder.state)
        asked: Any = {"resume": version0.state if saved is None else None, "saved": saved}
        head = self._loop.run(publisher.look(version0, **asked, override=override))
        self._build_on(base_row(head, saved), boot, encoding)
        head = self._loop.run(publisher.claim(version0, **asked, override=override))
        if not self._loop.run(publisher.builds_on(self._encoder.state)):
            self._build_on(base_row(head, saved), boot, encoding)

    def _build_on(self, row: Row | None, boot: Path, encoding: str) -> None:
        """None is version 0, whose encoder is there. Only one encoder is in memory at a time."""
        if row is None:
            return
        base = self._work / "base"
        self._loop.run(self._check_out(row.number, base, boot))
        del self._encoder
        checked_out = Checkpoint.open(base, self._files)
        self._encoder = DeltaEncoder.from_checkpoint(checked_out, encoding, state=row.state)
        self._files.remove_tree(base)

    # ------------------------------------------------------------------- on the publishing thread's loop

    async def _open(
        self, open_store: Callable[[], Store], run: str, producer: Mapping[str, Any]
    ) -> Publisher:
        self._store = BoundedStore(open_store(), 60.0)
        return Publisher(
            self._store, run, files=self._files, clock=self._clock, rng=random.Random(),
            nonce=lambda: secrets.token_hex(16), run_blocking=asyncio.to_thread, producer=producer,
            raise_floor=True,
        )  # fmt: skip

    async def _check_out(self, number: int, base: Path, boot: Path) -> None:
        assert self._store is not None
        await checkout(self._store, self._publisher.run, number, base, files=self._files, base=boot)

    async def _reserve(self) -> int:
        return self._publisher.reserve()

    async def _finish(
        self, future: Outcome, delta: EncodedDelta, directory: Path, number: int, step: int | None
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
