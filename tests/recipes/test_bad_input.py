"""Whatever a file says, the answer is a recipe, a list of problems or a RecipeError that names the file."""

from __future__ import annotations

import contextlib
import copy
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stitch_core.cli.main import main
from stitch_recipes import catalogue
from stitch_recipes.check import problems
from stitch_recipes.errors import RecipeError
from stitch_recipes.launch import kubernetes, modal, shell
from stitch_recipes.schema import Recipe
from tests.recipes.launch.examples import site_for

SMALL = catalogue.home() / "models" / "qwen3-0.6b.toml"
DOCUMENT = catalogue.read_toml(SMALL)
SHARED = catalogue.read_toml(catalogue.home() / catalogue.SHARED)
JUNK: list[Any] = [
    None, 0, -1, 3, 2**70, 1.5, float("nan"), float("inf"), True, False, "", "x", "../..", "a\nb", "{", "{x}",
    "$(x)",
    "gr\u00f6\u00dfe \u202e", [], [1], ["a"], [[1]], {}, {"a": 1}, {"uses": ["math"]}, "bf16", "0", "1e-6",
]  # fmt: skip
"""None leaves the field out."""


def places(tree: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if at:
        yield at
    for key, value in tree.items() if isinstance(tree, dict) else ():
        yield from places(value, (*at, key))


PLACES = list(places(DOCUMENT))


@given(st.lists(st.tuples(st.sampled_from(PLACES), st.sampled_from(JUNK)), min_size=1, max_size=3))
def test_a_field_of_any_other_value_is_never_a_traceback(changes: list[tuple[tuple[Any, ...], Any]]) -> None:
    document = copy.deepcopy(DOCUMENT)
    for (*above, last), value in changes:
        table: Any = document
        for key in above:
            table = table.get(key) if isinstance(table, dict) else None
        if isinstance(table, dict):
            table.pop(last, None)
            if value is not None:
                table[last] = value
    try:
        recipe = catalogue.of_document(document, SHARED, "miles", Path("own.toml"))
    except RecipeError:
        return
    assert all(isinstance(problem, str) for problem in problems(recipe))
    if recipe.trainer is None or recipe.trainer.nodes < 100:
        for launcher in (kubernetes, modal, shell):
            with contextlib.suppress(RecipeError):
                assert launcher.render(recipe, site_for(recipe))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "own.toml has no recipe 'x'; it has: none"),
        (b"recipes = 3", "own.toml: recipes = 3: tables [recipes.NAME] are meant"),
        (b"[recipes]\nx = 3", "own.toml: recipes.x = 3: a table is meant"),
        (b"[recipes.x]\nuses = 'math'", "uses = 'math': a list of names of blocks is meant"),
        (b"[recipes.x]\nuses = [['math']]", "a list of names of blocks is meant"),
        (b"blocks = []\n[recipes.x]", "own.toml: blocks = []: tables [blocks.NAME] are meant"),
        (b"\xff", "own.toml: 'utf-8' codec"),
        (b"[recipes.x", "own.toml: Expected ']'"),
        (b"a = " + b"[" * 100_000, "own.toml: "),
        (b"#" * (catalogue.LARGEST + 1), "own.toml: more than 4 MiB, which is no recipe"),
    ],
    ids=range(10),
)  # fmt: skip
def test_a_file_that_is_no_recipe_is_told_by_its_name(text: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_bytes(text)
    with pytest.raises(RecipeError) as caught:
        catalogue.load(f"{file}/x")
    assert message in str(caught.value)


def test_a_file_that_is_not_there_is_not_answered_with_a_list_of_recipes(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"own\.toml: there is no such file$"):
        catalogue.load(f"{tmp_path}/own.toml/x")


def test_a_file_of_recipes_needs_the_name_of_one() -> None:
    with pytest.raises(RecipeError, match=r"qwen3-0.6b.toml/NAME; there are: qwen3-0.6b/miles"):
        catalogue.load(str(SMALL))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"a: [", r"run.yaml: while parsing"),
        (b"recipe: 3", r"run.yaml recipe: the table: Input should be"),
        (b"recipe: {summary: 1}", r"run.yaml recipe: summary: Input should be a valid string"),
        (b"- 1", "no recipe in it: is it the run.yaml of a rendered Modal app"),
        (b"\xff", "run.yaml: 'utf-8' codec"),
        (b"#" * (catalogue.LARGEST + 1), "more than 4 MiB, which is no recipe"),
    ],
    ids=range(6),
)
def test_a_run_that_was_not_rendered_is_told_by_its_name(text: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_bytes(text)
    with pytest.raises(RecipeError, match=message):
        catalogue.load(f"{tmp_path}/run.yaml")


def test_files_of_windows_are_read(tmp_path: Path) -> None:
    """With the mark that its editors put first, and its ends of lines."""
    file = tmp_path / "own.toml"
    file.write_bytes(b"\xef\xbb\xbf" + SMALL.read_bytes().replace(b"\n", b"\r\n"))
    assert problems(catalogue.load(f"{file}/miles")) == []
    site = tmp_path / "site.toml"
    site.write_bytes(b'\xef\xbb\xbfrun = "a"\r\n')
    words = ["recipe", "render", f"{file}/miles", "--for", "modal", "--site", str(site)]
    assert main([*words, "--out", str(tmp_path / "out")]) == 0


def test_a_checkpoint_that_is_made_of_itself_is_found(tmp_path: Path) -> None:
    """The check passed, and only the launcher found it."""
    tree = catalogue.load("qwen3-30b-a3b/nvfp4").model_dump()
    tree["checkpoints"]["bf16"] |= {
        "source": None,
        "prepared": {"of": "nvfp4", "command": "{source} {target}"},
    }
    found = problems(Recipe.model_validate(tree))
    assert "checkpoints.nvfp4.prepared.of: it is prepared from itself" in found


def test_braces_of_a_command_are_the_shells(tmp_path: Path) -> None:
    from stitch_recipes.site import read_site
    from stitch_recipes.training import prepare

    tree = catalogue.load("glm-4.5-air/fp8").model_dump()
    tree["checkpoints"]["fp8-block"]["prepared"]["command"] = "awk '{print}' {source}/a > {target}"
    made = [step.argv[-1] for step in prepare(Recipe.model_validate(tree), read_site(None))]
    assert "awk '{print}' /models/glm-4.5-air-bf16/a > /models/glm-4.5-air-fp8-block.new" in made


@pytest.mark.parametrize(
    ("missing", "words"),
    [("pydantic", "recipe list"), ("yaml", "recipe render qwen3-0.6b/miles --for ssh --out x")],
)
def test_what_is_not_installed_is_named_with_the_extra_that_brings_it(missing: str, words: str) -> None:
    """It was a traceback, as for every `stitch` where yaml was missing."""
    program = (
        "import importlib.util, sys; find = importlib.util.find_spec\n"
        f"importlib.util.find_spec = lambda name, *a: None if name == {missing!r} else find(name, *a)\n"
        f"sys.modules[{missing!r}] = None\n"
        "from stitch_core.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *words.split()], capture_output=True, text=True, timeout=60,
        env={"PYTHONPATH": ":".join(filter(None, sys.path)), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == f"stitch recipe: recipe needs {missing}: pip install 'stitch-rl[recipes]'\n"


def test_a_wheel_has_the_recipes() -> None:
    """They were left out: an installed `stitch recipe list` was empty."""
    root = catalogue.home().parent
    table = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))
    included = table["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert all(to == f"stitch_recipes/{of}" for of, to in included.items())
    files = [*catalogue.home().glob("*.toml"), catalogue.home() / "models", catalogue.home() / "flags"]
    assert {str(file.relative_to(root)) for file in files} == set(included)
