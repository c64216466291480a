"""KDA's chunked form: its twin's bits, and its values against the recurrence and PyTorch over shapes and decays."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from k3ray.audit.kda_cases import DT_BIASES, RATES, SHAPES, WIDTH, KdaInputs, KdaShape, make_inputs, run_case, sweep
from k3ray.kernels.kda import recurrence
from k3ray.kernels.kda_chunk import chunked
from k3ray.kernels.reference import kda_chunk as twin
from k3ray.kernels.threads import RowPool
from tests.conforming import torch_part

Arrays = tuple[np.ndarray, np.ndarray]
BOUND = 2e-6  # of the largest element


def run(inputs: KdaInputs, chunk: int = 16, threads: int = 1) -> Arrays:
    state = inputs.state.copy()
    with RowPool(threads) as pool:
        out = chunked(state, inputs.q, inputs.k, inputs.v, inputs.alpha, inputs.beta_logits, pool, chunk)
    return out, state


def narrow(tokens: int, heads: int, width: int, seed: int = 0) -> KdaInputs:
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((tokens, heads * width), dtype=np.float32) for _ in range(3))
    alpha = rng.uniform(0.01, 1.0, q.shape).astype(np.float32)
    state = rng.standard_normal((heads, width, width), dtype=np.float32)
    return KdaInputs(state, q, k, v, alpha, rng.standard_normal((tokens, heads), dtype=np.float32))


@pytest.mark.parametrize(
    ("tokens", "heads", "width", "chunk"), [(1, 1, 1, 16), (17, 3, 19, 16), (33, 2, 16, 7), (5, 4, 33, 64)]
)
def test_the_twin_has_the_same_bits(tokens: int, heads: int, width: int, chunk: int) -> None:
    inputs = narrow(tokens, heads, width)
    out, state = run(inputs, chunk, threads=2)
    theirs = inputs.state.copy()
    twin_out = twin.chunked(theirs, inputs.q, inputs.k, inputs.v, inputs.alpha, inputs.beta_logits, chunk)
    assert out.tobytes() == twin_out.tobytes() and state.tobytes() == theirs.tobytes()


@pytest.mark.parametrize("shape", SHAPES, ids=[shape.name for shape in SHAPES])
def test_every_shape_agrees_with_the_recurrence_over_the_sweep(shape: KdaShape) -> None:
    with RowPool(2) as pool:
        case = run_case(shape, pool)
    assert case.settings == 2 * len(DT_BIASES) * len(RATES)
    assert 0 < case.relative_output < BOUND and case.relative_state < BOUND, case


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 33, 65])
@pytest.mark.parametrize("dt_bias", [-3.0, -1.0, 1.0, 3.0])
@pytest.mark.parametrize("rate", [0.01, 16.0, 200.0])
def test_lengths_and_decays_between(tokens: int, dt_bias: float, rate: float) -> None:
    for repeated in (False, True):
        inputs = make_inputs(tokens, 1, (dt_bias, rate, repeated), tokens)
        out, state = run(inputs)
        other_state = inputs.state.copy()
        with RowPool(1) as pool:
            other = recurrence(other_state, inputs.q, inputs.k, inputs.v, inputs.alpha, inputs.beta_logits, pool)
        assert np.abs(out - other).max() <= BOUND * np.abs(other).max()
        assert np.abs(state - other_state).max() <= BOUND * np.abs(other_state).max()


def test_the_chunk_moves_values_by_rounding_only() -> None:
    inputs = make_inputs(65, 2, (0.0, 1.0, True), 3)
    whole = run(inputs, 65)
    for chunk in (1, 7, 16):
        out, state = run(inputs, chunk)
        assert np.abs(out - whole[0]).max() < 1e-5 and np.abs(state - whole[1]).max() < 1e-5


def test_full_decay_for_many_tokens_neither_overflows_nor_mixes_infinity_with_zero() -> None:
    inputs = make_inputs(130, 1, (3.0, 200.0, False), 5)
    smallest = np.float32(np.exp(-5.0))
    for alpha in (np.full_like(inputs.alpha, smallest), np.ones_like(inputs.alpha)):
        out, state = run(replace(inputs, alpha=alpha), chunk=130)
        other_state = inputs.state.copy()
        with RowPool(1) as pool:
            other = recurrence(other_state, inputs.q, inputs.k, inputs.v, alpha, inputs.beta_logits, pool)
        assert np.isfinite(out).all() and np.isfinite(state).all()
        assert np.abs(out - other).max() <= BOUND * np.abs(other).max()


def test_a_state_is_carried_from_call_to_call() -> None:
    inputs = make_inputs(33, 2, (0.0, 1.0, False), 7)
    whole, whole_state = run(inputs)
    state, parts = inputs.state.copy(), []
    with RowPool(1) as pool:
        for part in (slice(0, 16), slice(16, 32), slice(32, 33)):
            arrays = (a[part] for a in (inputs.q, inputs.k, inputs.v, inputs.alpha, inputs.beta_logits))
            parts.append(chunked(state, *arrays, pool))
    assert np.abs(np.concatenate(parts) - whole).max() < 1e-5 and np.abs(state - whole_state).max() < 1e-5


@pytest.mark.parametrize("shape", SHAPES, ids=[shape.name for shape in SHAPES])
def test_our_torch_reference_agrees_over_the_sweep(shape: KdaShape) -> None:
    torch = pytest.importorskip("torch", reason="torch is the optional extra `reference`")
    torch.set_num_threads(1)
    part = torch_part("attention")
    for _, sequences in itertools.islice(sweep(shape), 0, None, 7 if shape.heads > 2 else 2):
        for inputs in sequences:
            by_head = (inputs.q, inputs.k, inputs.v, inputs.alpha)
            q, k, v, alpha = (torch.tensor(array).double().view(-1, shape.heads, WIDTH) for array in by_head)
            theirs = part.recurrence(
                torch.tensor(inputs.state).double(), part.l2_normalised(q) * WIDTH**-0.5, part.l2_normalised(k), v,
                torch.log(alpha), torch.tensor(inputs.beta_logits).double().sigmoid(),
            )  # fmt: skip
            for ours, expected in zip(run(inputs), theirs, strict=True):
                expected = expected.reshape(ours.shape).numpy()
                assert np.abs(ours - expected).max() <= BOUND * np.abs(expected).max()


def test_shapes_that_do_not_fit_are_refused() -> None:
    inputs = narrow(2, 2, 8)
    with RowPool(1) as pool:
        for wrong in (replace(inputs, beta_logits=inputs.beta_logits[:, :1].copy()), replace(inputs, q=inputs.q[:1])):
            with pytest.raises(ValueError, match="do not fit"):
                chunked(wrong.state, wrong.q, wrong.k, wrong.v, wrong.alpha, wrong.beta_logits, pool)
        with pytest.raises(ValueError, match="at least one"):
            chunked(inputs.state, inputs.q, inputs.k, inputs.v, inputs.alpha, inputs.beta_logits, pool, 0)
