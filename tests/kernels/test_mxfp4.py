"""MXFP4 matrices: released bytes, every scale byte and nibble, the twin's bits, exact arithmetic as the judge."""

from __future__ import annotations

import json
from collections.abc import Iterator
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from k3ray.kernels import mxfp4
from k3ray.kernels.mxfp4 import NonFiniteInput, quantise
from k3ray.kernels.reference import mxfp4 as twin
from k3ray.kernels.threads import RowPool

FIXTURE = Path(__file__).resolve().parents[1] / "data" / "order_fixture.npz"
NIBBLES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
ANY_BATCH = [1, 2, 3, 4, 5, 6, 7, 8, 9, 17]

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


@pytest.fixture(scope="module")
def pool() -> Iterator[RowPool]:
    with RowPool(3) as pool:
        yield pool


def _case(rows: int, columns: int, tokens: int, seed: int = 1) -> tuple[Bytes, Bytes, Floats]:
    """Any bytes at all; groups in pairs that cancel exactly, so that what is left is the accumulators' own rounding."""
    random = np.random.default_rng(seed)
    groups, half = columns // 32, columns // 64
    packed = random.integers(0, 256, (rows, groups, 16), dtype=np.uint8)
    scales = random.choice(np.array([*range(100, 140), 255], np.uint8), (rows, groups))
    x = random.standard_normal((tokens, groups, 32)) * 10.0 ** random.uniform(-5, 5, (tokens, groups, 1))
    order = random.permutation(groups)
    ones, others, alone = order[:half], order[half : 2 * half], order[2 * half :]
    packed[:, others], scales[:, others], x[:, others] = packed[:, ones] ^ 0x88, scales[:, ones], x[:, ones]
    scales[:, alone] = 0
    return packed.reshape(rows, -1), scales, x.astype(np.float32).reshape(tokens, -1)


def _ulps(one: Floats, other: Floats) -> NDArray[np.int64]:
    """How many floats apart."""

    def ordered(values: Floats) -> NDArray[np.int64]:
        bits = values.view(np.int32).astype(np.int64)
        return np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)

    return np.abs(ordered(one) - ordered(other))


def _exact(weights: NDArray[np.float64], x: Floats) -> NDArray[np.float64]:
    """Each row's dot product in rational arithmetic, rounded once to double."""
    values = [Fraction(float(value)) for value in x]
    return np.array(
        [float(sum(Fraction(float(w)) * v for w, v in zip(row, values, strict=True) if w)) for row in weights]
    )


def _json_array(entry: dict[str, Any], dtype: Any) -> NDArray[Any]:
    return np.array(entry["data"], dtype).reshape(entry["shape"])


@pytest.fixture(scope="module")
def released(shared_data: Path) -> dict[str, Any]:
    return json.loads((shared_data / "mxfp4.json").read_text())  # type: ignore[no-any-return]


def test_released_bytes_decode_exactly(released: dict[str, Any], pool: RowPool) -> None:
    packed, scales = _json_array(released["packed"], np.uint8), _json_array(released["scales"], np.uint8)
    expected = _json_array(released["expected"], np.float32)
    assert twin.decode(packed, scales).astype(np.float32).tobytes() == expected.tobytes()
    ones = np.eye(packed.shape[1] * 2, dtype=np.float32)
    assert (mxfp4.matmul(packed, scales, quantise(ones), pool) == expected.T).all()


def test_swapped_nibbles_are_another_matrix(released: dict[str, Any], pool: RowPool) -> None:
    packed, scales = _json_array(released["packed"], np.uint8), _json_array(released["scales"], np.uint8)
    swapped = packed << 4 | packed >> 4
    wrong = np.array(released["expected_swapped_nibbles"]["first64"], np.float32)
    assert twin.decode(swapped, scales)[0, :64].astype(np.float32).tobytes() == wrong.tobytes()
    ours = mxfp4.matmul(packed, scales, quantise(np.eye(64, packed.shape[1] * 2, dtype=np.float32)), pool)[:, 0]
    assert ours.tobytes() != wrong.tobytes()
    x = quantise(np.random.default_rng(1).standard_normal((1, packed.shape[1] * 2)).astype(np.float32))
    assert (mxfp4.matmul(packed, scales, x, pool) != mxfp4.matmul(swapped, scales, x, pool)).all()


