"""What every test shares: which folders need which modules, and that no test is skipped in silence."""

import asyncio
import importlib.util
import os
import types
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import settings

from tests.virtual_time import VirtualLoop

# The public test kit asserts on behalf of its users.
pytest.register_assert_rewrite("stitch_core.testing")

# The same examples on every run, and no deadline: a busy machine is not a failure. `make test` takes "full".
settings.register_profile("fast", deadline=None, derandomize=True, max_examples=30)
settings.register_profile("full", deadline=None, derandomize=True, max_examples=60)
settings.register_profile("long", deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("STITCH_HYPOTHESIS", "fast"))

# No test cuts the power: what a crash of the machine leaves is simulated. On a disk that others use one fsync
# may take as long as a test. Processes that tests start do sync, and tests that ask for ``real_fsync``.
FSYNC = os.fsync


def unsynced(fd: int) -> None:
    """Raises OSError if it is not open."""
    os.fstat(fd)


os.fsync = unsynced

# As stitch_embedded does where it is imported: here another test may call MKL first.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

NO_SKIP = os.environ.get("STITCH_NO_SKIP") == "1"
TESTS = Path(__file__).parent

# By folder: the modules that its tests need and that the dependency group `dev` does not bring.
NEEDS = {
    "embedded": ("torch", "tokenizers", "jinja2"),
    "gloo": ("torch",),
    "real": ("torch", "tokenizers", "jinja2", "matplotlib"),
    "real/miles": ("miles", "torch"),
    "real/sglang": ("sglang", "torch", "tokenizers"),
    "recipes": ("torch", "tokenizers", "jinja2", "matplotlib", "transformers"),
    "tensor_parallel": ("torch", "megatron", "safetensors"),
}


def missing_for(path: Path) -> list[str]:
    folders = path.relative_to(TESTS).parts[:-1] if path.is_relative_to(TESTS) else ()
    needed = NEEDS.get("/".join(folders[:2]), NEEDS.get("/".join(folders[:1]), ()))
    return [name for name in needed if importlib.util.find_spec(name) is None]


Report = TypeVar("Report", pytest.CollectReport, pytest.TestReport)


def refuse_skip(report: Report) -> Report:
    """Turn a skip into a failure where the environment is meant to have everything."""
    if not NO_SKIP or report.outcome != "skipped" or hasattr(report, "wasxfail"):
        return report
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    if not reason.removeprefix("Skipped: ").startswith("platform:"):
        report.outcome = "failed"
        report.longrepr = f"STITCH_NO_SKIP=1 and this was skipped. {reason}"
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    return refuse_skip(report)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    return refuse_skip(report)


@pytest.fixture
def real_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that is written is on the disk, as a user's is."""
    monkeypatch.setattr(os, "fsync", FSYNC)


@pytest.fixture
def quick_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """uvicorn looks ten times a second whether it should end, twice in each of hundreds of tests."""
    ticking = types.SimpleNamespace(**vars(asyncio))
    ticking.sleep = lambda seconds: asyncio.sleep(seconds / 20)
    monkeypatch.setattr("uvicorn.server.asyncio", ticking)


def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    virtual = item.get_closest_marker("virtual_time") is not None
    return {"loop": VirtualLoop if virtual else asyncio.new_event_loop}


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Skip a module before its imports fail."""
    missing = missing_for(module_path)
    return LacksModules.from_parent(parent, path=module_path, missing=missing) if missing else None


class LacksModules(pytest.Module):
    """A test module whose folder needs modules that are not installed."""

    def __init__(self, missing: list[str], **kwargs: object) -> None:
        super().__init__(**kwargs)
        self.missing = missing

    def collect(self) -> list[pytest.Item]:
        pytest.skip(f"needs {', '.join(self.missing)}", allow_module_level=True)
