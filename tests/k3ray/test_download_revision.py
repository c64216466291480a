"""Which commit a folder keeps to, and the hubs and mirrors that say something else, little, or nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from k3ray.amounts import duration
from k3ray.commands.transfer_progress import line_of
from k3ray.download.counts import Reached
from k3ray.download.download import Summary, Wish, download
from k3ray.download.hub import Hub, HubRefused
from k3ray.download.patience import Patience
from k3ray.download.record import RecordError, read_record
from k3ray.download.release import read_release
from k3ray.download.revision import DownloadFailed
from tests.local_hub import COMMIT, LocalHub, serving

QUICK = Patience(attempts=3, first_wait_s=0.001, longest_wait_s=0.002, stall_s=2.0)
OTHER = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(k3b_dir: Path) -> Iterator[LocalHub]:
    files = {path.name: path.read_bytes() for path in sorted(k3b_dir.iterdir()) if path.suffix != ".npz"}
    with serving(LocalHub(files)) as hub:
        yield hub


def tokenizer(hub: LocalHub, directory: Path, said: list[str] | None = None, **wish: object) -> Summary:
    """Download the tokenizer only, which is enough to ask for a commit."""
    say = (said if said is not None else []).append
    asked = Wish(directory, tokenizer_only=True, **wish)  # type: ignore[arg-type]
    return download(asked, Hub(hub.endpoint), QUICK, say, lambda _: None)


def test_the_pinned_commit_is_asked_for_by_default(hub: LocalHub, tmp_path: Path) -> None:
    assert tokenizer(hub, tmp_path).commit == read_release().revision == COMMIT
    assert [path for _, path, _ in hub.api if "/api/" in path] == [f"/api/models/moonshotai/Kimi-K3/revision/{COMMIT}"]


def test_a_branch_is_resolved_once_and_kept_to(hub: LocalHub, tmp_path: Path) -> None:
    said: list[str] = []
    hub.commit, hub.branches = OTHER, {"main": OTHER}
    assert tokenizer(hub, tmp_path, said, revision="main").commit == OTHER
    assert f"revision main of moonshotai/Kimi-K3 is commit {OTHER} now, and this folder keeps to it" in said
    record = read_record(tmp_path)
    assert record is not None and record.commit == OTHER
    asked = len([path for _, path, _ in hub.api if "/api/" in path])
    assert tokenizer(hub, tmp_path).commit == OTHER  # the folder's own, and its metadata is noted: nothing is asked
    assert len([path for _, path, _ in hub.api if "/api/" in path]) == asked
    hub.commit, hub.branches = COMMIT, {"main": COMMIT}
    with pytest.raises(RecordError, match=f"holds commit {OTHER}, asked for {COMMIT}; name another folder"):
        tokenizer(hub, tmp_path, revision="main")
    with pytest.raises(RecordError, match=f"go on with --revision {OTHER}"):
        tokenizer(hub, tmp_path, revision=COMMIT)
    with pytest.raises(RecordError, match="holds a download of moonshotai/Kimi-K3, asked for some/other"):
        tokenizer(hub, tmp_path, repository="some/other", revision=COMMIT)


def test_a_folder_with_another_model_is_not_written_over(hub: LocalHub, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(RecordError, match=r"config\.json: is not the config\.json of moonshotai/Kimi-K3"):
        download(Wish(tmp_path), Hub(hub.endpoint), QUICK, lambda _: None, lambda _: None)
    assert (tmp_path / "config.json").read_text() == "{}"
    tokenizer(hub, tmp_path)  # its config is not touched
    assert (tmp_path / "config.json").read_text() == "{}"


def test_a_hub_that_gives_no_sizes_is_asked_file_by_file(hub: LocalHub, tmp_path: Path) -> None:
    hub.with_blobs = False
    download(Wish(tmp_path, layers=range(8, 9)), Hub(hub.endpoint), QUICK, lambda _: None, lambda _: None)
    heads = [path.rsplit("/", 1)[-1] for method, path, _ in hub.api if method == "HEAD"]
    record = read_record(tmp_path)
    assert record is not None and sorted(heads) == sorted(record.wanted) == sorted(record.finished)
    shards = {name for name in hub.files if name.endswith(".safetensors")}
    assert shards & set(record.finished) and shards - set(record.finished) == shards - set(record.files)


def test_a_mirror_whose_shards_are_not_of_the_published_size(hub: LocalHub, tmp_path: Path) -> None:
    hub.files["model-00007-of-000096.safetensors"] = b"not 17 GB"
    with pytest.raises(HubRefused, match=r"offers model-00007-of-000096\.safetensors with 9 bytes, published are 169"):
        tokenizer(hub, tmp_path)


def test_a_mirror_without_redirects(hub: LocalHub, tmp_path: Path) -> None:
    hub.redirect = False
    assert tokenizer(hub, tmp_path).fetched_bytes == sum(
        len(hub.files[name]) for name in ("tiktoken.model", "tokenizer_config.json")
    )


def test_metadata_that_is_late(hub: LocalHub, tmp_path: Path) -> None:
    answers = [(503, {}), (429, {"retry-after": "0"})]
    hub.refuse = lambda path, headers: answers.pop() if answers and "/api/" in path else None
    said: list[str] = []
    tokenizer(hub, tmp_path, said)
    assert [line.split("; ")[0].rsplit(" ", 1)[-1] for line in said] == ["429", "503"]


@pytest.mark.parametrize(
    ("status", "headers", "kind", "message"),
    [
        (401, {}, HubRefused, "answered 401; check HF_TOKEN, --repo and --endpoint"),
        (403, {"x-error-code": "GatedRepo"}, HubRefused, "accept its terms there and set HF_TOKEN"),
        (404, {"x-error-code": "RepoNotFound"}, HubRefused, "no such repository"),
        (400, {}, HubRefused, "answered 400"),
        (200, {"content-type": "text/html"}, HubRefused, "something else than a hub's metadata"),
        (503, {}, DownloadFailed, "no metadata after 3 attempts, the last: .* answered 503"),
    ],
)
def test_metadata_that_is_refused(
    hub: LocalHub, tmp_path: Path, status: int, headers: dict[str, str], kind: type[Exception], message: str
) -> None:
    hub.refuse = lambda path, _: (status, headers)
    with pytest.raises(kind, match=message):
        tokenizer(hub, tmp_path)


def test_a_hub_that_answers_for_another_commit(hub: LocalHub, tmp_path: Path) -> None:
    hub.branches[COMMIT] = hub.commit = OTHER
    with pytest.raises(HubRefused, match=f"answered with commit {OTHER}, expected {COMMIT}"):
        tokenizer(hub, tmp_path)


def test_progress_is_a_line_with_rate_and_time_left() -> None:
    reached = Reached(900 * 10**9, 1_560 * 10**9, 10**9, 0, 53, 101)
    assert line_of(reached, 110e6) == (
        "downloading: 900.000 GB of 1,560.000 GB, 53 of 101 files, 110.000 MB/s, about 1 h 40 min left"
    )
    assert line_of(reached, 0.0) == "downloading: 900.000 GB of 1,560.000 GB, 53 of 101 files"
    cases = {
        5.0: "5 s",
        99.0: "99 s",
        101.0: "2 min",
        3599.0: "1 h 00 min",
        100_000.0: "27 h 47 min",
        200_000.0: "2 d 7 h",
    }
    assert {seconds: duration(seconds) for seconds in cases} == cases
