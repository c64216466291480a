"""The values and the vocabulary of synthetic checkpoints: reproducible alone, and distributed as promised."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt
import pytest

from k3ray.workers.checkpoint import synthetic_values
from k3ray.workers.checkpoint.safetensors_file import PlannedTensor
from k3ray.workers.checkpoint.synthetic_values import tensor_blocks, to_bfloat16
from k3ray.workers.checkpoint.synthetic_vocabulary import added_tokens, make_tokens, train_merges


def make(seed: int, name: str, short: str, dtype: str, shape: tuple[int, ...], num_heads: int = 1 << 30) -> bytes:
    blocks = tensor_blocks(seed, PlannedTensor(name, dtype, shape), short, num_heads)
    return b"".join(block.tobytes() for block in blocks)


def as_floats(short: str, dtype: str, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    data = make(0, short, short, dtype, shape)
    if dtype == "BF16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, "<f4")


@pytest.mark.parametrize("block_words", [1, 7, 1000])
def test_the_size_of_the_blocks_moves_nothing(monkeypatch: pytest.MonkeyPatch, block_words: int) -> None:
    kinds = [("self_attn.A_log", "F32", (37,)), ("norm.weight", "BF16", (5, 77)), ("w1.weight_packed", "U8", (33, 41))]
    whole = [make(1, "x", short, dtype, shape, num_heads=9) for short, dtype, shape in kinds]
    monkeypatch.setattr(synthetic_values, "BLOCK_WORDS", block_words)
    assert [make(1, "x", short, dtype, shape, num_heads=9) for short, dtype, shape in kinds] == whole


def test_codes_are_the_raw_stream_of_the_bit_generator() -> None:
    """numpy promises the bit generators' streams for ever, but not how integers() draws from them."""
    codes = make(5, "some.weight_packed", "w1.weight_packed", "U8", (100, 8))
    key = int.from_bytes(hashlib.sha256(b"5/some.weight_packed").digest(), "little")
    assert codes == np.random.SFC64(key).random_raw(100).astype("<u8").tobytes()


def test_to_bfloat16_rounds_to_even() -> None:
    values = np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -0.0, -3.14159, 1e-40])
    expected = [0x3F80, 0x3F80, 0x3F82, 0x3F81, 0x8000, 0xC049, 0x0001]
    assert to_bfloat16(values).tolist() == expected


# --- values --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_heads", [1, 3, 96, 127, 128, 200])
def test_a_log_has_a_zero_tail_after_the_heads(num_heads: int) -> None:
    values = np.frombuffer(make(0, "a", "self_attn.A_log", "F32", (128,), num_heads), "<f4")
    assert np.all(values[:num_heads] != 0) and not values[num_heads:].any()


def test_decay_parameters_are_distributed_like_the_released_ones() -> None:
    a_log = as_floats("self_attn.A_log", "F32", (4096,))
    dt_bias = as_floats("self_attn.dt_bias", "F32", (20_000,))
    # CHECKPOINT.md "Statistics": A_log median -0.1533, p10..p90 -0.5367..0.0743, -0.7531..2.4661
    assert np.percentile(a_log, [10, 50, 90]) == pytest.approx([-0.52, -0.2, 0.12], abs=0.05)
    assert a_log.min() > -0.7532 and 1.0 < a_log.max() < 2.4662
    # dt_bias median -4.6220, p10..p90 -6.4912..-2.5690, -7.8938..0.1792
    assert np.percentile(dt_bias, [10, 50, 90]) == pytest.approx([-6.47, -4.55, -2.63], abs=0.1)
    assert dt_bias.min() > -7.91 and dt_bias.max() < 0.21


@pytest.mark.parametrize(
    ("short", "mean", "std"),
    [
        ("input_layernorm.weight", 1.0, 0.15),
        ("self_attn.q_proj.weight", 0.0, 1 / 16),
        ("self_attn.g_proj.weight", 0.0, 1 / 16),
        ("self_attn.b_proj.weight", 0.0, 1.5 / 16),
        ("self_attn.q_b_proj.weight", 0.0, 2 / 16),
        ("self_attn.f_b_proj.weight", 0.0, 1 / 16),
        ("block_sparse_moe.gate.weight", 0.0, 1.6 / 16),
        ("block_sparse_moe.routed_expert_down_proj.weight", 0.0, 1 / 16),
        ("block_sparse_moe.shared_experts.down_proj.weight", 0.0, 0.4 / 16),
        ("mlp.gate_proj.weight", 0.0, 1.5 / 16),
        ("embed_tokens.weight", 0.0, 1.0),
        ("lm_head.weight", 0.0, 2.8 / 16),
    ],
)
def test_magnitudes(short: str, mean: float, std: float) -> None:
    values = as_floats(short, "BF16", (200, 256))
    assert values.mean() == pytest.approx(mean, abs=0.05 * std)
    assert values.std() == pytest.approx(std, rel=0.03)
    assert np.isfinite(values).all() and abs(values - mean).max() > 3.5 * std


@pytest.mark.parametrize("columns", [32, 96, 3584])
def test_expert_weights_have_the_std_of_a_projection(columns: int) -> None:
    scales = make(0, "s", "w2.weight_scale", "U8", (500, columns // 32))
    used = np.frombuffer(scales, np.uint8).astype(int)
    centre = int(np.median(used))
    assert set(used.tolist()) == {centre - 1, centre, centre + 1}
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    std = np.sqrt((table**2).mean()) * 2.0 ** (centre - 127) * np.sqrt(columns)
    assert 2**-0.5 < std < 2**0.5


# --- vocabulary ----------------------------------------------------------------------------------------------------


def test_made_tokens_are_unique_and_reachable() -> None:
    tokens = make_tokens("ab ab abc", 1000, seed=4)
    assert len(tokens) == len(set(tokens)) == 1000
    assert sorted(tokens[:256]) == [bytes([byte]) for byte in range(256)] and tokens[0] == b"!"
    known = set(tokens[:256])
    for token in tokens[256:]:
        assert any(token[:cut] in known and token[cut:] in known for cut in range(1, len(token)))
        known.add(token)


def test_training_finishes_characters_first() -> None:
    assert train_merges("中文中文 the the the", 1000)[256:] == [
        "中".encode()[:2],
        "文".encode()[:2],
        "中".encode(),
        "文".encode(),
        b"he",
        b"the",
        b" the",
        "中文".encode(),
        "中文中文".encode(),
    ]


def test_added_tokens_lie_where_the_release_has_them() -> None:
    ids = {name: token_id for token_id, (name, _) in added_tokens(163_584, 256).items()}
    assert ids["<|end_of_msg|>"] == 163_586 and ids["[EOT]"] == 163_593 and ids["<|media_begin|>"] == 163_602
    assert ids["<osagent_mode>"] == 163_649 and ids["[UNK]"] == 163_838 and ids["[PAD]"] == 163_839
    assert len(added_tokens(488, 24)) == 15 and max(added_tokens(488, 24)) == 511
