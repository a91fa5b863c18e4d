"""What a stock trainer asks of one external engine and its router, answered for the whole fleet.

slime and Miles drive engines: pull these weights, pause, load them, go on. Replicas follow the store by
themselves, so each such step succeeds at once if the store's head is as far as the trainer says, and no
replica hears of it. ``docs/http.md`` has the contract.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from stitch_core.request_ids import Abort
from stitch_core.requests import Refused, json_object
from stitch_core.versions import Refusal, is_number, malformed, not_ready, shown, unavailable

from .consumers import Consumers, Scope
from .dispatch import Dispatcher
from .front import path_of, read_body
from .reach import Reach

# Steps of an update that have no part in ours.
NOTHING_TO_DO = (
    "/pause_generation",
    "/continue_generation",
    "/begin_weight_update",
    "/end_weight_update",
    "/release_memory_occupation",
    "/resume_memory_occupation",
)
# Weights that would reach nobody: to say that they did would be a lie.
NOT_OURS = (
    "/init_weights_update_group",
    "/load_lora_adapter",
    "/unload_lora_adapter",
    "/update_weights_from_distributed",
    "/update_weights_from_ipc",
    "/update_weights_from_tensor",
    "/weights_checker",
)
ENGINE = {
    "nnodes": 1, "node_rank": 0, "gpu_id_step": 1, "base_gpu_id": 0, "tp_size": 1, "dp_size": 1, "pp_size": 1,
    "ep_size": 1, "enable_memory_saver": False, "disaggregation_mode": "null", "model_path": None,
    "tokenizer_path": None,
}  # fmt: skip
FOLLOW = "replicas follow the store by themselves"
# Seconds after which what was on its way to a replica at an abort-all is aborted again; doubled each time.
FIRST_CHASE, LAST_CHASE = 0.25, 4.0
# By how many names trainers may know one gateway.
MOST_NAMES = 64


class Facade:
    """One run's trainer in front of the gateway."""

    def __init__(
        self,
        consumers: Consumers,
        dispatcher: Dispatcher,
        reach: Reach,
        *,
        patience: float,
        engine: Mapping[str, Any],
    ) -> None:
        """``patience``: seconds for which an update waits; ``engine``: fields of ``/server_info``."""
        self._consumers = consumers
        self._head = consumers.head
        self._dispatcher = dispatcher
        self._reach = reach
        self._patience = patience
        self._engine = {**ENGINE, **engine}
        self._names: set[str] = set()
        self._tasks: set[asyncio.Task[Any]] = set()

    def routes(self) -> list[web.RouteDef]:
        """Everything but ``/abort_request``, which others may use as well."""
        get, post = web.get, web.post
        return [
            *(get(path, self._server_info) for path in ("/server_info", "/get_server_info")),
            *(get(path, self._model_info) for path in ("/model_info", "/get_model_info")),
            get("/get_weight_version", self._weight_version),
            get("/health_generate", self._alive),
            get("/flush_cache", self._flushed),
            post("/flush_cache", self._flushed),
            post("/pull_weights", self._pull_weights),
            post("/update_weights_from_disk", self._update_weights),
            post("/update_weight_version", self._update_version),
            *(post(path, self._nothing) for path in NOTHING_TO_DO),
            *(post(path, self._not_ours) for path in NOT_OURS),
            post("/workers", self._add_worker),
            post("/add_worker", self._add_worker),
            get("/workers", self._workers),
            get("/list_workers", self._workers),
            get("/v1/loads", self._loads),
            get("/get_load", self._load),
        ]

    async def close(self) -> None:
        """Ends what is under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ------------------------------------------------------------------------------------ as one engine

    async def _server_info(self, request: web.Request) -> web.Response:
        # The trainer compares these with the address that it was given, which is the one it calls.
        host, port = _address(request.host)
        if len(self._names) < MOST_NAMES:
            self._names.add(f"{host}:{port}")
        return web.json_response({"host": host, "port": port, **self._engine, **self._version()})

    async def _model_info(self, request: web.Request) -> web.Response:
        fields = {key: self._engine[key] for key in ("model_path", "tokenizer_path")}
        return web.json_response({**fields, "is_generation": True, **self._version()})

    async def _weight_version(self, request: web.Request) -> web.Response:
        return web.json_response(self._version())

    def _version(self) -> dict[str, Any]:
        """The newest version of the run, as far as it is known: a decimal string, or null."""
        run = self._consumers.run
        number = self._head.number if self._head else None
        if number is None:
            replicas = self._dispatcher.fleet.replicas
            served = [r.serving.number for r in replicas if r.serving and r.serving.run == run]
            number = max(served, default=None)
        return {"run": run, "weight_version": None if number is None else str(number)}

    async def _alive(self, request: web.Request) -> web.Response:
        # Trainers wait for this before they claim their run, and replicas may wait for that claim.
        return web.json_response({"status": "ok"})

    async def _flushed(self, request: web.Request) -> web.Response:
        return web.Response(text="Nothing to flush: no version's cache outlives its activation.\n")

    # --------------------------------------------------------------------------------------- an update

    async def _pull_weights(self, request: web.Request) -> web.Response:
        number = _number((await _body(request)).get("target_version"), "target_version")
        await self._until_published(number)
        return web.json_response({"success": True, "message": FOLLOW, "version": number})

    async def _update_weights(self, request: web.Request) -> web.Response:
        version = (await _body(request)).get("weight_version")
        if version is not None:
            await self._until_published(_number(version, "weight_version"))
        return web.json_response({"success": True, "message": FOLLOW, "num_paused_requests": 0})

    async def _update_version(self, request: web.Request) -> web.Response:
        body = await _body(request)
        number = _number(body.get("new_version"), "new_version")
        await self._until_published(number)
        # An engine's default is to abort; a trainer that wants it says so.
        if body.get("abort_all_requests") is True:
            await self._abort(request)
        return web.json_response({"success": True, "message": FOLLOW, "new_version": str(number)})

    async def _until_published(self, number: int) -> None:
        """Returns once the head is at ``number`` or past it. Raises Refused if that takes too long."""
        if self._head is None:
            return
        if not await self._head.reaches(number, self._patience):
            run, now = self._head.run, self._head.number
            if self._head.error is not None:
                message = f"version {number} of run {run} may be published: {self._head.error}"
                raise Refused(unavailable(message, retry="here"))
            at = "has no version yet: no trainer has claimed it" if now is None else f"is at version {now}"
            message = f"version {number} is not published after {self._patience:g} s: run {run} {at}"
            raise Refused(not_ready(message, run=run, target_version=number, applied=now))
        self._start(self._reach.wake_all())

    async def _nothing(self, request: web.Request) -> web.Response:
        return web.json_response({"success": True, "status": "ok", "message": f"nothing to do: {FOLLOW}"})

    async def _not_ours(self, request: web.Request) -> web.Response:
        message = (
            f"{path_of(request)} would reach no replica: weights go through the store. Set the trainer's "
            "update to disk (slime: --update-weight-transport disk; Miles: --update-weight-transfer-mode "
            "disk-delta)"
        )
        raise Refused(Refusal(403, "RouteBlocked", message, "never"))

    # ------------------------------------------------------------------------------------ as its router

    async def _add_worker(self, request: web.Request) -> web.Response:
        url = request.query.get("url") or (await _body(request)).get("url")
        if not isinstance(url, str) or not url:
            raise Refused(malformed("a worker needs a url"))
        here = {*self._names, "{}:{}".format(*_address(request.host))}
        here.add(f"{self._engine.get('host')}:{self._engine.get('port')}")
        if "{}:{}".format(*_address(urlsplit(url).netloc)) not in here:
            message = (
                f"{url} is not this gateway, which is addressed as {request.host}: its replicas are "
                "found in the store or named with --replica, and no trainer's own engine is one"
            )
            raise Refused(Refusal(403, "RouteBlocked", message, "never"))
        return web.json_response({"status": "success", "success": True, "worker_id": "stitch", "url": url})

    async def _workers(self, request: web.Request) -> web.Response:
        # One worker, which is where the trainer sends its aborts and asks for the load.
        url = f"http://{request.host}"
        worker = {"id": "stitch", "url": url, "worker_type": "regular", "is_healthy": True}
        return web.json_response({"workers": [worker], "urls": [url], "total": 1})

    async def _loads(self, request: web.Request) -> web.Response:
        running, waiting = self._counts(request)
        load = {
            "dp_rank": 0, "num_running_reqs": running, "num_waiting_reqs": waiting,
            "num_total_reqs": running + waiting,
        }  # fmt: skip
        return web.json_response({"timestamp": time.time(), "dp_rank_count": 1, "loads": [load]})

    async def _load(self, request: web.Request) -> web.Response:
        running, waiting = self._counts(request)
        return web.json_response([{"dp_rank": 0, "num_reqs": running + waiting, "num_waiting_reqs": waiting}])

    def _counts(self, request: web.Request) -> tuple[int, int]:
        """Requests of the asker's run and consumer: at replicas, and held."""
        calls = self._dispatcher.of(self._scope(request))
        running = sum(call.replica is not None for call in calls)
        return running, len(calls) - running

    async def abort_all(self, request: web.Request) -> web.Response:
        """Abort the requests of the asker's run and consumer, here and at every replica; nobody else's."""
        calls, reached = await self._abort(request)
        return web.json_response({"requests": calls, "replicas": reached})

    def _scope(self, request: web.Request) -> Scope:
        scope = self._consumers.scope(request.headers)
        assert scope is not None  # a facade has a run
        return scope

    async def _abort(self, request: web.Request) -> tuple[int, int]:
        scope = self._scope(request)
        calls = self._dispatcher.abort_scope(scope)
        told = {"abort_all": True, "run": scope.run, "consumer": scope.consumer}
        # First those who could still send a request to a replica that has heard of the abort.
        await self._reach.other_gateways("/abort_request", told, request.headers)
        reached = await self._reach.everyone("/abort_request", {"rid": scope.prefix})
        self.chase(calls)
        return len(calls), reached

    def chase(self, calls: set[Any]) -> None:
        """See to it that these end."""
        self._start(self._chase(calls))

    async def _chase(self, calls: set[Any]) -> None:
        """Abort again, one by one, what its replica had not begun when it was told, until all have ended."""
        pause = FIRST_CHASE
        while calls:
            await asyncio.sleep(pause)
            pause = min(2 * pause, LAST_CHASE)
            calls = calls & self._dispatcher.calls
            late = [(call.replica, call, own) for call in calls if call.replica for own in call.ids]
            bodies = [Abort(own, call.constraint.run, call.consumer).body() for _, call, own in late]
            posts = (
                self._reach.one(replica.url, "/abort_request", body, replica.headers)
                for (replica, *_), body in zip(late, bodies, strict=True)
            )
            await asyncio.gather(*posts)

    def _start(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _body(request: web.Request) -> dict[str, Any]:
    data = await read_body(request)
    return json_object(data) if data else {}


def _number(value: object, name: str) -> int:
    """A version's number as trainers write it, 7 or "7" or "000007". Raises Refused."""
    if isinstance(value, int) and is_number(value):
        return value
    if isinstance(value, str) and re.fullmatch(r"\d{1,18}", value, re.ASCII):
        return int(value)
    raise Refused(malformed(f"{name} must be the number of a version, not {shown(value)}"))


def _address(netloc: str) -> tuple[str, int]:
    """The host (an IPv6 one in brackets) and the port in what an URL or a Host header says."""
    host, colon, port = netloc.rpartition(":")
    return (host, int(port)) if colon and port.isdecimal() and not host.endswith(":") else (netloc, 80)
