"""The parts of a download that need no network: journal, answers, patience, selection, notes, room, published sizes."""

from __future__ import annotations

import errno
import gzip
import hashlib
import random
import shutil
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3ray.download import workplace as workplace_module
from k3ray.download.answers import AccessRefused, Transient, WantedBytes, bytes_to_skip, check_linked, check_status
from k3ray.download.block_journal import Block, BlockJournal, digest_of, read_blocks
from k3ray.download.checksums import Checksum, hash_file
from k3ray.download.hub import Hub, HubFile, HubRefused, Listing, check_endpoint
from k3ray.download.patience import Patience, parse_retry_after
from k3ray.download.record import FOLDER, Record, RecordError, Stamp, new_record, read_record, write_record
from k3ray.download.release import ReleaseError, is_released, read_release
from k3ray.download.selection import SelectionError, all_shards, map_shards, parse_layers, small_files
from k3ray.download.workplace import DownloadBusy, NoSpace, Workplace, occupied
from k3ray.files import OutputFailure
from k3ray.workers.checkpoint.index_file import read_index_file
from k3ray.workers.model.config import read_config

SHA = Checksum("sha256", "ab" * 32)
COMMIT = "9f62e4e9fffbd0a83ddd60e1c209d828994b3569"


# the journal


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(1, 40)), max_size=20), st.data())
def test_a_journal_reads_as_the_bytes_that_were_last_written(
    tmp_path_factory: pytest.TempPathFactory, spans: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Whatever was appended, and wherever the file is torn: the blocks are disjoint, ascending, and the newest."""
    path = tmp_path_factory.mktemp("journal") / "file.blocks"
    journal = BlockJournal(path, 140, SHA)
    owner: dict[int, int] = {}
    lengths = [path.stat().st_size]
    for number, (begin, count) in enumerate(spans):
        journal.append(Block(begin, begin + count, f"{number:032x}"))
        lengths.append(path.stat().st_size)
    journal.close()
    text = path.read_bytes()
    cut = data.draw(st.integers(0, len(text)))
    path.write_bytes(
        text[:cut] + data.draw(st.sampled_from([b"", b"\0" * 30, b"12 9 zz\n", b"5 400 " + b"0" * 32 + b"\n"]))
    )
    whole = max((n for n, length in enumerate(lengths) if length <= cut), default=None)
    for number, (begin, count) in enumerate(spans[:whole] if whole is not None else []):
        dropped = {owner[place] for place in range(begin, begin + count) if place in owner}
        owner = {place: who for place, who in owner.items() if who not in dropped}
        owner |= dict.fromkeys(range(begin, begin + count), number)
    expected = sorted({(spans[who][0], sum(spans[who]), f"{who:032x}") for who in owner.values()})
    found = read_blocks(path, 140, SHA)
    assert [(block.begin, block.end, block.digest) for block in found] == expected
    opened = BlockJournal(path, 140, SHA)
    assert opened.blocks == found and opened.num_bytes == len(owner)
    opened.append(Block(0, 140, "f" * 32))
    opened.close()
    assert read_blocks(path, 140, SHA) == [Block(0, 140, "f" * 32)]


def test_a_journal_of_another_file_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "file.blocks"
    journal = BlockJournal(path, 10, SHA)
    journal.append(Block(0, 10, digest_of(b"0123456789")))
    journal.close()
    for size, checksum in ((11, SHA), (10, Checksum("sha256", "cd" * 32)), (10, Checksum("git-sha1", "ab" * 20))):
        assert read_blocks(path, size, checksum) == []
    assert len(read_blocks(path, 10, SHA)) == 1  # looking does not change it
    BlockJournal(path, 11, SHA).close()
    assert read_blocks(path, 10, SHA) == []


def test_half_a_line_on_a_full_disk_is_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "file.blocks"
    journal = BlockJournal(path, 100, SHA)
    real, text = journal._file, path.read_bytes()

    def write(data: bytes) -> int:
        if len(data) < 40:
            raise OSError(errno.ENOSPC, "No space left on device")
        return int(real.write(data[:7]))

    journal._file = SimpleNamespace(
        write=write, tell=real.tell, seek=real.seek, truncate=real.truncate, close=real.close
    )  # type: ignore[assignment]
    with pytest.raises(OSError, match="No space"):
        journal.append(Block(0, 10, "0" * 32))
    assert path.read_bytes() == text and journal.blocks == []
    journal.close()


# checksums


def test_checksums_are_those_that_git_and_sha256sum_give(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"hello\n")
    git, sha = Checksum.from_text("ce013625030ba8dba906f756967f9e9ca394464a"), Checksum.from_text(f'W/"{"A" * 64}"')
    assert git is not None and hash_file(path, git) == git.value  # `git hash-object` of hello and a line's end
    assert sha == Checksum("sha256", "a" * 64)
    assert hash_file(path, SHA) == hashlib.sha256(b"hello\n").hexdigest()
    assert [Checksum.from_text(text) for text in ("", "a" * 39, "g" * 40, '"x"')] == [None] * 4


# answers


def wanted(begin: int = 10, end: int = 50, size: int = 100) -> WantedBytes:
    return WantedBytes("a.safetensors", begin, end, size, SHA, COMMIT)


@pytest.mark.parametrize(
    ("status", "headers", "skip"),
    [
        (206, {"content-range": "bytes 10-49/100", "content-length": "40"}, 0),
        (206, {"content-range": "bytes 10-20/100", "content-length": "11"}, 0),  # short, and honest about it
        (206, {"content-range": "bytes 10-49/*"}, 0),
        (200, {"content-length": "100"}, 10),
        (200, {}, 10),
    ],
)
def test_answers_that_hold_the_bytes(status: int, headers: dict[str, str], skip: int) -> None:
    check_status(wanted(), status, headers, "host", True)
    assert bytes_to_skip(wanted(), status, headers) == skip


@pytest.mark.parametrize(
    ("status", "headers", "message"),
    [
        (206, {}, "sent the range 'none', expected bytes 10-49"),
        (206, {"content-range": "bytes 11-49/100"}, "expected bytes 10-49"),
        (206, {"content-range": "bytes 10-50/100"}, "expected bytes 10-49"),
        (206, {"content-range": "bytes 10-9/100"}, "expected bytes 10-49"),
        (206, {"content-range": "bytes 10-49/101"}, "holds a file of 101 bytes, expected 100"),
        (206, {"content-range": "bytes 10-49/100", "content-length": "39"}, "content length of 39"),
        (200, {"content-length": "99"}, "a whole file of 99 bytes, expected 100"),
        (200, {"content-length": "-1"}, "content length '-1'"),
        (200, {"content-encoding": "gzip"}, "as gzip"),
    ],
)
def test_answers_that_do_not(status: int, headers: dict[str, str], message: str) -> None:
    with pytest.raises(Transient, match=message):
        bytes_to_skip(wanted(), status, headers)


@pytest.mark.parametrize("status", [401, 403, 404, 451])
def test_a_refusal_of_the_hub_ends_it_and_one_of_the_store_does_not(status: int) -> None:
    with pytest.raises(AccessRefused, match=rf"a.safetensors: host answered {status}; "):
        check_status(wanted(), status, {}, "host", True)
    with pytest.raises(Transient, match=rf"store answered {status}"):
        check_status(wanted(), status, {}, "store", False)


@pytest.mark.parametrize(
    ("status", "header", "seconds"), [(429, "7", 7.0), (503, "1", 1.0), (500, None, None), (416, "9", None)]
)
def test_what_a_busy_server_asks_for(status: int, header: str | None, seconds: float | None) -> None:
    with pytest.raises(Transient) as caught:
        check_status(wanted(), status, {} if header is None else {"retry-after": header}, "host", True)
    assert caught.value.retry_after_s == seconds


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        ({"x-repo-commit": "f" * 40}, "answered for commit ffff"),
        ({"x-linked-size": "99"}, "a file of 99 bytes, expected 100"),
        ({"x-linked-etag": f'"{"cd" * 32}"'}, "another content"),
    ],
)
def test_a_hub_that_speaks_of_another_file(headers: dict[str, str], message: str) -> None:
    with pytest.raises(Transient, match=message):
        check_linked(wanted(), headers)
    right = {"x-repo-commit": COMMIT, "x-linked-size": "100", "x-linked-etag": f'"{SHA.value}"'}
    check_linked(wanted(), right)
    check_linked(wanted(), {})


def test_retry_after_is_a_number_or_a_date() -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    cases = {"12": 12.0, "Thu, 01 Jan 2026 00:01:40 GMT": 100.0, "Thu, 01 Jan 2025 00:00:00 GMT": 0.0}
    assert {text: parse_retry_after(text, now) for text in cases} == cases
    assert [parse_retry_after(text, now) for text in (None, "", "soon", "-1", "1.5", "9" * 30)] == [None] * 6


@given(st.integers(1, 10**6), st.integers(0, 2**32))
def test_waiting_grows_with_jitter_and_has_an_end(failures: int, seed: int) -> None:
    patience, chance = Patience(), random.Random(seed)
    longest = min(2.0 ** min(failures - 1, 20), patience.longest_wait_s)
    assert longest / 2 <= patience.wait_s(failures, None, chance) <= longest
    assert 30.0 <= patience.wait_s(failures, 30.0, chance) <= 31.0
    assert patience.wait_s(failures, 1e9, chance) <= patience.longest_retry_after_s + 1


# the hub


def test_the_token_is_only_for_the_endpoint_itself() -> None:
    hub = Hub("https://hub.example", "test", "hf_secret")
    mine = hub.headers_for("https://hub.example/x")
    assert mine["authorization"] == "Bearer hf_secret" and mine["accept-encoding"] == "identity"
    for url in (
        "https://cdn.example/x",
        "http://hub.example/x",
        "https://hub.example:444/x",
        "https://hub.example.evil/x",
    ):
        assert "authorization" not in {key.lower() for key in hub.headers_for(url)}
    assert "hf_secret" not in repr(hub)
    assert not Hub("http://mirror.example", "test", "hf_secret").sends_token
    assert Hub("http://127.0.0.1:80", "test", "hf_secret").sends_token


@pytest.mark.parametrize(
    "text", ["hub.example", "ftp://h", "https://", "https://u:p@h", "https://h?x=1", "http://[1", "http://h:x"]
)
def test_an_endpoint_that_is_none(text: str) -> None:
    with pytest.raises(HubRefused, match="--endpoint: expected an address") as caught:
        check_endpoint(text, "--endpoint")
    assert "u:p" not in str(caught.value)
    assert check_endpoint("https://h/base/", "x") == "https://h/base"


# the selection


def test_layers_are_found_by_the_index_and_never_by_the_shards_number(k3b_dir: Path) -> None:
    """The golden checkpoint keeps layers in a shard together and some experts apart."""
    import json

    shard_map = map_shards(read_index_file(k3b_dir / "model.safetensors.index.json"))
    weights = json.loads((k3b_dir / "model.safetensors.index.json").read_text())["weight_map"]
    assert sorted(shard_map.by_layer) == list(range(9))
    for layer in range(9):
        expected = {shard for name, shard in weights.items() if f".layers.{layer}." in name and "vision" not in name}
        assert shard_map.holding(range(layer, layer + 1)) == expected
    assert shard_map.top == {
        weights[f"language_model.{name}"]
        for name in ("lm_head.weight", "model.norm.weight", "model.embed_tokens.weight")
    }
    assert shard_map.complete_layers(frozenset(shard_map.shards)) == list(range(9))
    assert shard_map.complete_layers(frozenset()) == []


def test_the_released_index_puts_one_layer_in_one_shard(shared_data: Path) -> None:
    index = read_index_file(shared_data / "k3-release" / "model.safetensors.index.json.gz")
    shard_map = map_shards(index)
    for layer in range(93):
        assert shard_map.by_layer[layer] == {f"model-{layer + 1:05d}-of-000096.safetensors"}
    assert shard_map.top == {"model-00094-of-000096.safetensors"}
    assert is_released(read_release(), read_config(shared_data / "k3-release"), index)


@pytest.mark.parametrize("text", ["", "a", "3-1", "-1", "1-", "1-2-3", "1.5", "٣", "0-100000000"])
def test_layers_that_are_none(text: str) -> None:
    with pytest.raises(SelectionError, match="expected A-B"):
        parse_layers(text)
    assert (parse_layers("3"), parse_layers("0-92")) == (range(3, 4), range(93))


def listing(*names: str) -> Listing:
    return Listing("some/one", COMMIT, {name: HubFile(name, 5, SHA) for name in names})


def test_only_the_files_that_are_needed() -> None:
    everything = listing("README.md", "config.json", "modeling_kimi.py", "tiktoken.model", "tokenizer_config.json",
                         "model.safetensors.index.json", "a.safetensors", "generation_config.json")  # fmt: skip
    assert small_files(everything, True) == ["tiktoken.model", "tokenizer_config.json"]
    whole = ["config.json", "tiktoken.model", "tokenizer_config.json", "generation_config.json"]
    assert small_files(everything, False) == [*whole, "model.safetensors.index.json"]
    assert all_shards(everything, None) == {"a.safetensors"}
    with pytest.raises(SelectionError, match=r"has no config\.json"):
        small_files(listing("tiktoken.model"), False)
    with pytest.raises(SelectionError, match=r"has no tiktoken\.model"):
        small_files(listing("config.json"), True)
    with pytest.raises(SelectionError, match=r"has no \.safetensors file"):
        all_shards(listing("config.json"), None)


def test_a_shard_that_the_index_names_and_the_repository_lacks(k3b_dir: Path) -> None:
    shard_map = map_shards(read_index_file(k3b_dir / "model.safetensors.index.json"))
    with pytest.raises(SelectionError, match=r"names 5 shards, 4 of which.*model-00002-of-000005"):
        all_shards(listing("model-00001-of-000005.safetensors"), shard_map)


# notes and room


def test_a_note_reads_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    git = HubFile("config.json", 7, Checksum("git-sha1", "12" * 20))
    files = {"a.safetensors": HubFile("a.safetensors", 5, SHA), "config.json": git}
    record = Record(
        "some/one", COMMIT, files, frozenset({"config.json"}), {"config.json": Stamp(7, 123)}, frozenset({"x"})
    )
    write_record(tmp_path, record)
    assert read_record(tmp_path) == record
    assert read_record(tmp_path / "elsewhere") is None
    assert new_record(record.listing).finished == {}


@pytest.mark.parametrize("text", ["", "[]", '{"format": "k3ray download 2"}', "\0" * 100])
def test_a_note_that_is_damaged_is_told(tmp_path: Path, text: str) -> None:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "record.json").write_text(text)
    with pytest.raises(RecordError, match=r"record\.json: .*remove .*: files that are right are kept"):
        read_record(tmp_path)


def test_room_is_asked_for_only_what_is_not_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Workplace(tmp_path)
    place.inside.mkdir()
    files = [HubFile(name, 1 << 30, SHA) for name in ("whole", "half", "none")]
    with (tmp_path / "whole").open("wb") as file:
        file.truncate(1 << 30)
    place.part("half").write_bytes(bytes(1 << 20))
    needed = (2 << 30) - (1 << 20)
    usage = shutil.disk_usage(tmp_path)
    for free, enough in ((needed + (64 << 20), True), (needed + (64 << 20) - 1, False)):
        monkeypatch.setattr(workplace_module.shutil, "disk_usage", lambda _, free=free: usage._replace(free=free))
        if enough:
            place.check_space(files)
        else:
            with pytest.raises(NoSpace, match=r"2\.146 GB are still to be written and the disk has 2\.214 GB free"):
                place.check_space(files)


def test_one_at_a_time(tmp_path: Path) -> None:
    with occupied(tmp_path / "new", "DIR"):
        with pytest.raises(DownloadBusy, match="another k3ray download"), occupied(tmp_path / "new", "DIR"):
            pass
    with occupied(tmp_path / "new", "DIR"):
        pass
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputFailure), occupied(tmp_path / "file", "DIR"):
        pass


# the published sizes


def test_the_shipped_sizes_are_the_published_ones(shared_data: Path) -> None:
    release = read_release()
    lines = (shared_data / "k3-release" / "shard_sizes.txt").read_text().split()
    assert release.sizes == dict(zip(lines[::2], map(int, lines[1::2]), strict=True))
    assert (release.file_bytes, len(release.sizes), release.revision) == (1_560_936_091_448, 96, COMMIT)
    with gzip.open(shared_data / "k3-release" / "model.safetensors.index.json.gz") as file:
        import json

        assert json.load(file)["metadata"]["total_size"] == release.tensor_bytes


def test_a_damaged_list_of_sizes_is_refused(tmp_path: Path) -> None:
    text = (Path(workplace_module.__file__).with_name("release.txt")).read_text()
    for wrong in (text.replace("shard 7 16990911504", "shard 7 16990911505"), text[:-20], "", text + "shard 97 1\n"):
        (tmp_path / "release.txt").write_text(wrong)
        with pytest.raises(ReleaseError, match="install k3ray again"):
            read_release(tmp_path / "release.txt")


def test_another_checkpoint_is_not_the_release(k3b_dir: Path) -> None:
    index = read_index_file(k3b_dir / "model.safetensors.index.json")
    release, config = read_release(), read_config(k3b_dir)
    assert not is_released(release, config, index)
    assert not is_released(release, config, None) and not is_released(release, None, index)
    assert not is_released(release, None, None)
