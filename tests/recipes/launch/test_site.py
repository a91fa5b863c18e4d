"""A site has names, and nothing that a shell or a manifest could take for more."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from stitch_recipes.errors import RecipeError
from stitch_recipes.site import Site, read_site, template

NASTY = ["a b", "a\nb", "a'b", 'a"b', "a`b`", "$(a)", "${a}", "a\\b", "a\tb", "a\x00b", "a\n", ""]
TEXTS = sorted(
    name
    for name, field in Site.model_fields.items()
    if isinstance(field.default, str) or field.default is None
)


@pytest.mark.parametrize("field", TEXTS)
def test_no_name_can_carry_quotes_lines_or_commands(field: str) -> None:
    for text in NASTY:
        with pytest.raises(ValueError, match=field):
            Site.model_validate({field: text})


@pytest.mark.parametrize("field", ["hosts", "replicas", "secrets"])
def test_no_host_can_be_an_option_of_ssh(field: str) -> None:
    for text in [*NASTY, "-oProxyCommand=date", "me@-v"]:
        with pytest.raises(ValueError, match=field):
            Site.model_validate({field: [text]})


@pytest.mark.parametrize("value", [{"a b": "c"}, {"a": "b c"}, {"a": "b\n"}])
def test_no_label_of_a_node_can_either(value: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="engine_nodes"):
        Site.model_validate({"engine_nodes": value})


def test_the_template_has_every_field_with_its_default(tmp_path: Path) -> None:
    text = template()
    assert Site.model_validate(tomllib.loads(text)) == Site()
    for name, field in Site.model_fields.items():
        assert f"\n{name} = " in text or f"\n# {name} = " in text
        assert field.description
        assert field.description.split()[0] in text
    file = tmp_path / "site.toml"
    file.write_text(text.replace('# gateway = "..."', 'gateway = "me@gw"'))
    assert read_site(file).gateway == "me@gw"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('hostz = ["a"]', "hostz: Extra inputs are not permitted; did you mean hosts\\?"),
        ("xyzzy = 1", "xyzzy: Extra inputs are not permitted; stitch recipe site prints all"),
        ("run = 1", "run: Input should be a valid string; run is the run's id; a new one for each new run"),
        ('store = "http://x"', "store: no store's URL: file:/directory, s3://bucket/prefix or"),
        ('store = "s3:/x"', "store: no store's URL"),
        ('store = "s3://"', "store: no store's URL"),
        ('store = "memory:x"', "store: no store's URL"),
        ('store = "/data"', "store: no store's URL"),
        ("run = [", "Invalid value"),
    ],
)
def test_a_site_that_is_wrong_names_the_file_and_the_field(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "site.toml"
    file.write_text(text)
    with pytest.raises(RecipeError, match=message) as failure:
        read_site(file)
    assert str(failure.value).startswith(str(file))


def test_a_store_may_have_options() -> None:
    url: Any = "modal://volume/runs?mount=/vol&environment=main"
    assert Site.model_validate({"store": url}).store == url
