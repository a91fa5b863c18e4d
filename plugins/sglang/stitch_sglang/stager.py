"""One rank's images: loaded on a thread of their own while the rank serves, copied in at an activation."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from stitch_core.checkpoint import CheckpointError
from stitch_core.parallel import default_workers
from stitch_core.replica.child import LEAST_PRIORITY, niceness

from .image import Image, Layout, storage_key
from .reading import Reader
from .shadow import Shadow
from .survey import Survey, Unfit, bump

logger = logging.getLogger(__name__)

NAMED = 4

Load = Callable[[torch.nn.Module, Any], None]


class Superseded(Exception):
    """Another stage was begun, or this one called off."""


def give_way(threads: int) -> None:
    """Make this thread one that serving goes before: less priority than its process, and no helpers in torch.

    torch's operations end at a barrier, where one helper that waits for a core holds the whole step up.
    ``threads``: of torch, in threads that begin later.
    """
    lower = os.getpriority(os.PRIO_PROCESS, os.getpid()) + niceness()
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), min(lower, LEAST_PRIORITY))
    # OpenMP has the number for each thread, torch one more for threads to come (a thread takes it when it
    # first asks, so now): that is put back by a thread that then ends.
    torch.get_num_threads()
    torch.set_num_threads(1)
    back = threading.Thread(target=torch.set_num_threads, args=(threads,))
    back.start()
    back.join()


@dataclass
class Work:
    """One stage. ``outcome``: running, done, unfit (and will be, however often it is tried) or failed."""

    id: str
    directory: Path
    test: bool
    expected: str = ""
    outcome: str = "running"
    message: str = ""
    state: str = ""
    bytes: int = 0
    began: float = field(default_factory=time.monotonic)
    seconds: float = 0.0
    image: Image | None = None
    changed: Collection[int] = ()
    since: Image | None = None
    """The image that ``changed`` is the difference to."""
    stop: threading.Event = field(default_factory=threading.Event)
    steps: int = 0
    """Grows as long as the work gets on."""

    def go_on(self) -> None:
        self.steps += 1
        if self.stop.is_set():
            raise Superseded


class RankStager:
    """All methods are for the scheduler's thread. ``load`` is SGLang's: restore, load, post-process.

    ``survey`` was made before anything ran. ``ranks``: how many share this host's CPUs.

    ``active`` equals the live weights; the other image holds the version before, or what was staged.
    """

    def __init__(self, model: torch.nn.Module, survey: Survey, load: Load, pin: bool, ranks: int = 1) -> None:
        self._model, self._load, self._pin = model, load, pin
        self._hashers, self._copiers = default_workers(2 * ranks), default_workers(ranks)
        self._threads = torch.get_num_threads()
        self._survey = survey
        for one in self._survey.tensors.values():
            if one.required and one.tensor.numel() and storage_key(one.tensor) is None:
                raise Unfit(f"{one.path} is a {one.tensor.layout} tensor")
        found = self._survey.tensors.values()
        self.layout = Layout.of((one.path, one.tensor, one.required) for one in found)
        self._kept: frozenset[int] | None = None  # segments that loads write; None until a self-test
        self.active: Image | None = None
        self._spare: Image | None = None
        self._work: Work | None = None
        self._thread: threading.Thread | None = None

    @property
    def images(self) -> int:
        return (self.active is not None) + (self._spare is not None)

    # ------------------------------------------------------------------------------------------- stage

    def begin(self, id: str, directory: Path, state: str, *, test: bool, second: bool) -> None:
        """Stage ``directory``, whose state is to be ``state`` ("": any); what runs is called off.

        ``second``: there is memory for an image beside the active one. Staging what the spare image holds
        is no work.
        """
        before, work = self._thread, Work(id, directory, test, expected=state)
        if self._work is not None:
            self._work.stop.set()
        self._work = work
        if self._spare is None and self.active is not None and not second:
            self._spare, self.active = self.active, None
        self._thread = threading.Thread(
            target=self._run, args=(work, before, self._spare), daemon=True, name="stitch-stage"
        )
        self._thread.start()

    def report(self, id: str) -> dict[str, Any]:
        """How the stage ``id`` is going."""
        work = self._work
        if work is None or work.id != id:
            return {"outcome": "failed", "message": "another stage was begun"}
        if work.outcome == "done" and work.image is not None:
            if work.test:
                self.active, self._spare = work.image, None  # as the live weights, that was the test
            else:
                self._spare = work.image
        seconds = work.seconds or time.monotonic() - work.began
        return {
            "outcome": work.outcome, "message": work.message, "state": work.state, "bytes": work.bytes,
            "seconds": seconds, "image": self.layout.nbytes, "images": self.images,
            "changed": len(work.changed), "segments": len(self.layout.segments), "steps": work.steps,
        }  # fmt: skip

    def cancel(self, id: str) -> None:
        if self._work is not None and self._work.id == id and self._work.outcome == "running":
            self._work.stop.set()

    # ---------------------------------------------------------------------------------------- activate

    def staged(self, id: str) -> Image | None:
        """The image of a stage that can be activated."""
        work = self._work
        ready = work is not None and work.id == id and work.outcome == "done" and not work.test
        return work.image if ready and work is not None else None

    def copy(self, id: str) -> int:
        """Into the live weights, what of them changes; the bytes. After an error the weights are unknown."""
        work, image = self._work, self.staged(id)
        assert work is not None
        assert image is not None
        same_base = self.active is not None and work.since is self.active
        numbers = work.changed if same_base else sorted(self._kept or ())
        before, self.active = self.active, None
        copied = image.copy_to_live(numbers, self._copiers)
        bump(self._tensors_of(numbers))
        self.active, self._spare, self._work = image, before, None
        return copied

    def _tensors_of(self, numbers: Collection[int]) -> Iterator[torch.Tensor]:
        """The live tensors that lie in these segments."""
        keys = {storage_key(self.layout.segments[number].live) for number in numbers}
        return (one.tensor for one in self._survey.tensors.values() if storage_key(one.tensor) in keys)

    def forget(self) -> None:
        """The live weights are about to be changed by other means."""
        if self._work is not None:
            self._work.stop.set()
            self._work = None
        self._spare = self._spare or self.active  # still good for a return to what it holds
        self.active = None

    # -------------------------------------------------------------------------------------- its thread

    def _run(self, work: Work, before: threading.Thread | None, image: Image | None) -> None:
        give_way(self._threads)
        try:
            if before is not None:
                before.join()
            work.go_on()
            image = image or self._new_image(work)
            if work.test or not work.expected or image.state != work.expected:
                image.state = None
                with torch.no_grad():
                    (self._test if work.test else self._stage)(work, image)
        except Superseded:
            work.outcome, work.message = "failed", "it was called off"
        except Unfit as error:
            work.outcome, work.message = "unfit", str(error)
        except Exception as error:
            logger.warning("stitch: staging %s failed: %r", work.directory, error)
            work.outcome, work.message = "failed", str(error) or repr(error)
        else:
            self._finish(work, image)

    def _new_image(self, work: Work) -> Image:
        image = Image(self.layout, self._pin)
        if self._kept is not None:
            for number in range(len(self.layout.segments)):
                work.go_on()
                if number not in self._kept:
                    image.fill(number, lambda live: live)
        return image

    def _finish(self, work: Work, image: Image) -> None:
        active = self.active
        if not work.test:
            numbers = []
            for number in sorted(self._kept or ()):
                work.steps += 1
                if active is None or not image.equals(number, active):
                    numbers.append(number)
            work.changed, work.since = numbers, active
        work.image, work.state = image, image.state or ""
        work.seconds = time.monotonic() - work.began
        work.outcome = "done"

    def _stage(self, work: Work, image: Image) -> None:
        numbers = self.layout.by_storage()

        def view(live: torch.Tensor) -> torch.Tensor | None:
            key = storage_key(live)
            return None if key is None else image.view(numbers[key], live)

        reader = Reader(work.directory, work.go_on, self._hashers)
        shadow = Shadow(self._model, self._survey, view)
        try:
            self._load(shadow.model, iter(reader))
            shadow.settle()
        finally:
            shadow.close()
        state, work.bytes = reader.state(), reader.bytes
        if work.expected and state != work.expected:
            raise CheckpointError(f"{work.directory} holds state {state}, not {work.expected}")
        image.state = state

    def _test(self, work: Work, image: Image) -> None:
        """Load what the engine booted from into the complement of the live bytes: all must come out live.

        A byte that stays the complement was not loaded. That is fine for what is no parameter or persistent
        buffer, if it holds for all of it: a constant.
        """
        for number in range(len(self.layout.segments)):
            work.go_on()
            image.fill(number, torch.bitwise_not)
        self._stage(work, image)
        wrong, kept = [], []
        for number, segment in enumerate(self.layout.segments):
            work.go_on()
            if image.equals_live(number):
                kept.append(number)
            elif not segment.required and image.is_complement(number):
                image.fill(number, lambda live: live)
            else:
                at = image.first_difference(number)
                wrong.append(f"{segment.names[0]} (from byte {at} of {segment.nbytes})")
        if wrong:
            more = f" and {len(wrong) - NAMED} more" if len(wrong) > NAMED else ""
            raise Unfit(
                "a second load of the boot checkpoint does not give the weights that the engine booted with: "
                f"{', '.join(wrong[:NAMED])}{more}"
            )
        self._kept = frozenset(kept)
