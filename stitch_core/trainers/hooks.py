"""The hooks on the trainer side that slime and Miles share: same arguments, same times.

A process has one trainer, so what was set up at start is kept here for the hooks that are called later.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .. import logs
from ..files import PosixFiles
from ..manifest import Manifest
from ..ports import TrainerGroup
from ..retry import Retry
from ..stores import open_store
from .exports import Exports
from .group import RanksFailed, together
from .hosts import VERSION_DIRECTORY, clear_versions
from .publication import GroupPublisher, Start
from .record import RunRecord, check_run, loaded_record
from .settings import SettingsError, TrainerSettings, read_settings

logger = logging.getLogger("stitch")


class Trainer:
    """Stitch in one process of a trainer: publishes for it once ``begin`` has been called.

    ``step`` is the rollout that is trained on, where the framework tells; ``failed`` why a stock publish did.
    """

    def __init__(
        self, settings: TrainerSettings, group: TrainerGroup, framework: str, args: Any = None
    ) -> None:
        """No I/O, nothing collective: a critic's processes set up too, and never publish."""
        self.settings, self.group, self.framework, self.args = settings, group, framework, args
        self.files = PosixFiles()
        self.step: int | None = None
        self.failed: str | None = None
        self._publisher: GroupPublisher | None = None
        self._exports: Exports | None = None

    def begin(self) -> Start:
        """Claim the run; collective. Called again it claims again."""
        if self._publisher is None:
            self._publisher = GroupPublisher(self.settings, self.group, producer={"name": self.framework})
            self._publisher.on_published = self._published
        start = self._publisher.claim(self._saved)
        if self.group.rank == 0:
            logger.info(
                "run %s is claimed (epoch %d), its head is version %d; the trainer's weights become the next",
                self.settings.run, start.epoch, start.number,
            )  # fmt: skip
        return start

    def _saved(self) -> RunRecord | None:
        """Where the run stood when the checkpoint was saved that the trainer has loaded."""
        record = loaded_record(self.args, self.files)
        if record is not None:
            check_run(record, self.settings.run, Path(self.args.load).absolute())
        return record

    @property
    def ends(self) -> bool:
        """Whether this is the last step: what is published now has to be published when the process ends."""
        last = getattr(self.args, "num_rollout", None)
        return self.step is not None and last is not None and self.step >= last - 1

    def exported(self, directory: Path) -> None:
        """On rank 0: the framework has exported a checkpoint."""
        if self._exports is None:
            settings = self.settings
            self._exports = Exports(
                lambda: open_store(settings.store), self.files,
                Retry(attempts=None, deadline=settings.patience), settings.anchor_every,
            )  # fmt: skip
        self._exports.saved(directory)

    def _published(self, manifest: Manifest) -> None:
        logger.info("published version %d of run %s", manifest.number, manifest.run)
        if self._exports is not None:
            self._exports.published(manifest)

    def log_context(self) -> dict[str, Any]:
        """What log lines say besides: the newest version is known once the run is claimed."""
        number = self._publisher.number if self._publisher and self._publisher.start else None
        return {"run": self.settings.run, "version": number, "rank": self.group.rank}

    def check_snapshot(self) -> None:
        """A framework has taken its snapshot; once it may be another than was proven, nothing is published.

        Raises RanksFailed.
        """
        try:
            self.publisher.check_snapshot()
        except RanksFailed as error:
            self.failed = str(error)
            raise

    @property
    def publisher(self) -> GroupPublisher:
        if self._publisher is None:
            raise RanksFailed("nothing has claimed the run: the updater did not start through Stitch's hook")
        return self._publisher


_TRAINER: Trainer | None = None


def set_up(
    args: Any, group: TrainerGroup, framework: str, preflight: Callable[[], None], argv: Sequence[str] = ()
) -> Trainer:
    """Check settings and framework on every rank, with one report on all of them. Raises RanksFailed.

    ``argv`` is the launch script's command line, where it can be known.
    """
    global _TRAINER
    logs.configure(logs.OWN)
    logs.set_context(lambda: {"rank": group.rank})

    def check() -> TrainerSettings:
        preflight()
        settings = read_settings(args, argv)
        if settings.async_:
            _check_last_step(args, framework)
        return settings

    settings = together(group, "preflight of Stitch", check)[group.rank]
    _TRAINER = Trainer(settings, group, framework, args)
    logs.set_context(_TRAINER.log_context)
    return _TRAINER


def _check_last_step(args: Any, framework: str) -> None:
    """What is published behind the last step has to be published before the process ends."""
    flag, wanted = (
        "custom_megatron_before_train_step_hook_path",
        f"stitch_{framework}.hooks.before_train_step",
    )
    if getattr(args, flag, None) != wanted:
        raise SettingsError(
            f"stitch_async: nothing tells which step is the last, set --{flag.replace('_', '-')} {wanted}"
        )


def trainer() -> Trainer:
    """What ``set_up`` made in this process."""
    if _TRAINER is None:
        raise RanksFailed(
            "Stitch was not set up in this process: pass its init hook in --custom-megatron-init-path"
        )
    return _TRAINER


