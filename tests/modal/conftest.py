from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("modal")

from tests.modal.fake import Cloud


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MODAL_SERVER_URL", "")
        root: Path = tmp_path_factory.mktemp("modal")
        patch.setenv("MODAL_CONFIG_PATH", str(root / "none.toml"))
        with Cloud(root.resolve()).serving() as cloud:
            yield cloud


@pytest.fixture
def cloud(server: Cloud) -> Cloud:
    """Empty and well-behaved."""
    server.reset()
    return server
