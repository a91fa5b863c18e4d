"""What all stores of one process share for a Volume: its one handle, its Dict, and its mount.

Two handles of one Volume do not know of each other's reloads and commits, so there is never a second one.
The SDK is imported here, at the first call.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import threading
from typing import Any

from stitch_core.stores import BadUrl

from .errors import Refused
from .mount import DEADLINE, Mount, MountedFiles
from .remote import RemoteFiles
from .url import Location

MODAL_MOUNTS = "/__modal/volumes"
"""Where a container has its Volumes, by id; the SDK looks for open files there."""


def check_installed() -> None:
    """Raises BadUrl where the SDK is missing."""
    if importlib.util.find_spec("modal") is None:
        raise BadUrl("modal needs the Modal SDK: pip install 'stitch-rl[modal]'")


def dict_name(volume: str) -> str:
    """The Dict that holds the claims on a Volume. Names have fewer than 64 characters."""
    if len(volume) <= 50:
        return f"stitch-{volume}"
    return f"stitch-{volume[:24]}-{hashlib.sha256(volume.encode()).hexdigest()[:24]}"


class Host:
    """Blocking; used from any thread. ``client`` is the SDK's, None for the process's own.

    ``deadline``: seconds that a reload or commit may wait for files to be closed.
    """

    def __init__(
        self, volume: str, environment: str | None = None, *, client: Any = None, deadline: float = DEADLINE
    ) -> None:
        self._volume_name, self._environment, self._client = volume, environment, client
        self._deadline = deadline
        self._lock = threading.Lock()
        self._volume: Any = None
        self._dict: Any = None
        self._mounts: dict[str, Mount] = {}
        self.volume_id = ""

    def connect(self) -> tuple[Any, str]:
        """The Dict and the Volume's id. Raises what the SDK does."""
        import modal

        with self._lock:
            if self._volume is None:
                volume = modal.Volume.from_name(
                    self._volume_name, environment_name=self._environment, client=self._client
                )
                volume.hydrate()
                self._dict = modal.Dict.from_name(
                    dict_name(self._volume_name),
                    environment_name=self._environment,
                    create_if_missing=True,
                    client=self._client,
                )
                self.volume_id = volume.object_id
                self._volume = volume
            return self._dict, self.volume_id

    def files(self, location: Location) -> MountedFiles | RemoteFiles:
        """The Volume's files below the location's prefix, through the mount where there is one."""
        self.connect()
        path = location.mount
        if path is None and os.path.isdir(f"{MODAL_MOUNTS}/{self.volume_id}"):
            path = f"{MODAL_MOUNTS}/{self.volume_id}"
        if path is None or path == "none":
            return RemoteFiles(self._volume, location.prefix)
        if not os.path.isdir(path):
            raise Refused(
                f"{location}: there is no directory {path}: is the Volume mounted there, in this container?"
            )
        path = os.path.realpath(path)
        with self._lock:
            if path not in self._mounts:
                self._mounts[path] = Mount(path, self._volume, deadline=self._deadline)
            return MountedFiles(self._mounts[path], location.prefix)


_hosts: dict[tuple[int, str, str | None], Host] = {}
_hosts_lock = threading.Lock()


def host_of(location: Location) -> Host:
    """This process's only Host for the location's Volume."""
    key = (os.getpid(), location.volume, location.environment)
    with _hosts_lock:
        if key not in _hosts:
            _hosts[key] = Host(location.volume, location.environment)
        return _hosts[key]
