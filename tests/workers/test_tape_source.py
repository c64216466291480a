"""Matrices from the tape: the bits of resident ones, at any ring, pinned part, batch and threads; faults are named."""

from __future__ import annotations

import errno
import os
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from k3ray.kernels import dense
from k3ray.kernels.threads import RowPool
from k3ray.workers.tape.direct_io import DiskReadFailure
from k3ray.workers.tape.manifest import TapeError
from k3ray.workers.tape.order import KV_B, full_name
from k3ray.workers.tape.residency import Residency, fixed_residency
from k3ray.workers.tape.source import TapeSource
from k3ray.workers.tape.tape import Tape
from tests.tapes import ODD_WIDTHS, Model, opened_model, synthetic_model

Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Packed:
    """A model, its tape open, and what every matrix answers from memory, by number of tokens."""

    model: Model
    tape: Tape
    inputs: dict[int, dict[int, Float32Array]]  # tokens -> tensor -> x
    answers: dict[int, dict[int, bytes]]


def make_packed(model: Model, folder: Path) -> Packed:
    model.pack(folder)
    tape = model.open(folder)
    random = np.random.default_rng(9)
    inputs: dict[int, dict[int, Float32Array]] = {1: {}, 5: {}}
    answers: dict[int, dict[int, bytes]] = {1: {}, 5: {}}
    with RowPool(1) as pool:
        for number, tensor in enumerate(tape.layout.tensors):
            weight = model.reader.read(full_name(model.binding, tensor))
            for tokens, table in inputs.items():
                x = table[number] = random.standard_normal((tokens, tensor.columns)).astype(np.float32)
                answers[tokens][number] = (
                    weight.tobytes() if tensor.short == KV_B else dense.matmul(weight, x, pool).tobytes()
                )
    return Packed(model, tape, inputs, answers)


@pytest.fixture(scope="module", params=["k3b", "odd"])
def packed(request: pytest.FixtureRequest, k3b_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Packed]:
    folder = tmp_path_factory.mktemp(request.param)
    path = k3b_dir if request.param == "k3b" else synthetic_model(folder / "model", ODD_WIDTHS)
    with opened_model(path) as model:
        found = make_packed(model, folder / "tape")
        with found.tape.file:
            yield found


def residency_of(packed: Packed, pinned: float, ring: int) -> Residency:
    """So much of the whole tape pinned, from none (0.0) to all (1.0)."""
    chunks = range(len(packed.tape.layout.chunks))
    return fixed_residency(packed.tape.layout, chunks, round(pinned * len(chunks)), ring)


def run_step(packed: Packed, source: TapeSource, pool: RowPool, tokens: int, stop: int | None = None) -> None:
    """Use every matrix (or those before `stop`) in the tape's order and compare its bits."""
    for number, tensor in enumerate(packed.tape.layout.tensors[:stop]):
        matrix = source.matrix(tensor.layer, tensor.short, pool)
        if tensor.short == KV_B:
            assert matrix.array().tobytes() == packed.answers[tokens][number]
        else:
            answer = matrix.apply(packed.inputs[tokens][number])
            assert answer.dtype == np.float32 and answer.flags.c_contiguous
            assert answer.tobytes() == packed.answers[tokens][number], tensor


@pytest.mark.parametrize("ring", [1, 2, 3, 8, 10_000])
@pytest.mark.parametrize(("pinned", "threads", "readers"), [(0.0, 2, 2), (0.5, 1, 3)])
def test_every_bit_at_every_ring(packed: Packed, ring: int, pinned: float, threads: int, readers: int) -> None:
    residency = residency_of(packed, pinned, ring)
    with TapeSource(packed.tape, residency, readers) as source, RowPool(threads) as pool:
        for tokens in (1, 5, 1):
            run_step(packed, source, pool, tokens)
        statistics = source.statistics()
        assert statistics.bytes_read - statistics.bytes_ahead >= 3 * residency.streamed_bytes
        assert (statistics.restarts, statistics.bytes_dropped) == (0, 0)