def post_write(args: Any, version_dir: str, rollout_engines: Any = None) -> None:
    """``--custom-update-weight-post-write-path``: publish a version's directory. Called on every rank.

    The frameworks call it once more at start, on rank 0 alone, for the directory that versions go into:
    nothing is published then, and nothing collective may happen.

    Raises RanksFailed, and from then on whenever it is called: the framework's base moved before the call
    that failed, so that its next delta would build on a version that is not there.
    """
    match = VERSION_DIRECTORY.match(Path(version_dir).name)
    if match is None:
        return
    here = trainer()
    if here.failed is not None:
        raise RanksFailed(f"start the trainer again, to resume: an earlier publish failed: {here.failed}")
    try:
        here.publisher.publish(Path(version_dir), int(match[1]), step=here.step)
    except Exception as error:
        here.failed = str(error)
        raise


def before_train_step(
    args: Any, rollout_id: int, step_id: int, model: Any, optimizer: Any, scheduler: Any
) -> None:
    """``--custom-megatron-before-train-step-hook-path``: manifests then say which rollout made them."""
    trainer().step = rollout_id


def post_save(
    args: Any, rollout_id: int, checkpoint_dir: Any, hf_checkpoint_dir: str | Path | None = None
) -> None:
    """``--custom-megatron-post-save-hook-path`` (Miles): an export becomes a full, if it is a version.

    Called on global rank 0 alone, so nothing collective may happen; it returns at once.
    """
    if hf_checkpoint_dir is not None:
        trainer().exported(Path(hf_checkpoint_dir).absolute())


def offer_exports(module: Any, name: str) -> None:
    """For a framework without that hook: wrap its function ``name(args, directory, ...)``, which exports."""
    original = getattr(module, name, None)
    if original is None:
        logger.warning("%s has no %s: exports do not become fulls here", module.__name__, name)
        return
    if getattr(original, "stitch", False):
        return

    def export(args: Any, directory: Any, *rest: Any, **named: Any) -> Any:
        result = original(args, directory, *rest, **named)
        if trainer().group.rank == 0:
            trainer().exported(Path(directory).absolute())
        return result

    export.stitch = True  # type: ignore[attr-defined]
    setattr(module, name, export)


@contextlib.contextmanager
def snapshot_from(updater: Any, directory: Path) -> Iterator[None]:
    """Have a framework's updater take its snapshot from ``directory``. Raises RanksFailed if it cannot."""
    args = getattr(updater, "args", None)
    given = getattr(args, "hf_checkpoint", None)
    if args is None or given is None:
        raise RanksFailed(
            f"{type(updater).__name__} has no args.hf_checkpoint to take its snapshot from, which has to be "
            f"{directory}: this revision of the framework is not supported (see MILES_FORK.md)"
        )
    args.hf_checkpoint = str(directory)
    try:
        yield
    finally:
        args.hf_checkpoint = given


def empty_versions(here: Trainer, args: Any) -> None:
    """Remove from every host what earlier attempts have left where the framework writes; collective.

    The framework does that itself, and on rank 0's host alone: beside what ranks write on the others lie the
    files of those that died, or ran elsewhere. Raises RanksFailed.
    """
    given = getattr(args, "update_weight_disk_dir", None)
    if given is None:
        return
    directory = Path(given)

    together(here.group, f"emptying {directory}", lambda: clear_versions(directory, here.files))


def start_through_stitch(updater: type, zero_dim: Callable[[type], None]) -> None:
    """Make a framework's delta updater claim the run first, count on from its head, and publish at the start.

    The stock updater's first call publishes nothing and counts from 0, as if the trainer's weights were the
    boot checkpoint's. They may be others, which no replica serves yet: they become the next version at once,
    before the first rollout. Its snapshot is taken from what the claim proved. Raises RanksFailed for
    settings that only Stitch's own encoder can have.
    """
    if trainer().settings.async_:
        raise RanksFailed(
            "stitch_async: this framework's own encoder has moved on before Stitch publishes, and its next "
            "call waits for the version: only Stitch's own encoder can publish behind the step; take it out"
        )
    original = updater.update_weights  # type: ignore[attr-defined]
    if getattr(original, "stitch", False):
        return
    zero_dim(updater)

    def update_weights(self: Any) -> None:
        if self._baseline_captured:
            original(self)
            return
        here = trainer()
        self.weight_version = here.begin().number
        empty_versions(here, self.args)
        with snapshot_from(self, here.publisher.base):
            original(self)
        here.check_snapshot()
        here.publisher.release_base()
        original(self)

    update_weights.stitch = True  # type: ignore[attr-defined]
    updater.update_weights = update_weights  # type: ignore[attr-defined]


def delta_checksum(args: Any) -> str:
    """What ``--update-weight-delta-checksum`` has to be: what names weights, or what a proof can check."""
    given = getattr(args, "update_weight_delta_checksum", None)
    return "adler32" if given == "adler32" and getattr(args, "stitch_prove", False) else "xxh3-128"


def at_least_1d(tensor: Any) -> Any:
    """Stock encoders view tensors as bytes, which a tensor without dimensions does not allow."""
    return tensor.reshape(1) if tensor.dim() == 0 else tensor
