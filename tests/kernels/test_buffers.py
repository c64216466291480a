"""Vector kernels on the buffers they really get: read-only, unaligned memory gives the same bits as own memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from k3ray.kernels import attnres, convolution, kda, mla, norm, router, situ
from k3ray.kernels.threads import RowPool

POOL = RowPool(1)


def received(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The same values as they lie in a message: at an odd address, not ours to write."""
    memory = np.empty(array.nbytes + 1, np.uint8)
    view = memory[1:].view(array.dtype).reshape(array.shape) if array.nbytes else array
    view[...] = array
    view.flags.writeable = False
    assert not view.flags.aligned or not array.nbytes or array.itemsize == 1
    return view


def normal(*shape: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(shape).standard_normal(shape, dtype=np.float32)


def _convolution(x: Any, weight: Any) -> Any:
    return convolution.short_convolution(x, weight, np.zeros((3, 21), np.float32))


def _recurrence(q: Any, k: Any, v: Any, alpha: Any, beta: Any) -> Any:
    return kda.recurrence(np.zeros((3, 7, 7), np.float32), q, k, v, alpha, beta, POOL)


def _attend(q: Any, cache: Any, kv_b: Any) -> Any:
    return mla.attend(q, cache, 5, kv_b, 3, 6, 3, 5, POOL)


CASES: dict[str, tuple[Callable[..., Any], tuple[npt.NDArray[Any], ...]]] = {
    "rmsnorm": (lambda x, w: norm.rmsnorm(x, w, 1e-5), (normal(3, 21), normal(21))),
    "convolution": (_convolution, (normal(5, 21), normal(21, 4))),
    "decay": (lambda z, bias, a_log: kda.decay(z, bias, a_log, -5.0), (normal(5, 21), normal(21), normal(3))),
    "recurrence": (_recurrence, (normal(4, 21), normal(4, 21), normal(4, 21), abs(normal(4, 21)) % 1, normal(4, 3))),
    "gated norm": (lambda o, w, gate: kda.gated_norm(o, w, gate, 1e-5), (normal(3, 21), normal(7), normal(3, 21))),
    "attend bf16": (_attend, (normal(2, 27), normal(9, 22), (normal(33, 19).view(np.uint32) >> 16).astype(np.uint16))),
    "attend f32": (_attend, (normal(2, 27), normal(9, 22), normal(33, 19))),
    "gate": (mla.sigmoid_gate, (normal(3, 9), normal(3, 9))),
    "select": (lambda x, b: router.select(x, b, 3, True, 1.0)[1], (normal(4, 9), normal(9))),
    "combine": (router.combine, (normal(2, 3, 9), normal(2, 3).astype(np.float64))),
    "situ": (lambda g, u: situ.situ(g, u, 4.0, 25.0), (normal(3, 9), normal(3, 9))),
    "mix": (lambda b, p, fold: attnres.mix(b, p, fold, 1e-5), (normal(2, 3, 9), normal(2, 9), normal(9))),
}


@pytest.mark.parametrize("name", CASES)
def test_read_only_unaligned_inputs_give_the_same_bits(name: str) -> None:
    function, inputs = CASES[name]
    assert function(*(received(array) for array in inputs)).tobytes() == function(*inputs).tobytes()


def test_a_read_only_state_is_refused() -> None:
    state = np.zeros((3, 7, 7), np.float32)
    state.flags.writeable = False
    with pytest.raises(TypeError):
        kda.recurrence(state, *(normal(2, 21) for _ in range(4)), normal(2, 3), POOL)


def test_other_dtypes_and_strided_rows_are_refused() -> None:
    with pytest.raises(TypeError):
        norm.rmsnorm(normal(3, 21).astype(np.float64), normal(21), 1e-5)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        norm.rmsnorm(normal(3, 42)[:, ::2], normal(21), 1e-5)