def test_released_matrix_against_exact_arithmetic(released: dict[str, Any], pool: RowPool) -> None:
    packed, scales = _json_array(released["packed"], np.uint8), _json_array(released["scales"], np.uint8)
    x = np.random.default_rng(2).standard_normal((1, packed.shape[1] * 2)).astype(np.float32)
    exact = _exact(_json_array(released["expected"], np.float64), x[0]).astype(np.float32)
    ulps = _ulps(mxfp4.matmul(packed, scales, quantise(x), pool)[0], exact)
    assert ulps.max() <= 1
    assert (ulps == 0).mean() > 0.95


@pytest.mark.parametrize("columns", [32, 96, 1024])
def test_never_worse_than_the_c_engine_where_everything_cancels(columns: int, pool: RowPool) -> None:
    """The fixture's rows cancel exactly over fifteen orders of magnitude, so that another order of doubles shows.

    The C engine's double contract leaves its rounding there. The integer contract must come nearer to the exact
    answer in every row, and does not depend on an order inside the group at all.
    """
    fixture = np.load(FIXTURE)
    packed, scales, x = (fixture[f"mxfp4_{columns}_{name}"] for name in ("p", "s", "x"))
    exact = _exact(twin.decode(packed, scales), x)
    ours = mxfp4.matmul(packed, scales, quantise(x[None]), pool)[0]
    theirs = fixture[f"mxfp4_{columns}_v1"]
    assert (np.abs(ours - exact) <= np.abs(theirs - exact)).all()
    assert ours.tobytes() == exact.astype(np.float32).tobytes()


@pytest.mark.parametrize("tokens", [1, 4])
def test_every_scale_byte_with_every_nibble(tokens: int, pool: RowPool) -> None:
    packed = np.tile(np.arange(16, dtype=np.uint8) * 16, (256, 1))  # column 2 i + 1 holds nibble i, the others zero
    packed[:, :] |= np.arange(15, -1, -1, dtype=np.uint8)  # and column 2 i holds nibble 15 - i
    scales = np.arange(256, dtype=np.uint8)[:, None]
    columns = [nibble for i in range(16) for nibble in (NIBBLES[15 - i], NIBBLES[i])]
    with np.errstate(over="ignore"):
        table = np.array([[np.float32(w * 2.0 ** (byte - 127)) for w in columns] for byte in range(255)], np.float32)
    for column in range(32):
        x = np.zeros((tokens, 32), np.float32)
        x[:, column] = 1.0
        for row in mxfp4.matmul(packed, scales, quantise(x), pool):
            assert (row[:255] == table[:, column]).all()
            assert row[255:].tobytes() == np.float32(0).tobytes()


