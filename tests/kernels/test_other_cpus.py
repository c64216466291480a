"""The kernels that depend on the CPU give the same bits without AVX-512 and with no vector unit but SSE2.

Run as a program this prints what the current CPU settings give; numba takes them from its environment.
"""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys

import numpy as np
import pytest

from k3ray.kernels import dense, mla, mxfp4, norm
from k3ray.kernels.simd import cpu_features
from k3ray.kernels.threads import RowPool

LEVELS = {"haswell": "+avx,+avx2,+fma", "x86-64": "+sse2"}


def digest() -> str:
    """One hash over matrices of both kinds, attention and a norm, at sizes that leave edges everywhere."""
    random = np.random.default_rng(1)
    x = (random.standard_normal((5, 416)) * 10.0 ** random.uniform(-5, 5, (5, 416))).astype(np.float32)
    packed = random.integers(0, 256, (9, 208), dtype=np.uint8)
    scales = random.integers(90, 150, (9, 13), dtype=np.uint8)
    weight = random.standard_normal((9, 413), dtype=np.float32)
    bf16 = (weight.view(np.uint32) >> 16).astype(np.uint16)
    q, cache = random.standard_normal((3, 93), dtype=np.float32), random.standard_normal((70, 48), dtype=np.float32)
    kv_b = random.standard_normal((3 * 41, 41), dtype=np.float32)
    narrow = x[:, :413].copy()
    with RowPool(1) as pool:
        outputs = [dense.matmul(w, narrow[:tokens], pool) for w in (weight, bf16) for tokens in (1, 5)]
        outputs += [mxfp4.matmul(packed, scales, mxfp4.quantise(x[:tokens]), pool) for tokens in (1, 5)]
        outputs.append(mla.attend(q, cache, 60, kv_b, 3, 24, 7, 17, pool))
    outputs.append(norm.rmsnorm(narrow, weight[0], 1e-5))
    return hashlib.sha256(b"".join(output.tobytes() for output in outputs)).hexdigest()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the levels named here are those of x86-64")
@pytest.mark.parametrize("level", LEVELS)
def test_a_lesser_cpu_gives_the_same_bits(level: str) -> None:
    wanted = {feature[1:] for feature in LEVELS[level].split(",")}
    if not wanted <= cpu_features():
        pytest.skip(f"this CPU lacks some of {LEVELS[level]}")
    environment = os.environ | {"NUMBA_CPU_NAME": level, "NUMBA_CPU_FEATURES": LEVELS[level]}
    child = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, check=True)
    features, found = child.stdout.split()
    assert set(features.split(",")) & {"sse2", "avx", "avx2", "fma", "avx512f", "avx512bw"} == wanted
    assert found == digest()


if __name__ == "__main__":
    print(",".join(sorted(cpu_features())), digest())
