import pytest

from stitch_core.stores import BadUrl
from stitch_modal.url import MOUNT_ENV, Location, parse_url


@pytest.mark.parametrize(
    ("url", "location"),
    [
        ("modal://vol", Location("vol")),
        ("modal://vol/", Location("vol")),
        ("modal://My.vol_1-x/a/b/", Location("My.vol_1-x", "a/b/")),
        ("modal://vol/p?mount=/vol", Location("vol", "p/", "/vol")),
        ("modal://vol?mount=none&environment=dev", Location("vol", "", "none", "dev")),
    ],
)
def test_good(url: str, location: Location) -> None:
    assert parse_url(url, {}) == location


def test_the_mount_may_be_in_the_environment() -> None:
    assert parse_url("modal://vol", {MOUNT_ENV: "/vol"}).mount == "/vol"
    assert parse_url("modal://vol?mount=none", {MOUNT_ENV: "/vol"}).mount == "none"


@pytest.mark.parametrize(
    "url",
    [
        "modal:", "modal:///prefix", "modal:vol", "modal://vol name/x", "modal://" + "v" * 64,
        "modal://vol/a//b", "modal://vol/../x", "modal://vol/.hidden", "modal://vol/" + "a" * 201,
        "modal://vol/a#b", "modal://vol?mount=vol", "modal://vol?mount=", "modal://vol?other=1",
        "modal://vol?mount=/a&mount=/b", "modal://user@vol/x",
    ],
)  # fmt: skip
def test_bad(url: str) -> None:
    with pytest.raises(BadUrl):
        parse_url(url, {})
