"""What a rollout request demands, and what its answer says about versions, for frameworks' own request code.

The frameworks send requests through one ``post`` function. It is wrapped, so that their generation code (and
a user's) stays as it is: the wrapper adds the demand and the session, and keeps what the answers report until
the sample is at hand.
"""

from __future__ import annotations

import asyncio
import contextvars
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..versions import HEADER_CONSUMER, HEADER_RUN, VersionConstraint
from .settings import TrainerSettings

HEADER_SESSION = "X-SMG-Routing-Key"
SESSION = "session"
"""``source`` of a report that a session server kept, of a call that an agent made."""
ROUTES = ("/generate", "/v1/completions", "/v1/chat/completions")

Post = Callable[..., Awaitable[Any]]


class Unattributed(Exception):
    """An answer names no versions, or others than were demanded: it must not be trained on."""


@dataclass
class Episode:
    """One sample's requests: who asks, and the reports of the answers so far.

    A generate function may make several samples of them (``samples``); each has all of the reports. Not so
    where no sample is known (``shared``): the next one there has asked for itself.
    """

    evaluation: bool = False
    session: str | None = None
    shared: bool = False
    reports: list[dict[str, Any]] = field(default_factory=list)
    told: list[dict[str, Any]] = field(default_factory=list)
    samples: list[Any] = field(default_factory=list)


evaluating: contextvars.ContextVar[bool] = contextvars.ContextVar("stitch_evaluating", default=False)
_EPISODE: contextvars.ContextVar[Episode | None] = contextvars.ContextVar("stitch_episode", default=None)


def begin_episode(evaluation: bool, session: str | None, *, shared: bool = False) -> Episode:
    """Requests of this task, and of tasks that it starts, belong to the new episode from here on."""
    episode = Episode(evaluation, session, shared)
    _EPISODE.set(episode)
    return episode


def current_episode() -> Episode | None:
    return _EPISODE.get()


class Demand:
    """Each request's constraint: at most ``lag`` versions behind the head. Evaluation asks for the head."""

    def __init__(self, settings: TrainerSettings, oldest: Callable[[int], int]) -> None:
        """``oldest`` returns the oldest number for a lag; it may block for reads of small objects."""
        self.settings, self._oldest = settings, oldest

    def constraint(self, evaluation: bool) -> VersionConstraint:
        lag = 0 if evaluation else self.settings.lag
        return VersionConstraint(min_version=self._oldest(lag), run=self.settings.run)

    def wrap(self, post: Post) -> Post:
        """A ``post(url, payload, ...)`` that adds the demand to generating requests and keeps reports."""

        async def stitch_post(url: str, payload: Any, *args: Any, **kwargs: Any) -> Any:
            if not url.endswith(ROUTES) or not isinstance(payload, dict):
                return await post(url, payload, *args, **kwargs)
            episode = _EPISODE.get()
            if episode is None:
                episode = begin_episode(evaluating.get(), None, shared=True)
            wanted = await asyncio.to_thread(self.constraint, episode.evaluation)
            if "weight_version" not in payload:
                payload = {**payload, "weight_version": wanted.fields()}
            kwargs["headers"] = self._headers(episode, kwargs.get("headers"))
            answer = await post(url, payload, *args, **kwargs)
            episode.reports.append(report_of(answer, VersionConstraint.parse(payload["weight_version"])))
            return answer

        stitch_post.stitch_wraps = post  # type: ignore[attr-defined]
        return stitch_post

    def _headers(self, episode: Episode, given: Mapping[str, str] | None) -> dict[str, str]:
        consumer = self.settings.eval_consumer if episode.evaluation else self.settings.consumer
        headers = {HEADER_RUN.title(): self.settings.run, HEADER_CONSUMER.title(): consumer}
        if episode.session is not None:
            headers[HEADER_SESSION] = episode.session
        return headers | dict(given or {})


def install(demand: Demand, http_module: Any, package: str) -> None:
    """Wrap ``http_module.post``, and every copy of it that modules of ``package`` have imported.

    Installing again replaces the demand.
    """
    current = http_module.post
    original = getattr(current, "stitch_wraps", current)
    wrapped = demand.wrap(original)
    for name, module in list(sys.modules.items()):
        if (name == package or name.startswith(package + ".")) and module is not None:
            held = vars(module).get("post")
            if held is not None and (held is original or getattr(held, "stitch_wraps", None) is original):
                module.post = wrapped  # type: ignore[attr-defined]
    http_module.post = wrapped


