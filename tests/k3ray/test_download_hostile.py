"""What a hostile server, folder or disk does to a download: a message that names it, and nothing beyond the folder."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from huggingface_hub import constants

from k3ray.audit.http_files import HttpFiles
from k3ray.download import record as record_file
from k3ray.download.hub import Hub, Listing
from k3ray.download.revision import DownloadFailed
from k3ray.download.selection import SelectionError, all_shards, map_shards
from k3ray.download.workplace import DownloadBusy, NoSpace
from k3ray.files import write_file
from k3ray.http_client import ConnectionSettingsFailure
from k3ray.workers.checkpoint.index_file import read_index_file
from tests.downloads import QUICK, SHARD, assert_exact, fetch
from tests.local_hub import Fault, LocalHub


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.mark.parametrize(
    "address",
    [
        "http://127.0.0.1:99999/x",
        "http://[::1/x",
        "http://127.0.0.1:port/x",
        "ftp://host/x",
        "http:///x",
        "http://\x7f/",
        "http://a..b/x",
        "http://xn--/x",
        f"http://{'a' * 70}.test/x",
    ],
)
def test_a_redirect_to_no_address_is_a_failure_of_that_file(hub: LocalHub, tmp_path: Path, address: str) -> None:
    headers = (("location", address),)
    hub.faults = lambda asked: Fault("status", status=302, headers=headers) if asked.name == SHARD else None
    with pytest.raises(DownloadFailed, match=rf"1 of 5 files could not be fetched:\n  {SHARD}: given up"):
        fetch(hub, tmp_path)
    assert not (tmp_path / SHARD).exists()


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_wrong_file_that_is_a_link_is_replaced_and_its_target_left_alone(
    hub: LocalHub, tmp_path: Path, link: object
) -> None:
    """As in the hub's own cache: the folder's names are links into another one."""
    target, directory = tmp_path / "elsewhere", tmp_path / "model"
    directory.mkdir()
    theirs = bytes(len(hub.files[SHARD]))
    target.write_bytes(theirs)
    link(target, directory / SHARD)  # type: ignore[operator]
    fetch(hub, directory)
    assert_exact(hub, directory)
    assert target.read_bytes() == theirs
    assert not (directory / SHARD).is_symlink()


def test_a_part_that_is_a_link_is_not_written_through(hub: LocalHub, tmp_path: Path) -> None:
    directory, target = tmp_path / "model", tmp_path / "elsewhere"
    (directory / record_file.FOLDER).mkdir(parents=True)
    target.write_bytes(b"somebody's")
    for name in (f"{SHARD}.part", f"{SHARD}.blocks"):
        (directory / record_file.FOLDER / name).symlink_to(target)
    with pytest.raises(NoSpace, match=rf"{SHARD}.*symbolic link"):
        fetch(hub, directory)
    assert target.read_bytes() == b"somebody's"


@pytest.mark.parametrize("at", [1, 3, 8])
def test_a_disk_that_is_full_when_the_note_is_written(
    hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """At the beginning, and after a file: told as a full disk, and the next download goes on."""
    real, count = write_file, [0]

    def filling(path: Path, contents: bytes) -> None:
        count[0] += 1
        if count[0] >= at:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, contents)

    monkeypatch.setattr(record_file, "write_file", filling)
    with pytest.raises(NoSpace, match=r"No space left on device.*free some space"):
        fetch(hub, tmp_path)
    monkeypatch.setattr(record_file, "write_file", real)
    fetch(hub, tmp_path)
    assert_exact(hub, tmp_path)


def test_a_file_that_cannot_be_read_is_named(hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / SHARD).write_bytes(hub.files[SHARD])

    def hash_file(path: Path, *_: object) -> str:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("k3ray.download.file_job.hash_file", hash_file)
    with pytest.raises(NoSpace, match=rf"{SHARD}: Input/output error"):
        fetch(hub, tmp_path)
    assert (tmp_path / SHARD).read_bytes() == hub.files[SHARD]


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1:1/a", "https://hub.test/a", "http://hub.test:8443/a", "https://hub.test:8444/a",
     "https://hub.test.evil/a", "https://hub.test@evil/a", "https://evil/hub.test:8443/"],
)  # fmt: skip
def test_another_port_scheme_or_host_gets_no_token(url: str) -> None:
    hub = Hub("https://hub.test:8443", token="hf_hidden")
    assert "authorization" not in {name.lower() for name in hub.headers_for(url)}
    assert hub.headers_for("https://HUB.test:8443/b")["authorization"] == "Bearer hf_hidden"


@pytest.mark.parametrize(("name", "value"), [("SSL_CERT_FILE", "/nowhere"), ("HTTPS_PROXY", "gopher://u:secret@h")])
def test_settings_that_no_connection_can_be_made_with_are_refused_by_name(
    hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    for refused in (lambda: fetch(hub, tmp_path), lambda: HttpFiles("https://host/model")):
        with pytest.raises(ConnectionSettingsFailure, match=name) as failure:
            refused()
        assert "secret" not in str(failure.value)


def test_a_folder_in_the_place_of_a_shard_is_told_before_anything_of_it_is_fetched(
    hub: LocalHub, tmp_path: Path
) -> None:
    (tmp_path / SHARD).mkdir()
    with pytest.raises(DownloadFailed, match=rf"1 of 5 files(.|\n)*{SHARD}: a folder is in its place"):
        fetch(hub, tmp_path)
    assert SHARD not in {asked.name for asked in hub.asked}


def test_the_host_that_fails_is_the_one_that_is_named(hub: LocalHub, tmp_path: Path) -> None:
    headers = (("location", "http://127.0.0.1:1/x"),)
    hub.faults = lambda asked: Fault("status", status=302, headers=headers) if asked.name == SHARD else None
    with pytest.raises(DownloadFailed, match=r"the last: 127\.0\.0\.1:1: ConnectError"):
        fetch(hub, tmp_path, QUICK)
    for fault, text in (
        (Fault("gzip"), "it sent the body as gzip"),
        (Fault("cut", 100), "the body ended|RemoteProtocolError"),
        (Fault("status", status=503), "503"),
    ):
        hub.faults = lambda asked, fault=fault: fault if asked.name == SHARD else None  # type: ignore[misc]
        with pytest.raises(DownloadFailed, match=rf"the last: {urlsplit(hub.content).netloc}:? .*({text})"):
            fetch(hub, tmp_path, QUICK)


def test_variables_that_the_library_does_not_understand(tmp_path: Path) -> None:
    """It reads them when it is imported, so this takes a process of its own."""
    program = "import sys; sys.argv[0] = 'k3ray'; from k3ray.cli import main; main()"
    command = [sys.executable, "-c", program, "verify", str(tmp_path)]
    variables = {**os.environ, "HF_HUB_DOWNLOAD_TIMEOUT": "1.5"}
    ended = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr and "unset HF_HUB_ETAG_TIMEOUT and HF_HUB_DOWNLOAD_TIMEOUT" in ended.stderr


def test_parts_on_another_disk_are_refused(hub: LocalHub, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / record_file.FOLDER).symlink_to(tmp_path / "other")
    with pytest.raises(DownloadBusy, match="is a link"):
        fetch(hub, tmp_path / "model")


def test_an_index_of_very_many_shards_is_read_and_refused_in_time(tmp_path: Path) -> None:
    """The work grows with the tensors, not with their square: it would take an hour."""
    path = tmp_path / "model.safetensors.index.json"
    shards = {f"model.layers.{number % 90}.x{number}": f"s{number}.safetensors" for number in range(60_000)}
    path.write_text(json.dumps({"weight_map": shards}))
    shard_map = map_shards(read_index_file(path))
    assert len(shard_map.shards) == 60_000 and len(shard_map.by_layer) == 90
    with pytest.raises(SelectionError, match="names 60,000 shards, 60,000 of which the repository does not have"):
        all_shards(Listing("a/b", "c", {}), shard_map)


def test_nobody_is_asked_but_the_endpoint_and_its_store(
    hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library would ask huggingface.co for a list once a day, whatever the endpoint is."""
    real, hosts = socket.getaddrinfo, []

    def getaddrinfo(host: str, *more: object, **named: object) -> object:
        hosts.append(host)
        return real(host, *more, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", False)
    monkeypatch.setattr(constants, "AGENT_HARNESSES_PATH", str(tmp_path / "none.json"))
    monkeypatch.setattr("huggingface_hub.utils._detect_agent._registry", None)
    fetch(hub, tmp_path / "model", tokenizer_only=True)
    assert set(hosts) == {"127.0.0.1", "localhost"}
