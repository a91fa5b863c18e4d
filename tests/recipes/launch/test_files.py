"""A rendering can be repeated, and never writes over what a person edited."""

from pathlib import Path

import pytest

from stitch_recipes.errors import RecipeError
from stitch_recipes.launch.files import File, write

FILES = [File("run.sh", "#!/bin/sh\n# why\necho a\n"), File("run.yaml", "a: 1\n")]


def test_files_say_what_they_are_and_programs_can_be_run(tmp_path: Path) -> None:
    assert write(FILES, tmp_path, "ssh x/y") == ["run.sh", "run.yaml"]
    first, second, *rest = (tmp_path / "run.sh").read_text().splitlines()
    assert (first, rest) == ("#!/bin/sh", ["# why", "echo a"])
    assert second.startswith("# rendered: ssh x/y, digest ")
    assert (tmp_path / "run.sh").stat().st_mode & 0o111
    assert not (tmp_path / "run.yaml").stat().st_mode & 0o111
    assert {path.name for path in tmp_path.iterdir()} == {"run.sh", "run.yaml"}


def test_rendering_again_changes_what_is_new_only(tmp_path: Path) -> None:
    write(FILES, tmp_path, "ssh x/y")
    assert write(FILES, tmp_path, "ssh x/y") == []
    assert write([FILES[0], File("run.yaml", "a: 2\n")], tmp_path, "ssh x/y") == ["run.yaml"]
    assert (tmp_path / "run.yaml").read_text().endswith("\na: 2\n")


@pytest.mark.parametrize(
    "edit",
    [
        lambda text: text + "echo b\n",
        lambda text: text.replace("echo a", "echo b"),
        lambda text: text.replace("#!/bin/sh", "#!/bin/bash"),
        lambda text: "",
        lambda text: "\n".join(line for line in text.splitlines() if "rendered" not in line),
    ],
)  # fmt: skip
def test_an_edited_file_is_refused_before_anything_is_written(tmp_path: Path, edit: object) -> None:
    assert callable(edit)
    write(FILES, tmp_path, "ssh x/y")
    edited = edit((tmp_path / "run.sh").read_text())
    (tmp_path / "run.sh").write_text(edited)
    before = (tmp_path / "run.yaml").read_text()
    changed = [FILES[0], File("run.yaml", "a: 2\n")]
    with pytest.raises(RecipeError, match=r"run\.sh: edited, or not rendered; --force"):
        write(changed, tmp_path, "ssh x/y")
    assert (tmp_path / "run.sh").read_text() == edited
    assert (tmp_path / "run.yaml").read_text() == before
    write(changed, tmp_path, "ssh x/y", force=True)
    assert (tmp_path / "run.sh").read_text().endswith("echo a\n")


def test_what_an_earlier_rendering_left_goes_unless_it_was_edited(tmp_path: Path) -> None:
    gone, edited = File("compactor.sh", "#!/bin/sh\n"), File("collector.sh", "#!/bin/sh\n")
    write([*FILES, gone, edited], tmp_path, "ssh x/y")
    (tmp_path / "collector.sh").write_text((tmp_path / "collector.sh").read_text() + "echo mine\n")
    (tmp_path / "notes.txt").write_text("mine")
    write(FILES, tmp_path, "ssh x/y")
    left = {"run.sh", "run.yaml", "collector.sh", "notes.txt"}
    assert {path.name for path in tmp_path.iterdir()} == left


def test_a_directory_is_of_one_rendering(tmp_path: Path) -> None:
    """Another recipe's manifests were applied with this one's, and app.py's run.yaml with any."""
    job = File("1-prepare-together.yaml", "kind: Job\n")
    write([*FILES, job], tmp_path, "kubernetes x/y")
    before = {path.name: path.read_text() for path in tmp_path.iterdir()}
    for what in ("kubernetes x/z", "modal x/y"):
        with pytest.raises(RecipeError, match=f"has the rendering of kubernetes x/y: render {what} into"):
            write(FILES, tmp_path, what)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == before
    write(FILES, tmp_path, "kubernetes x/z", force=True)
    assert {path.name for path in tmp_path.iterdir()} == {"run.sh", "run.yaml"}


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecipeError, match=r"file is there, and no directory"):
        write(FILES, tmp_path / "file", "ssh x/y")
