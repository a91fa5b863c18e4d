"""Modal's control plane in this process, as far as Volumes and Dicts go, with the real one's bad manners.

The SDK talks to it over loopback. A container is a directory: its copy of the Volume. Copies meet only in
commits, which are merged file by file, the last one winning.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import random
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpclib
import grpclib.server
import modal
from aiohttp import web
from google.protobuf.empty_pb2 import Empty
from grpclib import GRPCError, Status
from modal_proto import api_grpc, api_pb2

from stitch_modal.host import Host
from stitch_modal.store import ModalStore
from stitch_modal.url import Location

BLOCK = 8 * 2**20
NAMES = "abcd"
WEEK = 7 * 86400.0


@dataclass
class Manners:
    """Bad ones are to be switched on."""

    conditions: bool = True
    """Without: a Dict's put ignores ``if_not_exists``."""
    put_seconds: float = 0.0
    """At most so long until a Dict's put takes effect."""
    lost_replies: float = 0.0
    """How often the answer to a write of a Dict, done or not, is lost. The SDK then repeats it."""
    dedupe: bool = True
    """Whether a repeated put is told what the first one did; else, that there is something already."""
    visible_after: float = 0.0
    """Seconds until a commit is in what others reload."""
    background: float = 0.0
    """Mean seconds between commits that nobody asked for."""
    skip_reload: bool = True
    """Whether a commit does without the reload after it."""
    commit_seconds: float = 0.0
    empty: float = 0.002
    """Seconds for which a mount is empty while it is reloaded."""
    fail: Callable[[str, Container | None, Any], GRPCError | None] = lambda call, container, request: None
    after: Callable[[str, Container | None, Any], None] = lambda call, container, request: None
    """Called when a call has taken effect, before it is answered."""


@dataclass
class Container:
    """``base``: what the files below ``root`` were when they were last the same as committed ones."""

    name: str
    root: Path
    pids: set[int]
    base: dict[str, tuple[int, ...]] = field(default_factory=dict)
    own: set[int] = field(default_factory=set)
    lock: threading.RLock = field(default_factory=threading.RLock)
    ended: bool = False

    def files(self) -> dict[str, Path]:
        found = {}
        for directory, _, names in os.walk(self.root):
            for name in names:
                path = Path(directory, name)
                found[str(path.relative_to(self.root))] = path
        return found

    def changes(self) -> dict[str, bytes | None]:
        """What differs from ``base``, half-written or not; from then on it is the base."""
        changed: dict[str, bytes | None] = {}
        seen = {}
        for path, at in self.files().items():
            try:
                signature = _signature(at)
                seen[path] = signature
                if self.base.get(path) != signature:
                    changed[path] = at.read_bytes()
            except FileNotFoundError:
                continue
        for path in self.base.keys() - seen.keys():
            changed[path] = None
        self.base = seen
        return changed

    def open_file(self) -> str | None:
        """A file or working directory below the mount that a process of the container has."""
        for pid in list(self.pids):
            links = [f"/proc/{pid}/cwd"]
            try:
                links += [f"/proc/{pid}/fd/{fd}" for fd in os.listdir(f"/proc/{pid}/fd")]
            except OSError:
                continue
            for link in links:
                try:
                    target = os.readlink(link)
                except OSError:
                    continue
                if target == str(self.root) or target.startswith(f"{self.root}/"):
                    # A listing in this process is over in a moment; a real server sees it as open, too.
                    return target
        return None


def _signature(at: Path) -> tuple[int, ...]:
    stat = at.stat()
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


