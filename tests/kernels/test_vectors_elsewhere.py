"""The vector kernels as other CPUs get them, with narrower registers or without fma instructions: the same bits."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest

from k3ray.kernels import attnres, convolution, kda, mla, norm, router, situ
from k3ray.kernels.simd import cpu_features
from k3ray.kernels.threads import RowPool

CPUS = {
    "avx2": ("haswell", "+sse3,+ssse3,+sse4.1,+sse4.2,+popcnt,+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt,+movbe"),
    "plain": ("x86-64", "+sse2"),
}


def outputs() -> Iterator[npt.NDArray[np.generic]]:
    """What every vector kernel says to fixed inputs of awkward sizes and wide range."""
    rng = np.random.default_rng(5)

    def wide(*shape: int) -> npt.NDArray[np.float32]:
        return (rng.standard_normal(shape) * 10.0 ** rng.uniform(-4, 2, shape)).astype(np.float32)

    yield norm.rmsnorm(wide(3, 163), wide(163), 1e-5)
    yield convolution.short_convolution(wide(9, 57), wide(57, 4), wide(3, 57))
    alpha = kda.decay(wide(9, 57), wide(57), wide(3), -5.0)
    yield alpha
    state = wide(3, 19, 19)
    with RowPool(1) as pool:
        yield kda.recurrence(state, wide(9, 57), wide(9, 57), wide(9, 57), alpha, wide(9, 3), pool)
        yield state
        kv_b = (wide(3 * 41, 77).view(np.uint32) >> 16).astype(np.uint16)
        for tokens, first in ((1, 130), (35, 60)):
            yield mla.attend(wide(tokens, 93), wide(200, 84) / 8, first, kv_b, 3, 24, 7, 17, pool)
    yield kda.gated_norm(wide(9, 57), wide(19), wide(9, 57), 1e-5)
    yield mla.sigmoid_gate(wide(9, 57), wide(9, 57))
    ids, weights = router.select(wide(5, 97), wide(97), 7, True, 1.0)
    yield from (ids, weights, router.combine(wide(5, 7, 57), weights))
    yield situ.situ(wide(9, 57), wide(9, 57), 4.0, 25.0)
    yield attnres.mix(wide(3, 4, 57), wide(3, 57), wide(57), 1e-5)


def digest() -> str:
    return " ".join(hashlib.sha256(output.tobytes()).hexdigest()[:12] for output in outputs())


@pytest.mark.skipif(platform.machine() != "x86_64", reason="plays other x86 CPUs")
@pytest.mark.parametrize("cpu", CPUS)
def test_the_same_bits_as_on_this_cpu(cpu: str) -> None:
    name, features = CPUS[cpu]
    if cpu == "avx2" and not {"avx2", "fma"} <= cpu_features():
        pytest.skip("this CPU has no AVX2 to play with")
    environment = os.environ | {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features}
    done = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == digest()


if __name__ == "__main__":
    print(digest())