@pytest.mark.parametrize("columns", [96, 256])
@pytest.mark.parametrize("tokens", [1, 4])
def test_a_single_weight_in_every_position(columns: int, tokens: int, pool: RowPool) -> None:
    packed = np.zeros((columns, columns // 2), np.uint8)
    scales = np.tile(np.arange(125, 125 + columns // 32, dtype=np.uint8), (columns, 1))
    expected = np.empty(columns, np.float32)
    x = np.arange(1, columns + 1, dtype=np.float32)
    for position in range(columns):
        nibble = 1 + position % 7
        packed[position, position // 2] = nibble << 4 if position % 2 else nibble
        expected[position] = NIBBLES[nibble] * 2.0 ** (position // 32 - 2) * x[position]
    for row in mxfp4.matmul(packed, scales, quantise(np.tile(x, (tokens, 1))), pool):
        assert row.tobytes() == expected.tobytes()


@pytest.mark.parametrize("columns", [32, 64, 96, 128, 160, 384, 1568])
@pytest.mark.parametrize("rows", [1, 3, 66])
def test_the_twins_bits_for_any_batch(rows: int, columns: int, pool: RowPool) -> None:
    packed, scales, x = _case(rows, columns, 17)
    expected = twin.matmul(packed, scales, x)
    for tokens in ANY_BATCH:
        out = mxfp4.matmul(packed, scales, quantise(x[:tokens]), pool)
        assert out.tobytes() == expected[:tokens].tobytes()


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize(
    ("quanta", "kept"), [(0.5, 0), (0.75, 1), (1.0, 1), (1.5, 2), (2.5, 2), (-0.5, 0), (-1.5, -2), (12345.75, 12346)]
)
def test_a_value_is_rounded_to_its_groups_quantum(quanta: float, kept: int, tokens: int, pool: RowPool) -> None:
    """The largest value is 1 = 0.5 * 2^1, so the quantum is 2^(1 - 44); the two ones cancel and leave the rounding."""
    x = np.zeros((tokens, 32), np.float32)
    x[:, :3] = [1.0, 1.0, quanta * 2.0**-43]
    packed = np.zeros((1, 16), np.uint8)
    packed[0, :2] = [0x2A, 0x02]  # weights -1, 1, 1
    scales = np.array([[127]], np.uint8)
    for row in mxfp4.matmul(packed, scales, quantise(x), pool):
        assert row.tolist() == [kept * 2.0**-43]


def test_the_order_of_groups_shows_in_these_cases() -> None:
    packed, scales, x = _case(66, 1568, 1)
    backwards = packed.reshape(66, -1, 16)[:, ::-1].reshape(66, -1), scales[:, ::-1], x.reshape(-1, 32)[::-1]
    other = twin.matmul(backwards[0], backwards[1], backwards[2].reshape(1, -1))
    assert (other != twin.matmul(packed, scales, x)).mean() > 0.8


@st.composite
def _groups(draw: st.DrawFn) -> tuple[Bytes, Bytes, Floats]:
    """A few groups of any bits: subnormals, the largest float, zeros, any nibble, any scale byte."""
    groups, tokens = draw(st.integers(1, 6)), draw(st.sampled_from([1, 2, 4, 5]))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    bits = random.integers(0, 2**32, (tokens, 32 * groups), dtype=np.uint32)
    field = draw(st.sampled_from([0, 1, 2, 100, 127, 253, 254]))
    spread = draw(st.integers(0, 60))
    cancels = draw(st.booleans())  # columns 0 and 1 of each group do, which leaves what was rounded beside them
    depths = random.integers(0, spread + 1, bits.shape)
    if cancels:
        depths += 20
        depths[:, ::32] = 0
    fields = np.clip(field - depths, 0, 254).astype(np.uint32)
    bits = (bits & np.uint32(0x807FFFFF)) | fields << np.uint32(23)
    bits[:, 2:][random.random((tokens, 32 * groups - 2)) < draw(st.sampled_from([0.0, 0.5, 0.97]))] = 0
    if draw(st.booleans()):
        bits[0, 0] = draw(st.sampled_from([0x7F7FFFFF, 0xFF7FFFFF, 1, 0x80000001, 0x00800000, 0x007FFFFF, 0x80000000]))
    scales = draw(st.lists(st.sampled_from([0, 1, 2, 64, 126, 127, 128, 200, 253, 254, 255]), min_size=2, max_size=2))
    packed = random.integers(0, 256, (3, 16 * groups), dtype=np.uint8)
    if cancels:
        bits[:, 1::32] = bits[:, 0::32]
        packed[:, ::16] = packed[:, ::16] & 15 | (packed[:, ::16] & 15 ^ 8) << 4
    return packed, np.resize(np.array(scales, np.uint8), (3, groups)), bits.view(np.float32)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=_groups())
def test_any_finite_input_and_any_scale_give_the_twins_bits(case: tuple[Bytes, Bytes, Floats], pool: RowPool) -> None:
    packed, scales, x = case
    assert mxfp4.matmul(packed, scales, quantise(x), pool).tobytes() == twin.matmul(packed, scales, x).tobytes()


def _rational_contract(packed: Bytes, scales: Bytes, x: Floats) -> list[list[float]]:
    """The contract once more in rational arithmetic, where nothing can round or overflow unasked."""
    answers = []
    for vector in x:
        row_answers = []
        for row in range(packed.shape[0]):
            sums = [0.0] * 4
            for group in range(scales.shape[1]):
                values = [Fraction(float(value)) for value in vector[32 * group : 32 * group + 32]]
                largest = max(abs(value) for value in values)
                e = next(k for k in range(-149, 129) if largest < Fraction(2) ** k) if largest else 0
                quanta = [round(value * Fraction(2) ** (44 - e)) for value in values]  # to even, as rint
                nibbles = [byte >> shift & 15 for byte in packed[row, 16 * group : 16 * group + 16] for shift in (0, 4)]
                dot = sum(int(2 * NIBBLES[n]) * q for n, q in zip(nibbles, quanta, strict=True))
                scale = int(scales[row, group])
                if scale != 255:
                    term = dot * Fraction(2) ** (e - 44 - 1 + scale - 127)
                    sums[group % 4] = float(Fraction(sums[group % 4]) + term)
            row_answers.append((sums[0] + sums[1]) + (sums[2] + sums[3]))
        answers.append(row_answers)
    return answers


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=_groups())
def test_the_contract_in_rational_arithmetic(case: tuple[Bytes, Bytes, Floats], pool: RowPool) -> None:
    packed, scales, x = case[0][:1], case[1][:1], case[2][:2]
    with np.errstate(over="ignore"):
        expected = np.array(_rational_contract(packed, scales, x)).astype(np.float32)
    assert mxfp4.matmul(packed, scales, quantise(x), pool).tobytes() == expected.tobytes()


def test_threads_do_not_move_a_bit() -> None:
    packed, scales, x = _case(3000, 160, 6)
    results = set()
    for threads in [1, 2, 3, 5]:
        with RowPool(threads) as pool:
            one, many = (mxfp4.matmul(packed, scales, quantise(x[:n]), pool) for n in (1, 6))
            results.add((one.tobytes(), many.tobytes()))
    assert len(results) == 1


def test_a_batch_cut_or_gathered_anyhow_is_the_same_batch(pool: RowPool) -> None:
    packed, scales, x = _case(70, 544, 40)
    whole = mxfp4.matmul(packed, scales, quantise(x), pool)
    parts = [mxfp4.matmul(packed, scales, quantise(x[low:high]), pool) for low, high in pairwise([0, 1, 5, 7, 24, 40])]
    assert np.concatenate(parts).tobytes() == whole.tobytes()
    chosen = [39, 3, 3, 0, 17, 8, 1]
    assert mxfp4.matmul(packed, scales, quantise(x).take(chosen), pool).tobytes() == whole[chosen].tobytes()
    assert quantise(x).take([]).tokens == 0


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("columns", [96, 128])
def test_read_only_and_unaligned_inputs(tokens: int, columns: int, pool: RowPool) -> None:
    packed, scales, x = _case(9, columns, tokens)
    moved = []
    for array in (packed, scales):
        buffer = np.zeros(array.nbytes + 1, np.uint8)[1:]
        buffer[:] = array.ravel()
        view = buffer.reshape(array.shape)
        view.flags.writeable = False
        moved.append(view)
    x.flags.writeable = False
    out = np.full((tokens, 9), np.nan, np.float32)
    assert mxfp4.matmul(moved[0], moved[1], quantise(x), pool, out) is out
    assert out.tobytes() == twin.matmul(packed, scales, x).tobytes()


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [(0, 0), (0, 31), (2, 95)])
def test_what_is_not_finite_is_an_error(value: float, place: tuple[int, int], pool: RowPool) -> None:
    x = np.ones((3, 96), np.float32)
    x[place] = value
    with pytest.raises(NonFiniteInput, match=rf"x\[{place[0]}, {place[1]}\]: found -?(nan|inf), expected a finite"):
        quantise(x)


def test_what_does_not_fit_is_refused(pool: RowPool) -> None:
    packed, scales, x = _case(4, 96, 2)
    quantised = quantise(x)
    for wrong, said in [((2, 95), "multiple of 32"), ((2, 48), "multiple of 32"), ((96,), "expected float32")]:
        with pytest.raises(ValueError, match=said):
            quantise(np.zeros(wrong, np.float32))
    with pytest.raises(ValueError, match="found float64"):
        quantise(x.astype(np.float64))  # type: ignore[arg-type]
    for p, s, said in [
        (np.zeros((4, 96), np.uint8)[:, ::2], scales, "packed: found strides"),
        (packed, np.zeros((4, 6), np.uint8)[:, ::2], "scales: found strides"),
        (packed[:, :32].copy(), scales, r"packed: found uint8 \(4, 32\), expected uint8 \(any, 48\)"),
        (packed, scales[:3], r"scales: .* expected uint8 \(4, 3\)"),
        (packed.view(np.int8), scales, "packed: found int8"),
    ]:
        with pytest.raises(ValueError, match=said):
            mxfp4.matmul(p, s, quantised, pool)
    with pytest.raises(ValueError, match="out: found"):
        mxfp4.matmul(packed, scales, quantised, pool, np.empty((4, 2), np.float32))