@dataclass
class Cloud:
    """One workspace. ``log`` has each commit: when others see it, and what it wrote or (None) removed."""

    root: Path
    manners: Manners = field(default_factory=Manners)
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    log: list[tuple[float, dict[str, bytes | None]]] = field(default_factory=list)
    dicts: dict[str, dict[bytes, tuple[bytes, float]]] = field(default_factory=dict)
    containers: dict[str, Container] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)
    answers: dict[str, bool] = field(default_factory=dict)
    blocks: dict[bytes, bytes] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)
    later: float = 0.0
    """Seconds by which the server's clock is ahead, for entries that expire and dates of files."""
    dated: dict[str, float] = field(default_factory=dict)
    clients: dict[str, Any] = field(default_factory=dict)
    url: str = ""
    blocks_url: str = ""
    made: int = 0

    def reset(self) -> None:
        with self.lock:
            self.manners, self.rng, self.later = Manners(), random.Random(0), 0.0
            for kept in (
                self.log, self.dicts, self.containers, self.calls, self.answers, self.blocks, self.dated
            ):  # fmt: skip
                kept.clear()

    # -------------------------------------------------------------------------------------- containers

    def container(self, name: str) -> Container:
        """A running container of that name, which mounts what is committed."""
        if name not in self.containers:
            self.made += 1
            root = self.root / f"{self.made}.{name}"
            root.mkdir()
            self.containers[name] = Container(name, root, {os.getpid()})
            self.reload(self.containers[name])
        return self.containers[name]

    def end(self, name: str, *, commit: bool) -> None:
        """The container is gone; what was pending is committed in the end, or is lost."""
        container = self.containers.pop(name)
        with container.lock:
            if commit:
                self.commit(container)
            container.ended = True
            shutil.rmtree(container.root)

    def store(self, name: str, *, visible_after: float = 0.05, prefix: str = "", mounted: bool = True,
              clock: Any = None, deadline: float = 60.0) -> ModalStore:  # fmt: skip
        """A store as a process of that container has it; not mounted: as a machine elsewhere has it."""
        host = Host("volume", client=self.clients[name], deadline=deadline)
        mount = str(self.container(name).root) if mounted else "none"
        location = Location("volume", prefix, mount)
        return ModalStore(location, host=host, visible_after=visible_after, clock=clock)

    # ---------------------------------------------------------------------------------------- volume

    def committed(self, container: Container | None = None, *, all_of_it: bool = False) -> dict[str, bytes]:
        """The files, as somebody else than ``container`` would reload them now, or as the server has them."""
        now, found = time.monotonic(), {}
        with self.lock:
            for number, (visible, changes) in enumerate(self.log):
                own = container is not None and number in container.own
                if not (all_of_it or own or visible <= now):
                    continue
                for path, data in changes.items():
                    if data is None:
                        found.pop(path, None)
                    else:
                        found[path] = data
        return found

    def write(self, changes: dict[str, bytes | None]) -> None:
        with self.lock:
            self.log.append((time.monotonic() + self.manners.visible_after, changes))
            self.dated.update(dict.fromkeys(changes, time.time() + self.later))

    def commit(self, container: Container) -> None:
        with container.lock:
            changes = {} if container.ended else container.changes()
            if changes:
                with self.lock:
                    container.own.add(len(self.log))
                    self.write(changes)

    def reload(self, container: Container) -> None:
        """Commits what is pending, and is an empty directory for a moment."""
        with container.lock:
            self.commit(container)
            wanted = self.committed(container)
            aside = self.root / f".{container.name}.{self.rng.random()}"
            aside.mkdir()
            for entry in list(container.root.iterdir()):
                entry.rename(aside / entry.name)
            time.sleep(self.manners.empty)
            for path, data in wanted.items():
                at, old = container.root / path, aside / path
                at.parent.mkdir(parents=True, exist_ok=True)
                if old.is_file() and old.read_bytes() == data:
                    old.rename(at)
                else:
                    at.write_bytes(data)
            shutil.rmtree(aside)
            container.base = {path: _signature(at) for path, at in container.files().items()}

    # ------------------------------------------------------------------------------------------ serving

    @contextmanager
    def serving(self) -> Iterator[Cloud]:
        loop, ready, ended = asyncio.new_event_loop(), threading.Event(), asyncio.Event()

        async def run() -> None:
            server = grpclib.server.Server([Servicer(self)])
            await server.start("127.0.0.1", 0)
            self.url = f"http://127.0.0.1:{_port(server._server)}"
            app = web.Application(client_max_size=BLOCK * 2)
            app.router.add_get("/{digest}", self._get_block)
            app.router.add_put("/{digest}", self._put_block)
            runner = web.AppRunner(app)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.blocks_url = f"http://127.0.0.1:{_port(site._server)}"
            background = asyncio.ensure_future(self._background())
            ready.set()
            await ended.wait()
            background.cancel()
            await runner.cleanup()
            server.close()
            await server.wait_closed()

        def serve() -> None:
            loop.run_until_complete(run())
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        assert ready.wait(10)
        os.environ["MODAL_SERVER_URL"] = self.url
        for name in NAMES:
            self.clients[name] = modal.Client.from_credentials(f"ak-{name}", "as-secret")
        try:
            yield self
        finally:
            for client in self.clients.values():
                client.close()
            loop.call_soon_threadsafe(ended.set)
            thread.join(10)

    async def _background(self) -> None:
        while True:
            pause = self.manners.background
            await asyncio.sleep(self.rng.expovariate(1 / pause) if pause else 0.05)
            if self.manners.background and self.containers:
                container = self.rng.choice(list(self.containers.values()))
                await asyncio.to_thread(self.commit, container)

    async def _get_block(self, request: web.Request) -> web.Response:
        return web.Response(body=self.blocks[bytes.fromhex(request.match_info["digest"])])

    async def _put_block(self, request: web.Request) -> web.Response:
        data = await request.read()
        digest = hashlib.sha256(data).digest()
        assert digest.hex() == request.match_info["digest"]
        self.blocks[digest] = data
        return web.Response(body=b"kept")


