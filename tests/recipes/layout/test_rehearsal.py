"""Recipes rehearsed: published, joined in every way and verified, on the real paths."""

from pathlib import Path

import numpy as np
import pytest

from stitch_recipes.layout import rehearsal
from stitch_recipes.layout.rehearsal import RehearsalFailed, Report, rehearse_checkpoint
from stitch_recipes.layout.synthesis import Stored, Synthetic, Training
from stitch_recipes.layout.synthetic import densities
from stitch_recipes.schema import Checkpoint, Versions
from tests.recipes.layout.models import checkpoints, model


def rehearse(
    name: str, key: str, directory: Path, versions: Versions, change: Training | Synthetic
) -> Report:
    described, all_of_it = model(name)
    return rehearse_checkpoint(
        f"{name}/{key}", described.geometry, all_of_it[key], versions, directory, change=change
    )


def test_a_run_is_published_joined_by_deltas_anchor_and_span_and_every_byte_is_compared(
    tmp_path: Path,
) -> None:
    versions = Versions(encoding="sparse", anchor_every=20, compact=True)
    report = rehearse("qwen3-0.6b", "bf16", tmp_path, versions, Training(1e-6))
    assert [(join.start, join.pieces) for join in report.joins] == [
        ("base", 4), ("anchor", 3), ("base and span", 1),
    ]  # fmt: skip
    assert (report.anchored, len(report.deltas)) == (True, 4)
    chain, anchor, span = (join.bytes for join in report.joins)
    assert chain == sum(report.deltas)
    assert report.bytes < anchor < 1.1 * report.bytes
    assert report.span_bytes is not None
    assert report.span_bytes <= span < chain  # one step changes mostly what the last one did
    assert 0.002 < report.ratio < 0.02
    assert 0.005 < report.changed < 0.015


def test_what_a_recipe_does_not_configure_is_not_rehearsed(tmp_path: Path) -> None:
    report = rehearse("qwen3-0.6b", "bf16", tmp_path, Versions(compact=False), Training(1e-6))
    assert ([join.start for join in report.joins], report.anchored, report.span_bytes) == (
        ["base"],
        False,
        None,
    )


def test_a_byte_that_is_not_the_trainers_fails_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer claims to have had another byte than it published."""
    publish = rehearsal._publish

    def lying(*given: object) -> object:
        done = publish(*given)  # type: ignore[arg-type]
        content = given[4]
        assert isinstance(content, list)
        one: Stored = content[3]
        other = one.versions[4].copy()
        other[7] ^= 1
        content[3] = Stored(one.tensor, [*one.versions[:4], np.asarray(other)])
        return done

    monkeypatch.setattr(rehearsal, "_publish", lying)
    with pytest.raises(RehearsalFailed, match=r"qwen3-0.6b/bf16: model\.layers\.0\.\S+ of rehearsal"):
        rehearse("qwen3-0.6b", "bf16", tmp_path, Versions(compact=False), Training(1e-6))


def test_a_layout_that_cannot_be_fails_by_the_recipes_name(tmp_path: Path) -> None:
    described, all_of_it = model("moonlight-16b-a3b")
    odd = all_of_it["int4"].model_copy(update={"group_size": None})
    with pytest.raises(RehearsalFailed, match="odd: int4-packed needs the checkpoint's group_size"):
        rehearse_checkpoint("odd", described.geometry, odd, Versions(), tmp_path, change=Training())


REPRESENTATIONS = [pair for pair in checkpoints() if pair[1] != "nvfp4-nvidia"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "key", "encoding"),
    [(*pair, ("xor", "sparse")[index % 2]) for index, pair in enumerate(REPRESENTATIONS)],
)
def test_every_representation_goes_through(name: str, key: str, encoding: str, tmp_path: Path) -> None:
    how: Checkpoint = model(name)[1][key]
    change = Training(3e-6) if encoding == "xor" else Synthetic(densities(how.quantization, {}))
    versions = Versions.model_validate({"encoding": encoding, "anchor_every": 20})
    report = rehearse(name, key, tmp_path, versions, change)
    assert len(report.joins) == 3
    assert report.ratio < 0.05
