"""Fixtures of several test files: the audit page's browser, the hub that downloads ask, and what conform compares."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from k3ray.audit.snapshot import Snapshot
from k3ray.conform.own_side import OwnModel
from k3ray.conform.reference import Reference
from tests.audit_pages import assert_silent, forget, write_page
from tests.audit_sample import released_sample
from tests.browser import Browser, headless_browser
from tests.conforming import ALL_KINDS, reference_of
from tests.local_hub import LocalHub, files_of, serving
from tests.tapes import synthetic_model


@pytest.fixture(scope="session")
def sample() -> Snapshot:
    """The audit of the released layout (tests/audit_sample.py)."""
    return released_sample()


@pytest.fixture(scope="session")
def page_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where pages and screenshots are written."""
    return tmp_path_factory.mktemp("pages")


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One Chromium for all pages."""
    with headless_browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture(scope="session")
def page_address(page_folder: Path, sample: Snapshot) -> str:
    """The sample's page as a file."""
    return write_page(page_folder / "sample.html", sample)


@pytest.fixture
def opened(browser: Browser, page_address: str) -> Iterator[Browser]:
    """The sample's page on a desktop in the light; at the end it has said nothing and asked for nothing."""
    browser.resize(1280)
    browser.prefer("light")
    forget(browser)
    browser.open(page_address)
    yield browser
    assert_silent(browser, page_address)


@pytest.fixture
def hub(k3b_dir: Path) -> Iterator[LocalHub]:
    """The golden checkpoint, as a repository of a hub on the loopback."""
    with serving(LocalHub(files_of(k3b_dir))) as hub:
        yield hub


@pytest.fixture
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of the variables that k3ray reads."""
    for name in ("K3_MODEL_DIR", "K3_TOK_FILES", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A synthetic checkpoint with every kind of layer."""
    return synthetic_model(tmp_path_factory.mktemp("conform") / "model", ALL_KINDS)


@pytest.fixture(scope="module")
def own(model_dir: Path) -> OwnModel:
    """It as k3ray runs it."""
    return OwnModel(model_dir, None, 2)


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> Reference:
    """It as PyTorch runs it."""
    return reference_of(model_dir)
