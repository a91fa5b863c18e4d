"""C38: a command that cannot do what it is asked fences no trainer, whatever is in its way.

In each test a live trainer publishes before the command and, unless the command does its work, after it.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import pytest

from stitch_core.checkout import CheckoutRefused
from stitch_core.cli import publish
from stitch_core.policy_publisher import PolicyPublisher
from stitch_core.publisher import Fenced, PublishError
from stitch_core.stores.local import LocalStore
from tests.cli.commands import Shell
from tests.cli.test_migrate import write_version


@contextmanager
def trainer(shell: Shell, fenced: bool = False) -> Iterator[PolicyPublisher]:
    """A trainer that has published version 1, and publishes again when the command has ended."""
    live = PolicyPublisher.start(shell.store, "r", shell.base, shell.root / "trainer")
    try:
        shell.learn("trained")
        live.publish(shell.tensors).result(60)
        before = shell.tensors
        yield live
        with pytest.raises(Fenced) if fenced else nullcontext():
            live.publish(before).result(60)
    finally:
        with suppress(Fenced):
            live.close()


def delta_made_on_boot(shell: Shell) -> tuple[object, ...]:
    boot = Shell(shell.root, shell._capsys)
    return (boot.delta("stray"),)


def damaged_delta(shell: Shell) -> tuple[object, ...]:
    """Its frames are cut and its checksums are those of other bytes."""
    directory = shell.delta("damaged")
    shard = next(directory.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-5:] = b"-----"
    shard.write_bytes(bytes(data))
    return (directory,)


def full_with_a_file_that_no_manifest_names(shell: Shell) -> tuple[object, ...]:
    directory = shell.learn("full")
    (directory / "config.json~").write_text("{}")
    return (directory,)


def full_of_another_base(shell: Shell) -> tuple[object, ...]:
    other = shell.learn("other")
    return (shell.learn("full"), "--base", other)


MAKERS = [
    delta_made_on_boot,
    damaged_delta,
    full_with_a_file_that_no_manifest_names,
    full_of_another_base,
]


@pytest.mark.parametrize("make", MAKERS)
def test_c38_what_is_wrong_with_the_directory(shell: Shell, make: Any) -> None:
    with trainer(shell):
        said = shell.publish(*make(shell))
        assert said.code == 2
        assert said.complaint
        assert shell.head() == (1, 1)


@pytest.mark.parametrize("how", [(), ("--as-delta",)])
@pytest.mark.parametrize("lacks", ["room", "links"])
def test_c38_a_store_that_takes_nothing_more(
    shell: Shell, lacks: str, how: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its head could still be swapped: no links is what a mount is left with that lost a capability."""

    async def no_room(self: LocalStore) -> int:
        return 100

    def no_links(source: object, target: object, **_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM), str(target))

    with trainer(shell):
        directory = shell.learn("next")
        with monkeypatch.context() as patch:
            if lacks == "room":
                patch.setattr(LocalStore, "room", no_room)
            else:
                patch.setattr(os, "link", no_links)
            said = shell.publish(directory, *how)
        assert said.code == 2
        assert ("EPERM" in said.complaint) == (lacks == "links")
        assert shell.head() == (1, 1)


def test_c38_a_scratch_directory_without_room(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    with trainer(shell):
        directory = shell.learn("next")
        with monkeypatch.context() as patch:
            patch.setattr(publish.PosixFiles, "free_bytes", lambda *_: 10)
            said = shell.publish(directory, "--as-delta", "--work", shell.root / "small")
        assert str(shell.root / "small") in said.complaint
        assert shell.head() == (1, 1)


def moves_meanwhile(live: PolicyPublisher, name: str, shell: Shell, patch: pytest.MonkeyPatch) -> None:
    """The trainer publishes while the directory is made ready, once."""
    prepare = getattr(publish, name)

    def slow(*arguments: Any) -> Any:
        made = prepare(*arguments)
        patch.setattr(publish, name, prepare)
        live.publish(shell.tensors).result(60)
        return made

    patch.setattr(publish, name, slow)


def test_c38_the_head_moves_while_a_delta_is_proven(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fitted the version before, so the trainer's newest one would be lost."""
    with trainer(shell) as live:
        directory = shell.delta("next")
        moves_meanwhile(live, "given_delta", shell, monkeypatch)
        assert "version 2" in shell.publish(directory).complaint
        assert shell.head() == (2, 1)


def test_c38_the_head_moves_while_a_full_is_encoded(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """It can be encoded on the newest as well: what is in its way then is only time."""
    with trainer(shell, fenced=True) as live:
        directory = shell.learn("next")
        moves_meanwhile(live, "_new_delta", shell, monkeypatch)
        assert shell.publish(directory, "--as-delta", "--json").json["number"] == 3
        assert shell.head() == (3, 2)
    assert shell("diff", "r", directory, "--store", shell.store).code == 0


def test_c38_a_reference_whose_first_version_does_not_fit(shell: Shell) -> None:
    """Of a run that a trainer has claimed, and has published nothing to so far."""
    updates = shell.root / "store" / "updates"
    shell.learn("one")
    old, unlike = shell.tensors, shell.learn("two")
    assert unlike
    with PolicyPublisher.start(shell.store, "r", shell.base, shell.root / "trainer") as live:
        write_version(updates / "weight_v000001", 1, old, shell.tensors)
        (shell.root / "store" / "latest").write_text("weight_v000001")
        assert shell.claim("--adopt").code == 2
        assert shell.head() == (0, 1)
        live.publish(shell.tensors).result(60)
    index = updates / "weight_v000001" / "model.safetensors.index.json"
    assert json.loads(index.read_text()), "and is left as it was"


def test_c38_a_rollback_that_the_store_has_no_room_for(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    with trainer(shell) as live:
        live.publish(shell.tensors).result(60)

        async def no_room(self: LocalStore) -> int:
            return 1

        with monkeypatch.context() as patch:
            patch.setattr(LocalStore, "room", no_room)
            said = shell("rollback", "--store", shell.store, "--run", "r", "--to", 1)
        assert said.code == 2
        assert shell.head() == (2, 1)


def test_c38_a_claim_on_a_store_that_takes_nothing_more(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(source: object, target: object, **_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM), str(target))

    with trainer(shell):
        with monkeypatch.context() as patch:
            patch.setattr(os, "link", no_links)
            assert "EPERM" in shell.claim().complaint
            with pytest.raises(PublishError, match="EPERM"):
                PolicyPublisher.start(shell.store, "r", shell.base, shell.root / "second", saved=1)
        assert shell.head() == (1, 1)


def test_c38_a_trainer_whose_base_cannot_be_rebuilt(shell: Shell) -> None:
    """Above a raised floor it builds on that version, whose payload is gone."""
    shell.publish(shell.learn("one"))
    payload = shell.root / "store/runs/r/e0001/weight_v000001"
    with PolicyPublisher.start(shell.store, "r", shell.base, shell.root / "trainer", saved=1) as live:
        for path in payload.iterdir():
            path.unlink()
        with pytest.raises(CheckoutRefused, match="weight_v000001"):
            PolicyPublisher.start(shell.store, "r", shell.base, shell.root / "second", saved=1)
        assert shell.head() == (1, 2)
        live.publish(shell.tensors).result(60)
