"""The audit over HTTP: ranges only, under one per cent of the files, every byte accounted for, a token kept safe."""

from __future__ import annotations

import hashlib
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from k3ray.audit.address import AddressError, parse_address
from k3ray.audit.http_files import HttpFiles
from k3ray.audit.making import AuditOptions, make_audit
from k3ray.audit.snapshot import Source
from k3ray.audit.snapshot_file import encode_snapshot
from k3ray.audit.source_files import DirectoryFiles
from k3ray.workers.failure import Failure
from tests.audited import ANY_SHARD, SHARD, fetched
from tests.range_server import Answer, RangeServer, Request, serve


def test_under_one_per_cent_of_the_files_is_fetched_and_counted(
    range_server: RangeServer, wide_checkpoint: Path
) -> None:
    snapshot = fetched(range_server.address)
    total = sum(path.stat().st_size for path in wide_checkpoint.glob("*.safetensors"))
    assert snapshot.source.total_bytes == total
    assert snapshot.source.fetched_bytes == range_server.sent_bytes
    assert 0 < snapshot.source.fetched_bytes < total / 100
    assert snapshot.source.requests == len(range_server.requests)
    assert all(request.range for request in range_server.requests if request.name.endswith(".safetensors"))
    read = {row.tensor for row in snapshot.statistics if row.by == "k3ray"}
    assert {name.rsplit(".layers.", 1)[1].split(".", 1)[1] for name in read} == {
        "self_attn.A_log",
        "self_attn.dt_bias",
        "block_sparse_moe.gate.weight",
        "block_sparse_moe.gate.e_score_correction_bias",
    }
    assert snapshot.disagreements == ()


def test_the_checksums_are_those_of_what_was_sent(range_server: RangeServer, wide_checkpoint: Path) -> None:
    for file in fetched(range_server.address).source.files:
        data = (wide_checkpoint / file.name).read_bytes()
        assert file.bytes == len(data)
        if file.sha256_of == "whole file":
            assert file.sha256 == hashlib.sha256(data).hexdigest()
            continue
        asked = [request.range for request in range_server.requests if request.name == file.name]
        parts = sorted(part for part in asked if part is not None)
        assert file.ranges == len(parts)
        assert {byte for begin, end in file.places for byte in (begin, end - 1)} <= {
            byte for begin, end in parts for byte in (begin, end - 1)
        }
        assert file.sha256 == hashlib.sha256(b"".join(data[begin:end] for begin, end in file.places)).hexdigest()
        assert file.fetched_bytes == sum(end - begin for begin, end in parts)
        assert file.sha256 == hashlib.sha256(b"".join(data[begin:end] for begin, end in parts)).hexdigest()


def test_a_folder_and_a_server_give_the_same_snapshot(range_server: RangeServer, wide_checkpoint: Path) -> None:
    with closing(HttpFiles(range_server.address)) as files:
        remote = make_audit(files, AuditOptions(threads=1))
    local = make_audit(DirectoryFiles(wide_checkpoint), AuditOptions(threads=1))
    assert remote.probe is not None
    assert (remote.source.kind, local.source.kind) == ("http", "directory")
    assert remote.source.files == local.source.files
    nowhere = Source("http", "", "", None, 0, ())
    assert replace(remote, source=nowhere, made_at="") == replace(local, source=nowhere, made_at="")


def test_named_layers_are_read_whatever_they_take(range_server: RangeServer) -> None:
    with closing(HttpFiles(range_server.address)) as files:
        snapshot = make_audit(files, AuditOptions(layers="all", threads=0))
    subjects = [row.subject for row in snapshot.statistics]
    assert {f"layer {layer} router row L2 norm" for layer in range(1, 6)} <= set(subjects)


def test_too_small_a_checkpoint_is_read_no_further_than_its_share(k3b_dir: Path) -> None:
    with serve(k3b_dir) as range_server:
        snapshot = fetched(range_server.address)
    assert [row for row in snapshot.statistics if row.by == "k3ray"] == []
    left = next(statement for statement in snapshot.statements if statement.id == "values.left_out")
    assert (left.kind, "A_log of layers 0-2, 4-6" in left.found) == ("U", True)


def test_the_token_goes_to_its_hub_only(range_server: RangeServer, wide_checkpoint: Path) -> None:
    def move(request: Request, answer: Answer) -> Answer:
        return Answer(302, {"Location": f"{storage.address}/{request.name}?signature=s3cret"}, b"")

    with serve(wide_checkpoint) as storage:
        range_server.misbehave(ANY_SHARD, move)
        snapshot = fetched(range_server.address, "hf_secret", range_server.address)
        assert {request.headers.get("Authorization") for request in range_server.requests} == {"Bearer hf_secret"}
        assert storage.requests
        assert all("Authorization" not in request.headers for request in storage.requests)
        assert snapshot.source.requests == len(range_server.requests) + len(storage.requests)
        assert snapshot.source.fetched_bytes == range_server.sent_bytes + storage.sent_bytes
        assert b"secret" not in encode_snapshot(snapshot)
        assert b"s3cret" not in encode_snapshot(snapshot)
        storage.misbehave(SHARD, lambda request, answer: Answer(404, {}, b"no"))
        with pytest.raises(Failure, match="status 404") as caught:
            fetched(range_server.address, "hf_secret", range_server.address)
        assert "secret" not in str(caught.value)
        assert "s3cret" not in str(caught.value)


def test_another_server_never_sees_the_token(range_server: RangeServer) -> None:
    fetched(range_server.address, "hf_secret", "https://huggingface.co")
    assert all("Authorization" not in request.headers for request in range_server.requests)


def test_the_token_is_not_sent_over_an_unencrypted_line() -> None:
    for hub, sent in (("http://mirror.test", False), ("https://mirror.test", True), ("http://127.0.0.1:8080", True)):
        with closing(HttpFiles(f"{hub}/model", "hf_secret", hub)) as files:
            assert bool(files._authorization) is sent


def test_a_password_in_the_address_is_used_and_not_shown(range_server: RangeServer) -> None:
    snapshot = fetched(range_server.address.replace("//", "//user:p%40ss@"))
    assert {request.headers.get("Authorization") for request in range_server.requests} == {"Basic dXNlcjpwQHNz"}
    assert snapshot.source.address == range_server.address


def test_the_commit_that_the_hub_names_is_the_revision(range_server: RangeServer) -> None:
    commits = iter(["a" * 40] * 1000)
    range_server.misbehave(
        "", lambda request, answer: replace(answer, headers={**answer.headers, "X-Repo-Commit": next(commits)})
    )
    assert fetched(f"{range_server.address}/owner/name/resolve/main").source.revision == "a" * 40


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ftp://a/b", "found no http or https address"),
        ("http://", "found no http or https address"),
        ("http://[x/b", "found no address"),
        ("https://h/m?token=secret", "found something after [?] or #"),
        ("https://u:secret@h/m#secret", "found something after [?] or #"),
        ("https://huggingface.co/moonshotai/Kimi-K3", "expected the files of one revision: .*/Kimi-K3/resolve/COMMIT"),
    ],
)
def test_what_is_no_address_is_refused(text: str, message: str) -> None:
    with pytest.raises(AddressError, match=message) as caught:
        parse_address(text)
    assert "secret" not in str(caught.value)


def test_an_address_is_taken_apart() -> None:
    found = parse_address("HTTPS://HuggingFace.co/o/n/resolve/9f62e4e9/")
    assert (found.base, found.revision) == ("https://huggingface.co/o/n/resolve/9f62e4e9", "9f62e4e9")
    assert parse_address("http://[::1]:8000/x").base == "http://[::1]:8000/x"
