"""Dense matrices: the C engine's own answers, the twin at odd sizes, and one answer however the work is cut."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from k3ray.kernels import dense
from k3ray.kernels.reference import dense as twin
from k3ray.kernels.threads import RowPool

FIXTURE = Path(__file__).resolve().parents[1] / "data" / "order_fixture.npz"
WEIGHTS = ["bf16", "f32"]


@pytest.fixture(scope="module")
def pool() -> Iterator[RowPool]:
    with RowPool(3) as pool:
        yield pool


def _bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def _case(kind: str, rows: int, columns: int, tokens: int, seed: int = 1) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """Columns in pairs that cancel exactly, over ten orders of magnitude: what is left is the order's own rounding."""
    random = np.random.default_rng(seed)
    values = (random.standard_normal((rows, columns)) * 10.0 ** random.uniform(-5, 5, (rows, columns))).astype("f4")
    x = (random.standard_normal((tokens, columns)) * 10.0 ** random.uniform(-5, 5, (tokens, columns))).astype("f4")
    half = columns // 2
    order = random.permutation(columns)
    values[:, order[half : 2 * half]] = -values[:, order[:half]]
    x[:, order[half : 2 * half]] = x[:, order[:half]]
    values[:, order[2 * half :]] *= np.float32(2.0**-60)
    return (_bf16(values) if kind == "bf16" else values), x


@pytest.mark.parametrize("columns", [32, 100, 1024, 2050])
@pytest.mark.parametrize("tokens", [1, 3, 5])
def test_the_c_engines_answers_to_the_byte(columns: int, tokens: int, pool: RowPool) -> None:
    fixture = np.load(FIXTURE)
    x = np.repeat(fixture[f"bf16_{columns}_x"][None], tokens, axis=0)
    out = dense.matmul(fixture[f"bf16_{columns}_W"], x, pool)
    for row in out:
        assert row.tobytes() == fixture[f"bf16_{columns}_v1"].tobytes()
        assert row.tobytes() != fixture[f"bf16_{columns}_v0"].tobytes()


@pytest.mark.parametrize("columns", [1, 15, 16, 17, 31, 100, 257, 1537])
@pytest.mark.parametrize("rows", [1, 3, 66])
@pytest.mark.parametrize("kind", WEIGHTS)
def test_the_twins_bits_for_any_batch(kind: str, rows: int, columns: int, pool: RowPool) -> None:
    weight, x = _case(kind, rows, columns, 17)
    expected = twin.matmul(weight, x)
    for tokens in [1, 2, 3, 4, 5, 6, 7, 8, 9, 17]:
        assert dense.matmul(weight, x[:tokens], pool).tobytes() == expected[:tokens].tobytes()


def test_the_order_of_addition_shows_in_these_cases() -> None:
    weight, x = _case("f32", 66, 1537, 1)
    backwards = twin.matmul(weight[:, ::-1].copy(), x[:, ::-1].copy())
    assert (backwards != twin.matmul(weight, x)).mean() > 0.9


@pytest.mark.parametrize("kind", WEIGHTS)
def test_threads_do_not_move_a_bit(kind: str) -> None:
    weight, x = _case(kind, 1200, 300, 6)
    results = set()
    for threads in [1, 2, 3, 5]:
        with RowPool(threads) as pool:
            results.add((dense.matmul(weight, x[:1], pool).tobytes(), dense.matmul(weight, x, pool).tobytes()))
    assert len(results) == 1


@pytest.mark.parametrize("kind", WEIGHTS)
def test_a_batch_cut_anywhere_is_the_same_batch(kind: str, pool: RowPool) -> None:
    weight, x = _case(kind, 70, 530, 40)
    whole = dense.matmul(weight, x, pool)
    cuts = [0, 1, 5, 7, 24, 40]
    parts = [dense.matmul(weight, x[low:high], pool) for low, high in pairwise(cuts)]
    assert np.concatenate(parts).tobytes() == whole.tobytes()
    assert twin.matmul(weight, x).tobytes() == whole.tobytes()


