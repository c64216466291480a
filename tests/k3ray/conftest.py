"""Fixtures of several test files: pages and servers of audits, hubs and what was downloaded, what conform compares."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from k3ray.audit.snapshot import Snapshot
from k3ray.conform.own_side import OwnModel
from k3ray.conform.reference import Reference
from k3ray.download.download import Wish, download
from k3ray.download.hub import Hub
from k3ray.download.patience import Patience
from k3ray.workers.checkpoint.synthetic import write_checkpoint
from tests.audit_pages import assert_silent, forget, write_page
from tests.audit_sample import released_sample
from tests.audited import WIDE
from tests.browser import Browser, headless_browser
from tests.conforming import ALL_KINDS, reference_of
from tests.downloads import quicken
from tests.local_hub import LocalHub, files_of, serving
from tests.range_server import RangeServer, serve
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


@pytest.fixture(scope="session")
def wide_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of which an audit reads little (tests/audited.py)."""
    folder = tmp_path_factory.mktemp("audited") / "model"
    write_checkpoint(folder, WIDE, seed=5)
    return folder


@pytest.fixture
def range_server(wide_checkpoint: Path) -> Iterator[RangeServer]:
    """It on a server on the loopback."""
    with serve(wide_checkpoint) as running:
        yield running


@pytest.fixture
def hub(k3b_dir: Path) -> Iterator[LocalHub]:
    """The golden checkpoint, as a repository of a hub on the loopback."""
    with serving(LocalHub(files_of(k3b_dir))) as hub:
        yield hub


@pytest.fixture
def default_hub(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> LocalHub:
    """It as the hub that is asked where no other is named, without a token and without waiting."""
    quicken(monkeypatch)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
    return hub


@pytest.fixture(scope="session")
def download_of_k3b(k3b_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The golden checkpoint as a download leaves it, to be copied with its times of change."""
    wish = Wish(tmp_path_factory.mktemp("downloaded") / "model")
    with pytest.MonkeyPatch.context() as monkeypatch, serving(LocalHub(files_of(k3b_dir))) as hub:
        quicken(monkeypatch)
        download(wish, Hub(hub.endpoint), Patience(), lambda _: None, lambda _: None)
    return wish.directory


@pytest.fixture
def downloaded(download_of_k3b: Path, tmp_path: Path) -> Path:
    """A download of the golden checkpoint."""
    return Path(shutil.copytree(download_of_k3b, tmp_path / "model"))


@pytest.fixture
def copied_model(k3b_dir: Path, tmp_path: Path) -> Path:
    """A copy of the golden checkpoint that nobody downloaded."""
    return Path(shutil.copytree(k3b_dir, tmp_path / "model", copy_function=shutil.copyfile))


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