def read_report(answer: Any) -> dict[str, Any]:
    """What an answer says of versions, as it stands: run, start, end, spans, None where it is missing."""
    meta = answer.get("meta_info", answer.get("metadata")) if isinstance(answer, dict) else None
    meta = meta if isinstance(meta, dict) else {}
    report = {"run": meta.get("run"), "start": meta.get("weight_version_start")}
    report |= {"end": meta.get("weight_version_end"), "spans": meta.get("weight_versions")}
    return report | {key: meta[key] for key in ("kv", "kv_versions", "kv_passes") if key in meta}


def report_of(answer: Any, wanted: VersionConstraint) -> dict[str, Any]:
    """``read_report`` of an answer that says which versions made it, and the demanded ones did.

    Raises Unattributed.
    """
    if not isinstance(answer, dict):
        raise Unattributed(f"the answer is {type(answer).__name__}, not an object")
    return _checked(read_report(answer), wanted)


def _checked(report: dict[str, Any], wanted: VersionConstraint) -> dict[str, Any]:
    start, end = report["start"], report["end"]
    if not isinstance(start, int) or not isinstance(end, int) or not isinstance(report["run"], str):
        raise Unattributed(
            "the answer does not say which versions made it: are rollout requests sent to the gateway of "
            "Stitch (--sglang-router-ip, --sglang-router-port)?"
        )
    low, exact = wanted.min_version, wanted.exact_version
    if (low is not None and start < low) or (exact is not None and {start, end} != {exact}):
        raise Unattributed(f"the answer is of versions {start} to {end}, demanded was {wanted.fields()}")
    if wanted.run is not None and report["run"] != wanted.run:
        raise Unattributed(f"the answer is of run {report['run']}, demanded was run {wanted.run}")
    return report


def session_of(sample: Any) -> str | None:
    """What keeps related requests on one replica: the GRPO group, else the sample's own session."""
    group = getattr(sample, "group_index", None)
    return f"group-{group}" if group is not None else getattr(sample, "session_id", None)


def forget_abandoned(sample: Any) -> None:
    """Drop the record of an answer that was thrown away: frameworks keep metadata when they ask again."""
    metadata = sample.metadata or {}
    if "stitch" in metadata and not getattr(sample, "response_length", 0):
        sample.metadata = {key: value for key, value in metadata.items() if key != "stitch"}


def record(sample: Any, episode: Episode) -> None:
    """Write an episode's reports into a finished sample, each once.

    ``sample.metadata["stitch"]`` gets each answer's report; ``sample.weight_versions`` gets the start and end
    of an answer that the framework recorded under its oldest version alone.
    """
    reports, episode.reports = episode.reports, []
    if reports:
        episode.told, episode.samples = reports, [sample]
    elif episode.shared or any(one is sample for one in episode.samples):
        return
    else:
        reports = episode.told
        episode.samples.append(sample)
    if not reports:
        return
    metadata = dict(sample.metadata or {})
    sample.metadata = metadata | {"stitch": [*metadata.get("stitch", []), *reports]}
    _add_bounds(sample, reports)


def _add_bounds(sample: Any, reports: Sequence[Mapping[str, Any]]) -> None:
    known = [str(version) for version in sample.weight_versions]
    for report in reports:
        for version in (report["start"], report["end"]):
            if str(version) not in known:
                known.append(str(version))
    sample.weight_versions = known


def _reports(sample: Any) -> list[Mapping[str, Any]]:
    """None where anything else stands in their place: metadata is everybody's, an agent's too."""
    reports = (sample.metadata or {}).get("stitch")
    if isinstance(reports, list) and all(isinstance(report, Mapping) for report in reports):
        return reports
    return []


def from_session(sample: Any) -> bool:
    """Whether a session server recorded the answers in a sample."""
    return any(report.get("source") == SESSION for report in _reports(sample))


def record_session(sample: Any, run: str) -> None:
    """Check a session server's record of a sample's model calls, and complete ``sample.weight_versions``.

    The server keeps each call's oldest version there, as text. Raises Unattributed unless every call says
    which versions of ``run`` made it.
    """
    reports, oldest = sample.metadata["stitch"], list(sample.weight_versions)
    for report in reports:
        _checked(report, VersionConstraint(run=run))
    known = all(isinstance(version, str) and version.isdecimal() for version in oldest)
    if len(oldest) != len(reports) or not known:
        raise Unattributed(
            f"sample {getattr(sample, 'index', '?')} has {len(reports)} model calls, and their oldest "
            f"versions are {oldest}: do all replicas run this version of Stitch?"
        )
    _add_bounds(sample, reports)


def attributed(sample: Any) -> Any:
    """The sample, if what was generated in it says which versions made it. Raises Unattributed."""
    if getattr(sample, "response_length", 0) and not _reports(sample):
        raise Unattributed(
            f"sample {getattr(sample, 'index', '?')} has a response and no version record: its generate "
            "function does not send requests through the framework's post, nor through a session server that "
            "reports versions"
        )
    return sample