@pytest.mark.parametrize("kind", WEIGHTS)
def test_rows_cut_anywhere_are_the_same_rows(kind: str, pool: RowPool) -> None:
    weight, x = _case(kind, 70, 530, 5)
    whole = dense.matmul(weight, x, pool)
    parts = [dense.matmul(weight[low:high], x, pool) for low, high in [(0, 1), (1, 18), (18, 35), (35, 70)]]
    assert np.concatenate(parts, axis=1).tobytes() == whole.tobytes()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(bits=st.lists(st.integers(0, 2**32 - 1), min_size=40, max_size=40), tokens=st.integers(1, 6))
def test_any_finite_floats(bits: list[int], tokens: int, pool: RowPool) -> None:
    """Subnormals, the largest floats and sums beyond float32 included."""
    values = np.array(bits, np.uint32)
    values[values >> 23 & 255 == 255] &= np.uint32(0xFF7FFFFF)
    floats = values.view(np.float32)
    weight, x = floats[:20].reshape(1, 20), np.tile(floats[20:], (tokens, 1))
    for form in (weight, _bf16(weight)):
        assert dense.matmul(form, x, pool).tobytes() == twin.matmul(form, x).tobytes()


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("tokens", [1, 5])
def test_read_only_and_unaligned_inputs(kind: str, tokens: int, pool: RowPool) -> None:
    weight, x = _case(kind, 9, 100, tokens)
    moved = []
    for array in (weight, x):
        buffer = np.zeros(array.nbytes + 1, np.uint8)[1:]
        buffer[:] = np.frombuffer(array.tobytes(), np.uint8)
        view = buffer.view(array.dtype).reshape(array.shape)
        view.flags.writeable = False
        moved.append(view)
    assert moved[0].ctypes.data % 2
    assert dense.matmul(moved[0], moved[1], pool).tobytes() == dense.matmul(weight, x, pool).tobytes()


def test_the_callers_output_is_filled(pool: RowPool) -> None:
    weight, x = _case("bf16", 9, 100, 5)
    out = np.full((5, 9), np.nan, np.float32)
    assert dense.matmul(weight, x, pool, out) is out
    assert out.tobytes() == twin.matmul(weight, x).tobytes()


def test_nothing_of_nothing(pool: RowPool) -> None:
    weight, x = _case("bf16", 3, 20, 2)
    assert dense.matmul(weight, x[:0], pool).shape == (0, 3)
    assert dense.matmul(weight[:0], x, pool).shape == (2, 0)
    assert dense.matmul(weight[:, :0].copy(), x[:, :0].copy(), pool).tolist() == [[0.0] * 3] * 2


def test_what_does_not_fit_is_refused(pool: RowPool) -> None:
    weight, x = _case("f32", 4, 20, 2)
    locked = np.empty((2, 4), np.float32)
    locked.flags.writeable = False
    for arguments, said in [
        ((weight[:, ::2], x[:, ::2].copy()), "weight: found strides"),
        ((weight.T, x), "found strides"),
        ((weight, x[::2, ::2]), "x: found float32"),
        ((np.asfortranarray(weight), x), "C-contiguous"),
        ((weight.astype(np.float64), x), r"weight: found float64 \(4, 20\), expected uint16 or float32"),
        ((weight, x.astype(np.float64)), "x: found float64"),
        ((weight, x[0]), "x: found"),
        ((weight[:, :19].copy(), x), r"expected float32 \(any, 19\)"),
        ((weight, x, pool, np.empty((2, 5), np.float32)), r"out: found .* expected float32 \(2, 4\)"),
        ((weight, x, pool, locked), "read-only"),
    ]:
        with pytest.raises(ValueError, match=said):
            dense.matmul(*(arguments if len(arguments) == 4 else (*arguments, pool)))
