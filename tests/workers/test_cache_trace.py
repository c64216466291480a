"""The recorded trace: read strictly, written as it is read, cut into passes and put into the order of decoding."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from k3ray.workers.cache.trace import (
    ExpertRequest,
    TraceError,
    decoding_order,
    encode_trace,
    read_trace,
    recorded_order,
)


def pairs(requests: list[tuple[int, list[int]]]) -> bytes:
    return b"".join(struct.pack("<ii", layer, expert) for layer, experts in requests for expert in experts)


def plain(requests: list[ExpertRequest]) -> list[tuple[int, list[int]]]:
    return [(request.layer, list(request.experts)) for request in requests]


def test_the_published_trace(shared_data: Path) -> None:
    path = shared_data / "trace" / "expert_trace.bin"
    passes = read_trace(path)
    assert [one.num_tokens for one in passes] == [5, 6, 7, 8, 9, 10, 11, 12]
    assert {rows.shape[1] for one in passes for _, rows in one.chosen} == {16}
    recorded, decoding = recorded_order(passes), decoding_order(passes)
    assert sum(len(request.experts) for request in recorded) == 100_096
    assert len({(request.layer, expert) for request in recorded for expert in request.experts}) == 10_010
    assert sum(len(request.experts) for request in decoding) == 17_664
    assert [request.layer for request in decoding] == list(range(1, 93)) * 12
    data = path.read_bytes()
    assert decoding[0].experts == struct.unpack("<32i", data[:128])[1::2]
    last_pass = data[-8 * 12 * 16 * 92 :]  # layer 1, token 0, token 1, ...
    assert decoding[92].experts == struct.unpack("<32i", last_pass[128:256])[1::2]


def test_reading_and_writing_keep_every_byte(shared_data: Path, tmp_path: Path) -> None:
    path = shared_data / "trace" / "expert_trace.bin"
    (tmp_path / "again.bin").write_bytes(encode_trace(recorded_order(read_trace(path))))
    assert (tmp_path / "again.bin").read_bytes() == path.read_bytes()


def test_passes_that_are_computed_again_are_left_out(tmp_path: Path) -> None:
    one, two, three = [4, 2], [5, 4], [1, 7]
    first = [(1, one), (1, two), (2, two), (2, three)]
    again = [(1, one), (1, two), (1, three), (2, two), (2, three), (2, one)]
    (tmp_path / "t").write_bytes(pairs(first + again))
    passes = read_trace(tmp_path / "t")
    assert plain(recorded_order(passes)) == first + again
    assert plain(decoding_order(passes)) == [(1, one), (2, two), (1, two), (2, three), (1, three), (2, one)]


def test_a_prompt_and_then_single_tokens_are_all_kept(tmp_path: Path) -> None:
    requests = [(1, [4, 2]), (1, [5, 4]), (2, [5, 4]), (2, [1, 7]), (1, [3, 2]), (2, [0, 9]), (1, [4, 2]), (2, [5, 4])]
    (tmp_path / "t").write_bytes(pairs(requests))
    found = plain(decoding_order(read_trace(tmp_path / "t")))
    assert found == [requests[at] for at in (0, 2, 1, 3, 4, 5, 6, 7)]


@given(
    st.lists(
        st.tuples(st.integers(0, 65535), st.lists(st.integers(0, 65535), min_size=3, max_size=3, unique=True)),
        min_size=1,
        max_size=30,
    )
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_trace_comes_back(tmp_path: Path, requests: list[tuple[int, list[int]]]) -> None:
    path = tmp_path / "any.bin"
    path.write_bytes(encode_trace([ExpertRequest(layer, tuple(experts)) for layer, experts in requests]))
    assert path.read_bytes() == pairs(requests)
    passes = read_trace(path, experts_per_token=3)
    assert plain(recorded_order(passes)) == requests
    left = requests.copy()
    for request in plain(decoding_order(passes)):
        left.remove(request)  # each was recorded, and comes once
    for one in passes:
        layers = [layer for layer, _ in one.chosen]
        assert layers == sorted(set(layers))


@given(st.binary(max_size=200))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_are_read_whole_or_refused(tmp_path: Path, contents: bytes) -> None:
    path = tmp_path / "any.bin"
    path.write_bytes(contents)
    try:
        passes = read_trace(path)
    except TraceError as refusal:
        assert str(path) in str(refusal) and refusal.exit_code == 2
    else:
        assert pairs(plain(recorded_order(passes))) == contents


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (b"", "found 0 bytes"),
        (bytes(12), "found 12 bytes.*truncated"),
        (struct.pack("<iiii", 1, 2, 1, -1), "offset 8: found layer 1, expert -1"),
        (struct.pack("<ii", -3, 2), "offset 0: found layer -3, expert 2"),
        (struct.pack(">ii", 1, 2), "offset 0: found layer 16777216, expert 33554432.*byte order"),
        (struct.pack("<ii", 1, 65536), "expert 65536, expected numbers from 0 to 65535"),
    ],
)
def test_what_is_no_trace(tmp_path: Path, contents: bytes, message: str) -> None:
    path = tmp_path / "t.bin"
    path.write_bytes(contents)
    with pytest.raises(TraceError, match=message):
        read_trace(path)


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        read_trace(tmp_path / "absent.bin")
    with pytest.raises(TraceError, match="directory"):
        read_trace(tmp_path)


@pytest.mark.parametrize("width", [3, 8, 0, -1, 2])
def test_a_width_that_does_not_fit(tmp_path: Path, width: int) -> None:
    (tmp_path / "t").write_bytes(pairs([(1, [1, 2, 3, 4]), (2, [5, 5, 6, 7])]))
    with pytest.raises(TraceError, match=f"for {width} different experts"):
        read_trace(tmp_path / "t", experts_per_token=width)


def test_the_width_is_the_largest_that_fits(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(pairs([(1, [1, 2, 3, 4, 1, 9]), (2, [5, 6, 7])]))
    assert read_trace(tmp_path / "t")[0].chosen[0][1].tolist() == [[1, 2, 3], [4, 1, 9]]
    (tmp_path / "t").write_bytes(pairs([(1, [1, 1]), (2, [5, 6])]))
    assert read_trace(tmp_path / "t")[0].chosen[1][1].tolist() == [[5], [6]]