def _port(server: Any) -> int:
    return int(server.sockets[0].getsockname()[1])


def _unimplemented(name: str) -> Any:
    async def handler(self: Any, stream: Any) -> None:
        await stream.recv_message()
        raise GRPCError(Status.UNIMPLEMENTED, name)

    return handler


_Rest = type(
    "_Rest",
    (api_grpc.ModalClientBase,),
    {name: _unimplemented(name) for name in api_grpc.ModalClientBase.__abstractmethods__},
)


class Servicer(_Rest):
    """The calls that stores make."""

    def __init__(self, cloud: Cloud) -> None:
        self.cloud = cloud

    async def _begin(self, stream: Any, call: str) -> tuple[Any, Container | None]:
        request = await stream.recv_message()
        token = dict(stream.metadata).get("x-modal-token-id", "")
        container = self.cloud.containers.get(token.removeprefix("ak-"))
        self.cloud.calls[call] += 1
        planned = self.cloud.manners.fail(call, container, request)
        if planned is not None:
            raise planned
        return request, container

    async def ClientHello(self, stream: Any) -> None:
        await self._begin(stream, "ClientHello")
        await stream.send_message(api_pb2.ClientHelloResponse())

    async def AuthTokenGet(self, stream: Any) -> None:
        await self._begin(stream, "AuthTokenGet")
        claims = base64.urlsafe_b64encode(json.dumps({"exp": int(time.time()) + 3600}).encode())
        await stream.send_message(api_pb2.AuthTokenGetResponse(token=f"a.{claims.rstrip(b'=').decode()}.b"))

    # ------------------------------------------------------------------------------------------ volumes

    async def VolumeGetOrCreate(self, stream: Any) -> None:
        request, _ = await self._begin(stream, "VolumeGetOrCreate")
        metadata = api_pb2.VolumeMetadata(version=api_pb2.VOLUME_FS_VERSION_V2, name=request.deployment_name)
        await stream.send_message(api_pb2.VolumeGetOrCreateResponse(volume_id="vo-1", metadata=metadata))

    async def VolumeCommit(self, stream: Any) -> None:
        request, container = await self._begin(stream, "VolumeCommit")
        if container is None:
            raise GRPCError(Status.FAILED_PRECONDITION, "the volume is not mounted in this container")
        await asyncio.to_thread(self.cloud.commit, container)
        await asyncio.sleep(self.cloud.manners.commit_seconds)
        self.cloud.manners.after("VolumeCommit", container, request)
        await stream.send_message(api_pb2.VolumeCommitResponse(skip_reload=self.cloud.manners.skip_reload))

    async def VolumeReload(self, stream: Any) -> None:
        request, container = await self._begin(stream, "VolumeReload")
        if container is None:
            raise GRPCError(Status.FAILED_PRECONDITION, "the volume is not mounted in this container")
        opened = await asyncio.to_thread(container.open_file)
        if opened is not None:
            raise GRPCError(
                Status.FAILED_PRECONDITION, f"there are open files preventing the operation: {opened}"
            )
        await asyncio.to_thread(self.cloud.reload, container)
        self.cloud.manners.after("VolumeReload", container, request)
        await stream.send_message(Empty())

    async def VolumeListFiles2(self, stream: Any) -> None:
        request, _ = await self._begin(stream, "VolumeListFiles2")
        files, folder = self.cloud.committed(all_of_it=True), request.path.strip("/")
        below = folder + "/" if folder else ""
        kind = api_pb2.FileEntry.FileType
        entries: dict[str, Any] = {}
        for path, data in files.items():
            if path == folder or path.startswith(below):
                rest = path.removeprefix(below) if path != folder else ""
                parts = rest.split("/")
                for count in range(1, len(parts)):
                    name = below + "/".join(parts[:count])
                    if request.recursive or count == 1:
                        entries[name] = api_pb2.FileEntry(path=name, type=kind.DIRECTORY)
                if request.recursive or len(parts) == 1:
                    entries[path] = api_pb2.FileEntry(
                        path=path, type=kind.FILE, size=len(data), mtime=int(self.cloud.dated[path])
                    )
        if not entries and folder:
            raise GRPCError(Status.NOT_FOUND, f"no such file or directory: {request.path}")
        await stream.send_message(api_pb2.VolumeListFiles2Response(entries=entries.values()))

    async def VolumeGetFile2(self, stream: Any) -> None:
        request, _ = await self._begin(stream, "VolumeGetFile2")
        data = self.cloud.committed(all_of_it=True).get(request.path.strip("/"))
        if data is None:
            raise GRPCError(Status.NOT_FOUND, f"no such file: {request.path}")
        digests = []
        for start in range(0, len(data), BLOCK):
            block = data[start : start + BLOCK]
            digests.append(hashlib.sha256(block).digest())
            self.cloud.blocks[digests[-1]] = block
        urls = [f"{self.cloud.blocks_url}/{digest.hex()}" for digest in digests]
        await stream.send_message(
            api_pb2.VolumeGetFile2Response(get_urls=urls, size=len(data), start=0, len=len(data))
        )

    async def VolumePutFiles2(self, stream: Any) -> None:
        request, container = await self._begin(stream, "VolumePutFiles2")
        missing, changes = [], {}
        there = self.cloud.committed(all_of_it=True)
        for index, file in enumerate(request.files):
            if request.disallow_overwrite_existing_files and file.path.strip("/") in there:
                raise GRPCError(Status.ALREADY_EXISTS, file.path)
            for number, block in enumerate(file.blocks):
                digest = block.contents_sha256
                if digest not in self.cloud.blocks or block.put_response != b"kept":
                    url = f"{self.cloud.blocks_url}/{digest.hex()}"
                    missing.append(
                        api_pb2.VolumePutFiles2Response.MissingBlock(
                            file_index=index, block_index=number, put_url=url
                        )
                    )
            # The zeros at the end of a block are not sent.
            blocks = (
                self.cloud.blocks.get(block.contents_sha256, b"").ljust(BLOCK, b"\0") for block in file.blocks
            )
            changes[file.path.strip("/")] = b"".join(blocks)[: file.size]
        if not missing:
            self.cloud.write(changes)
            self.cloud.manners.after("VolumePutFiles2", container, request)
        await stream.send_message(api_pb2.VolumePutFiles2Response(missing_blocks=missing))

    async def VolumeRemoveFile2(self, stream: Any) -> None:
        request, _ = await self._begin(stream, "VolumeRemoveFile2")
        path = request.path.strip("/")
        if path not in self.cloud.committed(all_of_it=True):
            raise GRPCError(Status.NOT_FOUND, f"no such file: {request.path}")
        self.cloud.write({path: None})
        await stream.send_message(Empty())

    async def VolumeCopyFiles2(self, stream: Any) -> None:
        request, container = await self._begin(stream, "VolumeCopyFiles2")
        files = self.cloud.committed(all_of_it=True)
        (source,) = request.src_paths
        if source.strip("/") not in files:
            raise GRPCError(Status.NOT_FOUND, f"no such file: {source}")
        self.cloud.write({request.dst_path.strip("/"): files[source.strip("/")]})
        self.cloud.manners.after("VolumeCopyFiles2", container, request)
        await stream.send_message(Empty())

    # -------------------------------------------------------------------------------------------- dicts

    async def DictGetOrCreate(self, stream: Any) -> None:
        request, _ = await self._begin(stream, "DictGetOrCreate")
        name = request.deployment_name
        await stream.send_message(
            api_pb2.DictGetOrCreateResponse(dict_id="di-" + name, metadata=api_pb2.DictMetadata(name=name))
        )

    def _live(self, dict_id: str) -> tuple[dict[bytes, tuple[bytes, float]], float]:
        """The entries that somebody touched in the last week, and the server's time."""
        now = time.time() + self.cloud.later
        entries = self.cloud.dicts.setdefault(dict_id, {})
        for key in [key for key, (_, touched) in entries.items() if now - touched > WEEK]:
            del entries[key]
        return entries, now

    async def DictUpdate(self, stream: Any) -> None:
        request, container = await self._begin(stream, "DictUpdate")
        await asyncio.sleep(self.cloud.rng.random() * self.cloud.manners.put_seconds)
        manners, metadata = self.cloud.manners, dict(stream.metadata)
        entries, now = self._live(request.dict_id)
        repeated = metadata.get("x-idempotency-key", "")
        (update,) = request.updates
        created = update.key not in entries
        if manners.dedupe and repeated in self.cloud.answers:
            created = self.cloud.answers[repeated]
        elif created or not request.if_not_exists or not manners.conditions:
            entries[update.key] = (update.value, now)
            created = created or not manners.conditions
        self.cloud.answers[repeated] = created
        manners.after("DictUpdate", container, request)
        if self.cloud.rng.random() < manners.lost_replies:
            raise GRPCError(Status.UNAVAILABLE, "the answer was lost")
        await stream.send_message(api_pb2.DictUpdateResponse(created=created))

    async def DictGet(self, stream: Any) -> None:
        request, _ = await self._begin(stream, "DictGet")
        entries, now = self._live(request.dict_id)
        value, _ = entries.get(request.key, (None, 0.0))
        if value is not None:
            entries[request.key] = (value, now)
        await stream.send_message(api_pb2.DictGetResponse(found=value is not None, value=value))

    async def DictPop(self, stream: Any) -> None:
        request, container = await self._begin(stream, "DictPop")
        entries, _ = self._live(request.dict_id)
        value, _ = entries.pop(request.key, (None, 0.0))
        self.cloud.manners.after("DictPop", container, request)
        await stream.send_message(api_pb2.DictPopResponse(found=value is not None, value=value))
