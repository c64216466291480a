"""The audit over HTTP: ranges only, under one per cent of the files, every byte accounted for, every fault refused."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from k3ray.audit.address import AddressError, parse_address
from k3ray.audit.http_files import HttpFiles
from k3ray.audit.making import AuditOptions, make_audit
from k3ray.audit.snapshot import Snapshot, Source
from k3ray.audit.snapshot_file import encode_snapshot
from k3ray.audit.source_files import DirectoryFiles
from k3ray.workers.checkpoint.synthetic import write_checkpoint
from k3ray.workers.checkpoint.synthetic_spec import SyntheticSpec
from k3ray.workers.failure import Failure
from tests.range_server import Answer, Fault, RangeServer, Request, serve

# Wide matrices and few tensors, so that headers and small tensors are under one per cent, as in the release.
SPEC = SyntheticSpec(
    num_hidden_layers=6, hidden_size=1024, intermediate_size=6144, num_experts=8, num_experts_per_token=2,
    routed_expert_hidden_size=256, moe_intermediate_size=512, q_lora_rank=256, attn_res_block_size=3,
)  # fmt: skip
SHARD = "model-00003-of-000007.safetensors"
ANY_SHARD = r"\.safetensors$"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("audited") / "model"
    write_checkpoint(folder, SPEC, seed=5)
    return folder


@pytest.fixture
def server(checkpoint: Path) -> Iterator[RangeServer]:
    with serve(checkpoint) as running:
        yield running


def fetched(address: str, token: str | None = None, hub: str = "https://huggingface.co") -> Snapshot:
    with closing(HttpFiles(address, token, hub, waits_s=(0.0, 0.0))) as files:
        return make_audit(files, AuditOptions(threads=0))


def refusal(address: str) -> str:
    with pytest.raises(Failure) as caught:
        fetched(address)
    return str(caught.value)


def test_under_one_per_cent_of_the_files_is_fetched_and_counted(server: RangeServer, checkpoint: Path) -> None:
    snapshot = fetched(server.address)
    total = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
    assert snapshot.source.total_bytes == total
    assert snapshot.source.fetched_bytes == server.sent_bytes
    assert 0 < snapshot.source.fetched_bytes < total / 100
    assert snapshot.source.requests == len(server.requests)
    assert all(request.range for request in server.requests if request.name.endswith(".safetensors"))
    read = {row.tensor for row in snapshot.statistics if row.by == "k3ray"}
    assert {name.rsplit(".layers.", 1)[1].split(".", 1)[1] for name in read} == {
        "self_attn.A_log",
        "self_attn.dt_bias",
        "block_sparse_moe.gate.weight",
        "block_sparse_moe.gate.e_score_correction_bias",
    }
    assert snapshot.disagreements == ()


def test_the_checksums_are_those_of_what_was_sent(server: RangeServer, checkpoint: Path) -> None:
    for file in fetched(server.address).source.files:
        data = (checkpoint / file.name).read_bytes()
        assert file.bytes == len(data)
        if file.sha256_of == "whole file":
            assert file.sha256 == hashlib.sha256(data).hexdigest()
            continue
        asked = [request.range for request in server.requests if request.name == file.name]
        parts = sorted(part for part in asked if part is not None)
        assert file.ranges == len(parts)
        assert {byte for begin, end in file.places for byte in (begin, end - 1)} <= {
            byte for begin, end in parts for byte in (begin, end - 1)
        }
        assert file.sha256 == hashlib.sha256(b"".join(data[begin:end] for begin, end in file.places)).hexdigest()
        assert file.fetched_bytes == sum(end - begin for begin, end in parts)
        assert file.sha256 == hashlib.sha256(b"".join(data[begin:end] for begin, end in parts)).hexdigest()


def test_a_folder_and_a_server_give_the_same_snapshot(server: RangeServer, checkpoint: Path) -> None:
    with closing(HttpFiles(server.address)) as files:
        remote = make_audit(files, AuditOptions(threads=1))
    local = make_audit(DirectoryFiles(checkpoint), AuditOptions(threads=1))
    assert remote.probe is not None
    assert (remote.source.kind, local.source.kind) == ("http", "directory")
    assert remote.source.files == local.source.files
    nowhere = Source("http", "", "", None, 0, ())
    assert replace(remote, source=nowhere, made_at="") == replace(local, source=nowhere, made_at="")


def test_named_layers_are_read_whatever_they_take(server: RangeServer) -> None:
    with closing(HttpFiles(server.address)) as files:
        snapshot = make_audit(files, AuditOptions(layers="all", threads=0))
    subjects = [row.subject for row in snapshot.statistics]
    assert {f"layer {layer} router row L2 norm" for layer in range(1, 6)} <= set(subjects)


def test_too_small_a_checkpoint_is_read_no_further_than_its_share(k3b_dir: Path) -> None:
    with serve(k3b_dir) as server:
        snapshot = fetched(server.address)
    assert [row for row in snapshot.statistics if row.by == "k3ray"] == []
    left = next(statement for statement in snapshot.statements if statement.id == "values.left_out")
    assert (left.kind, "A_log of layers 0-2, 4-6" in left.found) == ("U", True)


# Faults: what the server does, and what the refusal has to say.
def ignore_range(request: Request, answer: Answer) -> Answer:
    data = b"x" * 5_000_000
    return Answer(200, {}, data)


def short_body(request: Request, answer: Answer) -> Answer:
    return replace(answer, body=answer.body[:-1], promised=len(answer.body))


def wrong_length(request: Request, answer: Answer) -> Answer:
    return replace(answer, body=answer.body + b"!!!")


def other_range(request: Request, answer: Answer) -> Answer:
    begin, end = request.range or (0, 0)
    return replace(answer, headers={**answer.headers, "Content-Range": f"bytes {begin + 1}-{end}/999999999"})


def no_range(request: Request, answer: Answer) -> Answer:
    return replace(answer, headers={"ETag": "a"})


def gone(request: Request, answer: Answer) -> Answer:
    return Answer(404, {}, b"no")


def forbidden(request: Request, answer: Answer) -> Answer:
    return Answer(403, {}, b"no")


def always_busy(request: Request, answer: Answer) -> Answer:
    return Answer(503, {}, b"")


def packed(request: Request, answer: Answer) -> Answer:
    return replace(answer, headers={**answer.headers, "Content-Encoding": "gzip"})


def other_file(request: Request, answer: Answer) -> Answer:
    tag = f'"{request.range}"'
    return replace(answer, headers={**answer.headers, "ETag": tag})


def to_no_address(request: Request, answer: Answer) -> Answer:
    return Answer(302, {"Location": "http://127.0.0.1:99999/x?signature=s3cret"}, b"")


def circle(request: Request, answer: Answer) -> Answer:
    return Answer(302, {"Location": f"/{request.name}"}, b"")


def huge_header(request: Request, answer: Answer) -> Answer:
    return replace(answer, body=(2**63).to_bytes(8, "little")) if request.range == (0, 8) else answer


def header_past_the_end(request: Request, answer: Answer) -> Answer:
    return replace(answer, body=(90_000_000).to_bytes(8, "little")) if request.range == (0, 8) else answer


def growing(request: Request, answer: Answer) -> Answer:
    stated = answer.headers["Content-Range"]
    grown = stated if request.range == (0, 8) else stated + "0"
    return replace(answer, headers={**answer.headers, "Content-Range": grown})


def endless_number(request: Request, answer: Answer) -> Answer:
    return replace(answer, headers={**answer.headers, "Content-Range": "bytes 0-7/" + "9" * 5000})


def other_digits(request: Request, answer: Answer) -> Answer:
    return replace(answer, headers={**answer.headers, "Content-Range": "bytes 0-7/\u00b2\u00b3"})


def unspeakable(request: Request, answer: Answer) -> Answer:
    return replace(answer, headers={**answer.headers, "Content-Encoding": "\x07gzip"})


def endless_header(request: Request, answer: Answer) -> Answer:
    return replace(answer, headers={**answer.headers, "X-Long": "x" * 1_000_000})


@pytest.mark.parametrize(
    ("pattern", "fault", "message"),
    [
        (SHARD, endless_number, "found Content-Range 'bytes 0-7/9{70}', expected bytes 0-7"),
        (SHARD, other_digits, "found Content-Range 'bytes 0-7/..', expected bytes 0-7"),
        (SHARD, unspeakable, r"content encoded as '\\x07gzip'"),
        (SHARD, endless_header, "an answer that is not HTTP, 3 times"),
        (r"config\.json", endless_header, "an answer that is not HTTP, 3 times"),
        (SHARD, ignore_range, "found the whole file .status 200., expected the asked range alone .* ignores ranges"),
        (SHARD, short_body, "connection that broke in the middle, 3 times"),
        (SHARD, wrong_length, "Content-Length 11 for bytes 0-7/"),
        (SHARD, other_range, "found Content-Range 'bytes 1-8/999999999', expected bytes 0-7"),
        (SHARD, no_range, "found Content-Range '', expected bytes 0-7"),
        (SHARD, gone, "no such file .status 404."),
        (r"config\.json", gone, "config.json that can be read|nothing that can be read"),
        (r"index\.json", gone, "neither shards nor model.safetensors.index.json"),
        (SHARD, forbidden, "status 403, expected permission: set HF_TOKEN"),
        (SHARD, always_busy, "status 503, 3 times"),
        (SHARD, packed, "content encoded as .gzip."),
        (r"config\.json", packed, "content encoded as .gzip."),
        (SHARD, other_file, "another ETag than before"),
        (SHARD, circle, "more than 5 redirects"),
        (SHARD, to_no_address, "a redirect to something else, expected one to an http or https address"),
        (SHARD, huge_header, f"header length of {2**63}, expected at most 100000000 bytes"),
        (SHARD, header_past_the_end, "header length of 90000000 in a file of"),
        (SHARD, growing, "expected the .* of before: it changed while it was audited"),
    ],
)
def test_a_fault_is_refused(server: RangeServer, pattern: str, fault: Fault, message: str) -> None:
    server.misbehave(pattern, fault)
    with pytest.raises(Failure, match=message) as caught:
        fetched(server.address)
    assert server.address in str(caught.value)
    assert "\n  File" not in str(caught.value)


def test_a_server_that_ignores_ranges_is_refused_before_its_body_is_read(server: RangeServer) -> None:
    server.misbehave(ANY_SHARD, ignore_range)
    with closing(HttpFiles(server.address, waits_s=())) as files:
        with pytest.raises(Failure, match="nothing was read of it"):
            files.read(SHARD, 0, 8)
        assert files.ledger.fetched_bytes == 0


def test_a_body_that_only_drips_is_given_up(server: RangeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every byte comes before the line's own time is up, and a header would take a month."""
    clock = iter(range(0, 10**9, 20))  # seconds between two bytes
    monkeypatch.setattr("k3ray.audit.http_files.time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    drips = httpx.Response(206, stream=httpx.ByteStream(b"x" * 200))
    monkeypatch.setattr(drips, "iter_raw", lambda: iter([b"x"] * 200))
    with closing(HttpFiles(server.address)) as files, pytest.raises(Exception, match="2 bytes in 40 s"):
        files._receive(SHARD, drips, 200, 200)


def test_a_server_that_is_busy_for_a_moment_is_asked_again(server: RangeServer) -> None:
    busy = iter([True, True])
    server.misbehave(SHARD, lambda request, answer: always_busy(request, answer) if next(busy, False) else answer)
    snapshot = fetched(server.address)
    assert snapshot.disagreements == ()
    assert snapshot.source.requests == len(server.requests)


def test_a_broken_body_is_fetched_again_and_its_bytes_are_counted_twice(server: RangeServer, checkpoint: Path) -> None:
    once = iter([True])
    server.misbehave(SHARD, lambda request, answer: short_body(request, answer) if next(once, False) else answer)
    row = next(file for file in fetched(server.address).source.files if file.name == SHARD)
    parts = sorted({request.range for request in server.requests if request.name == SHARD and request.range})
    assert row.fetched_bytes == sum(end - begin for begin, end in parts) + 7
    data = (checkpoint / SHARD).read_bytes()
    assert row.sha256 == hashlib.sha256(b"".join(data[begin:end] for begin, end in parts)).hexdigest()


def test_the_token_goes_to_its_hub_only(server: RangeServer, checkpoint: Path) -> None:
    def move(request: Request, answer: Answer) -> Answer:
        return Answer(302, {"Location": f"{storage.address}/{request.name}?signature=s3cret"}, b"")

    with serve(checkpoint) as storage:
        server.misbehave(ANY_SHARD, move)
        snapshot = fetched(server.address, "hf_secret", server.address)
        assert {request.headers.get("Authorization") for request in server.requests} == {"Bearer hf_secret"}
        assert storage.requests
        assert all("Authorization" not in request.headers for request in storage.requests)
        assert snapshot.source.requests == len(server.requests) + len(storage.requests)
        assert snapshot.source.fetched_bytes == server.sent_bytes + storage.sent_bytes
        assert b"secret" not in encode_snapshot(snapshot)
        assert b"s3cret" not in encode_snapshot(snapshot)
        storage.misbehave(SHARD, gone)
        with pytest.raises(Failure, match="status 404") as caught:
            fetched(server.address, "hf_secret", server.address)
        assert "secret" not in str(caught.value)
        assert "s3cret" not in str(caught.value)


def test_another_server_never_sees_the_token(server: RangeServer) -> None:
    fetched(server.address, "hf_secret", "https://huggingface.co")
    assert all("Authorization" not in request.headers for request in server.requests)


def test_the_token_is_not_sent_over_an_unencrypted_line() -> None:
    for hub, sent in (("http://mirror.test", False), ("https://mirror.test", True), ("http://127.0.0.1:8080", True)):
        with closing(HttpFiles(f"{hub}/model", "hf_secret", hub)) as files:
            assert bool(files._authorization) is sent


def test_a_password_in_the_address_is_used_and_not_shown(server: RangeServer) -> None:
    snapshot = fetched(server.address.replace("//", "//user:p%40ss@"))
    assert {request.headers.get("Authorization") for request in server.requests} == {"Basic dXNlcjpwQHNz"}
    assert snapshot.source.address == server.address


def test_the_commit_that_the_hub_names_is_the_revision(server: RangeServer) -> None:
    commits = iter(["a" * 40] * 1000)
    server.misbehave(
        "", lambda request, answer: replace(answer, headers={**answer.headers, "X-Repo-Commit": next(commits)})
    )
    assert fetched(f"{server.address}/owner/name/resolve/main").source.revision == "a" * 40


def test_a_repository_that_moves_is_refused(server: RangeServer) -> None:
    commits = iter(["a" * 40] * 4 + ["b" * 40] * 1000)
    server.misbehave(
        "", lambda request, answer: replace(answer, headers={**answer.headers, "X-Repo-Commit": next(commits)})
    )
    assert "the repository moved; put a commit into the address" in refusal(server.address)


def test_no_server_at_all(server: RangeServer) -> None:
    said: list[str] = []
    nobody = HttpFiles(server.address.rsplit(":", 1)[0] + ":9", waits_s=(0.0, 0.0), say=said.append)
    with closing(nobody), pytest.raises(Failure, match="no connection, 3 times"):
        nobody.read(SHARD, 0, 8)
    assert said == [f"{SHARD}: no connection; trying again in 0 s"] * 2


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