@pytest.mark.parametrize("pinned", [0.1, 0.37, 0.99, 1.0])
def test_every_bit_at_every_pinned_part(packed: Packed, pinned: float) -> None:
    with TapeSource(packed.tape, residency_of(packed, pinned, 2)) as source, RowPool(2) as pool:
        for tokens in (5, 1):
            run_step(packed, source, pool, tokens)


class CountingDisk:
    """Counts the bytes that the system gives from every place of the tape."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tape: Tape) -> None:
        self.reads: Counter[int] = Counter()
        self.bytes: Counter[int] = Counter()
        self.fail_at: dict[int, int] = {}  # the how-manieth read -> errno
        real = os.preadv

        def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
            if Path(f"/proc/self/fd/{descriptor}").readlink() != tape.file.path:
                return real(descriptor, buffers, offset)
            number = self.reads.total() + 1
            self.reads[offset] += 1
            if number in self.fail_at:
                raise OSError(self.fail_at[number], os.strerror(self.fail_at[number]))
            count = real(descriptor, buffers, offset)
            self.bytes[offset] += count
            return count

        monkeypatch.setattr(os, "preadv", preadv)


@pytest.mark.parametrize("ring", [1, 2, 3, 10_000])
@pytest.mark.parametrize("pinned", [0.0, 0.4])
def test_the_system_reads_every_streamed_byte_once_a_step(
    packed: Packed, monkeypatch: pytest.MonkeyPatch, ring: int, pinned: float
) -> None:
    layout, residency, steps = packed.tape.layout, residency_of(packed, pinned, ring), 3
    disk = CountingDisk(monkeypatch, packed.tape)
    with TapeSource(packed.tape, residency, readers=2) as source, RowPool(1) as pool:
        for _ in range(steps):
            run_step(packed, source, pool, 1)
    statistics = source.statistics()  # closed: what was being read has arrived
    assert statistics.bytes_read - statistics.bytes_ahead == steps * residency.streamed_bytes
    assert disk.bytes.total() == residency.pinned_bytes + statistics.bytes_read
    pinned_places = residency.pinned_places
    streamed_places = [place for place in range(len(residency.chunks)) if place not in pinned_places]
    assert len(pinned_places) == residency.pinned
    for place, number in enumerate(residency.chunks):
        chunk = layout.chunks[number]
        ahead = disk.reads[chunk.offset] - (1 if place in pinned_places else steps)
        assert ahead in ((0, 1) if place in streamed_places[:ring] else (0,))
        assert disk.bytes[chunk.offset] == disk.reads[chunk.offset] * chunk.nbytes


def test_a_part_of_the_layers_with_the_head(packed: Packed) -> None:
    layout = packed.tape.layout
    residency = fixed_residency(layout, layout.chunks_of(1, 3, True), 2, 2)
    with TapeSource(packed.tape, residency) as source, RowPool(1) as pool:
        for _ in range(2):
            for number, tensor in enumerate(layout.tensors):
                if tensor.layer in (1, 2, source.head_layer) and tensor.short != KV_B:
                    matrix = source.matrix(tensor.layer, tensor.short, pool)
                    assert matrix.apply(packed.inputs[5][number]).tobytes() == packed.answers[5][number]
        with pytest.raises(KeyError):
            source.matrix(0, layout.tensors[0].short, pool)


def test_no_tokens_give_no_rows_and_the_tape_goes_on(packed: Packed) -> None:
    layout = packed.tape.layout
    with TapeSource(packed.tape, residency_of(packed, 0.0, 2)) as source, RowPool(1) as pool:
        run_step(packed, source, pool, 1, len(layout.tensors) - 1)
        head = layout.tensors[-1]
        nothing = np.zeros((0, head.columns), np.float32)
        assert source.matrix(head.layer, head.short, pool).apply(nothing).shape == (0, head.rows)
        run_step(packed, source, pool, 1)
        assert source.statistics().restarts == 0


def test_a_source_that_is_dropped_ends_its_readers(packed: Packed) -> None:
    before = set(threading.enumerate())
    source = TapeSource(packed.tape, residency_of(packed, 0.0, 2))
    readers = set(threading.enumerate()) - before
    assert len(readers) == 2
    del source
    for reader in readers:
        reader.join(5)
        assert not reader.is_alive()


@pytest.mark.parametrize("stop", [1, 7, 20])
def test_a_step_given_up_leaves_no_trace(packed: Packed, stop: int) -> None:
    with TapeSource(packed.tape, residency_of(packed, 0.1, 3)) as source, RowPool(2) as pool:
        run_step(packed, source, pool, 5, stop)
        tensor = packed.tape.layout.tensors[stop]
        if tensor.short != KV_B:
            with pytest.raises(ValueError, match="expected float32"):
                source.matrix(tensor.layer, tensor.short, pool).apply(np.zeros((1, 3), np.float32))
        for _ in range(2):
            run_step(packed, source, pool, 5)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENXIO])
def test_the_third_read_fails(packed: Packed, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    disk = CountingDisk(monkeypatch, packed.tape)
    disk.fail_at = {3: number}
    with TapeSource(packed.tape, residency_of(packed, 0.0, 2), readers=1) as source, RowPool(1) as pool:
        with pytest.raises(DiskReadFailure, match=r"trunk\.tape") as caught:
            run_step(packed, source, pool, 1)
        assert caught.value.offset == packed.tape.layout.chunks[2].offset
        assert errno.errorcode[number] in str(caught.value)
        run_step(packed, source, pool, 1)  # the next step asks again, and this time it is there


def test_a_pinned_chunk_that_cannot_be_read_stops_the_loading(packed: Packed, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = CountingDisk(monkeypatch, packed.tape)
    disk.fail_at = {3: errno.EIO}
    with pytest.raises(DiskReadFailure, match="EIO"):
        TapeSource(packed.tape, residency_of(packed, 1.0, 0))


@pytest.mark.parametrize("pinned", [0.0, 1.0])
def test_damaged_bytes_are_noticed_when_they_are_first_read(packed: Packed, tmp_path: Path, pinned: float) -> None:
    folder = tmp_path / "tape"
    folder.mkdir()
    for name in ("trunk.tape", "manifest.json"):
        (folder / name).write_bytes((packed.tape.folder / name).read_bytes())
    chunk = packed.tape.layout.chunks[4]
    with (folder / "trunk.tape").open("r+b") as file:
        file.seek(chunk.offset + 9)
        byte = file.read(1)[0]
        file.seek(chunk.offset + 9)
        file.write(bytes([byte ^ 16]))
    tape = packed.model.open(folder)
    with (
        tape.file,
        RowPool(1) as pool,
        pytest.raises(TapeError, match=r"chunk 4 \(layer .* with checksum") as caught,
        TapeSource(tape, residency_of(packed, pinned, 2)) as source,
    ):
        run_step(packed, source, pool, 1)
    assert caught.value.exit_code == 1


def test_a_tape_cut_while_it_is_streamed_is_an_error_and_no_hang(packed: Packed, tmp_path: Path) -> None:
    folder = tmp_path / "tape"
    folder.mkdir()
    for name in ("trunk.tape", "manifest.json"):
        (folder / name).write_bytes((packed.tape.folder / name).read_bytes())
    tape = packed.model.open(folder)
    with tape.file, RowPool(1) as pool, TapeSource(tape, residency_of(packed, 0.0, 2)) as source:
        run_step(packed, source, pool, 1)
        os.truncate(folder / "trunk.tape", tape.layout.chunks[8].offset)
        with pytest.raises(DiskReadFailure, match="the end of the file"):
            run_step(packed, source, pool, 1)
