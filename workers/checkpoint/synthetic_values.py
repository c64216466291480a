"""The values of a synthetic checkpoint's tensors: seeded, each tensor reproducible alone, the same bytes everywhere.

A tensor is a table looked up with random codes of 8 or 16 bits. The codes come from SFC64 keyed by seed and tensor
name; the tables use only exactly rounded arithmetic. So neither the numpy version, the libm, the order of writing nor
the size of the blocks can move a byte. Magnitudes are those of the golden checkpoints and of the release's published
statistics (CHECKPOINT.md): activations stay near 1 through the layers and the choice of experts and tokens varies.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import prod
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from k3ray.workers.checkpoint.safetensors_file import PlannedTensor
from k3ray.workers.checkpoint.shapes import A_LOG, MXFP4_GROUP

Table = npt.NDArray[Any]  # of 65,536 entries (16-bit codes) or 256 (8-bit codes), in the tensor's dtype

BLOCK_WORDS = 1 << 17  # 64-bit words drawn at a time: 1 MB, so that a block stays in the cache
NIBBLE_STD = math.sqrt(68.5 / 8)  # of E2M1 values 0 .5 1 1.5 2 3 4 6 and their negatives, all equally likely


@dataclass(frozen=True, slots=True)
class Gaussian:
    """Normally distributed values between two bounds. With `per_root_columns`, std is divided by sqrt(columns)."""

    mean: float
    std: float
    per_root_columns: bool = False
    low: float = -math.inf
    high: float = math.inf


NORM = Gaussian(1.0, 0.15)
PROJECTION = Gaussian(0.0, 1.0, per_root_columns=True)
# By the end of the short name; the first that fits. Everything else is a PROJECTION.
GAUSSIANS: tuple[tuple[str, Gaussian], ...] = (
    ("embed_tokens.weight", Gaussian(0.0, 1.0)),
    ("lm_head.weight", Gaussian(0.0, 2.8, per_root_columns=True)),
    ("norm.weight", NORM),
    ("res_proj.weight", Gaussian(0.0, 1.2, per_root_columns=True)),
    ("conv1d.weight", Gaussian(0.0, 0.9, per_root_columns=True)),
    ("dt_bias", Gaussian(-4.55, 1.5, low=-7.9, high=0.2)),
    (".b_proj.weight", Gaussian(0.0, 1.5, per_root_columns=True)),
    (".q_b_proj.weight", Gaussian(0.0, 2.0, per_root_columns=True)),
    ("e_score_correction_bias", Gaussian(0.0, 0.02)),
    ("block_sparse_moe.gate.weight", Gaussian(0.0, 1.6, per_root_columns=True)),
    ("routed_expert_up_proj.weight", Gaussian(0.0, 0.6, per_root_columns=True)),
    # SiTU needs inputs beyond 1 to bend; the down projection brings its output back to about half a unit.
    (".gate_proj.weight", Gaussian(0.0, 1.5, per_root_columns=True)),
    (".up_proj.weight", Gaussian(0.0, 1.5, per_root_columns=True)),
    (".down_proj.weight", Gaussian(0.0, 0.4, per_root_columns=True)),
)
EXPERT_STDS = {"w1.weight_scale": 1.5, "w3.weight_scale": 1.5, "w2.weight_scale": 1.0}  # over sqrt(columns)


def tensor_blocks(seed: int, tensor: PlannedTensor, short: str, num_heads: int) -> Iterator[npt.NDArray[np.generic]]:
    """The values of one tensor, flat and in order, in blocks of at most 1 Mi elements, little-endian.

    `short` is its name in shapes.py (of an expert's tensor: w1.weight_packed and so on), which decides the
    distribution; `num_heads` is that of the KDA layers, after which A_log is zero as in the release.
    """
    table = value_table(short, tensor.dtype, tensor.shape)
    code_type = np.dtype("<u2") if table is not None and len(table) == 65_536 else np.dtype("u1")
    first = 0
    for block in _code_blocks(seed, tensor.name, code_type, prod(tensor.shape)):
        # Packed nibbles are the codes themselves, all equally likely.
        values = block if table is None else table[block]
        if short == A_LOG:
            values[max(num_heads - first, 0) :] = 0.0
        first += len(block)
        yield values


def _code_blocks(seed: int, name: str, dtype: np.dtype[Any], count: int) -> Iterator[npt.NDArray[np.integer[Any]]]:
    """`count` random codes, uniform over the dtype, in blocks; the same whatever the block size."""
    key = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = np.random.Generator(np.random.SFC64(int.from_bytes(key, "little")))
    per_word = 8 // dtype.itemsize
    while count > 0:
        num_words = min(BLOCK_WORDS, -(-count // per_word))
        # Over the full range this is the bit generator's own stream (a test compares), and faster than random_raw.
        words = generator.integers(0, 2**64 - 1, num_words, np.uint64, endpoint=True)
        codes = words.astype("<u8", copy=False).view(dtype)[:count]
        count -= len(codes)
        yield codes


@cache
def _normal_table() -> npt.NDArray[np.float64]:
    """(65536,) quantiles of the unit normal in steps of 1/4096 (no quantile lies near a step's border)."""
    quantile = NormalDist().inv_cdf
    return np.array([round(quantile((code + 0.5) / 65_536) * 4096) / 4096 for code in range(65_536)])


def value_table(short: str, dtype: str, shape: tuple[int, ...]) -> Table | None:
    """The table of a tensor's values by code: bf16 bits, f32 or bytes, as stored. None: the codes are the values."""
    if short.endswith("weight_packed"):
        return None
    if short.endswith("weight_scale"):
        return _scale_table(EXPERT_STDS[short] / math.sqrt(shape[-1] * MXFP4_GROUP))
    if short == A_LOG:
        return _decay_table()
    gaussian = next((found for end, found in GAUSSIANS if short.endswith(end)), PROJECTION)
    std = gaussian.std / math.sqrt(shape[-1]) if gaussian.per_root_columns else gaussian.std
    values = np.clip(gaussian.mean + std * _normal_table(), gaussian.low, gaussian.high)
    return values.astype("<f4") if dtype == "F32" else to_bfloat16(values)


def _decay_table() -> Table:
    """A_log: the release's median and spread, and its long tail upwards (a few heads that forget at once)."""
    z = _normal_table()
    return np.clip(-0.2 + 0.25 * z + 2.0 * np.maximum(z - 1.8, 0.0), -0.7531, 2.4661).astype("<f4")


def _scale_table(std: float) -> Table:
    """Scale bytes: the power of two that gives uniform nibbles about this std, and one in eight groups next to it."""
    mantissa, exponent = math.frexp(std / NIBBLE_STD)
    table = np.full(256, 127 + exponent - (mantissa < math.sqrt(0.5)), np.uint8)
    table[:16] -= 1
    table[-16:] += 1
    return table


def to_bfloat16(values: npt.NDArray[np.float64]) -> npt.NDArray[np.uint16]:
    """Round finite values to bf16 bits, ties to even."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
