"""How many bytes a token's messages have on every way between actors: found by encoding messages of the same shape.

Arrow's schema and padding are in them, so that a run counts the same bytes. Steps from the thousandth on may have 8
bytes more in a frame or an answer, for their number's digits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from math import comb

import numpy as np
import numpy.typing as npt

from k3ray.workers.expert_owners import ExpertGroup, ExpertOwners
from k3ray.workers.frames import (
    ActivationFrame,
    ExpertReply,
    ExpertRequest,
    LogitsFrame,
    encode_activations,
    encode_expert_reply,
    encode_expert_request,
    encode_logits,
)
from k3ray.workers.message_counts import ARROW, DRIVER
from k3ray.workers.model.config import ModelConfig

FIRST_STEP = 1
Run = tuple[int, int]  # a stage's layers, first..stop-1


def stage_name(run: Run) -> str:
    """As StageSpec's part_name."""
    return f"layers {run[0]}..{run[1] - 1}"


def shard_name(shard: int, shards: int) -> str:
    """As ShardSpec's part_name."""
    return f"shard {shard} of {shards}"


@lru_cache(maxsize=512)
def frame_size(config: ModelConfig, layer: int, tokens: int = 1, step: int = FIRST_STEP) -> int:
    """A frame before a layer; before layer 0 it comes from the driver and has ids alone."""
    hidden = config.hidden_size if layer else 0
    blocks = -(-layer // config.attn_res_block_size)
    zeros = np.zeros(tokens, np.int64)
    frame = ActivationFrame(
        step, zeros, np.arange(tokens), zeros.astype(np.int32), zeros.astype(np.bool_),
        np.zeros((tokens, hidden), np.float32), np.zeros((tokens, blocks, hidden), np.float32),
    )  # fmt: skip
    return int(encode_activations(frame).size)


@lru_cache(maxsize=64)
def logits_size(config: ModelConfig, rows: int = 1, step: int = FIRST_STEP) -> int:
    """The last stage's answer for so many tokens that want logits."""
    places = np.zeros(rows, np.int64)
    frame = LogitsFrame(step, places, places, np.zeros((rows, config.vocab_size), np.float32))
    return int(encode_logits(frame).size)


@lru_cache(maxsize=4096)
def request_size(config: ModelConfig, layer: int, pairs: int, tokens: int = 1) -> int:
    """What a shard is asked: the latents of the tokens of which it has an expert, and which experts."""
    latents = np.zeros((tokens, config.routed_expert_hidden_size), np.float32)
    offsets = np.full(tokens + 1, pairs, np.int32)
    offsets[0] = 0
    return int(encode_expert_request(ExpertRequest(layer, latents, offsets, np.zeros(pairs, np.int32))).size)


@lru_cache(maxsize=4096)
def reply_size(config: ModelConfig, layer: int, pairs: int) -> int:
    """What it answers, where no expert is damaged."""
    outputs = np.zeros((pairs, config.routed_expert_hidden_size), np.float32)
    return int(encode_expert_reply(ExpertReply(layer, outputs)).size)


def token_ways(config: ModelConfig, runs: Sequence[Run], groups: Sequence[ExpertGroup], shards: int) -> dict[str, int]:
    """Bytes by way, "sender > receiver", of a token after the prompt.

    The ways between stages and driver are exact. Those to and from shards are expectations, where experts are asked
    for evenly: how many of a token's experts one shard has is then as in drawing without putting back.
    """
    ways = stage_ways(config, runs)
    tables = _pair_sizes(config)
    for run in runs:
        for group in groups:
            digits = Counter(len(str(layer)) for layer in group.layers if run[0] <= layer < run[1])
            for shard, count in enumerate(group.counts):
                if not digits or not count:
                    continue
                likely = _likely_pairs(config, count * config.num_experts / sum(group.counts))
                for way, sizes in zip(_ways(run, shard, shards), tables, strict=True):
                    each = {length: sum(part * sizes[length, pairs] for pairs, part in likely) for length in digits}
                    ways[way] = ways.get(way, 0) + sum(each[length] * layers for length, layers in digits.items())
    return {way: round(nbytes) for way, nbytes in ways.items()}


def stage_ways(
    config: ModelConfig, runs: Sequence[Run], tokens: int = 1, wanted: int = 1, step: int = FIRST_STEP
) -> dict[str, float]:
    """Bytes of one step from the driver down the stages and back. wanted: tokens that want logits."""
    ways: dict[str, float] = {f"{DRIVER}{ARROW}{stage_name(runs[0])}": frame_size(config, 0, tokens, step)}
    for run, following in pairwise(runs):
        ways[f"{stage_name(run)}{ARROW}{stage_name(following)}"] = frame_size(config, run[1], tokens, step)
    ways[f"{stage_name(runs[-1])}{ARROW}{DRIVER}"] = logits_size(config, wanted, step)
    return ways


def routed_ways(
    config: ModelConfig,
    runs: Sequence[Run],
    owners: ExpertOwners,
    shards: int,
    routing: Sequence[tuple[int, int, npt.NDArray[np.int32]]],
) -> dict[str, int]:
    """Bytes of requests and replies by way, exactly, for the recorded (step, layer, ids (tokens, k)) of a run."""
    ways: dict[str, int] = {}
    for _, layer, ids in routing:
        run = next(run for run in runs if run[0] <= layer < run[1])
        owned = owners.of(layer, ids)
        for shard in range(shards):
            mine = owned == shard
            pairs, rows = int(mine.sum()), int(mine.any(axis=1).sum())
            if not pairs:
                continue
            there, back = _ways(run, shard, shards)
            ways[there] = ways.get(there, 0) + request_size(config, layer, pairs, rows)
            ways[back] = ways.get(back, 0) + reply_size(config, layer, pairs)
    return ways


def add_ways(total: dict[str, int], ways: Mapping[str, float]) -> None:
    """Add whole bytes to a sum."""
    for way, nbytes in ways.items():
        total[way] = total.get(way, 0) + round(nbytes)


def chance(pairs: int, draws: int, count: int, whole: int) -> float:
    """That of `draws` different experts of `whole`, chosen evenly, `pairs` are among `count` of them."""
    return comb(count, pairs) * comb(whole - count, draws - pairs) / comb(whole, draws)


@lru_cache(maxsize=16)
def _pair_sizes(config: ModelConfig) -> tuple[dict[tuple[int, int], int], dict[tuple[int, int], int]]:
    """Of requests and of replies by (digits of the layer's number, pairs): nothing else of one token changes them."""
    lengths = sorted({len(str(layer)) for layer in config.moe_layers})
    keys = [(length, pairs) for length in lengths for pairs in range(1, config.num_experts_per_token + 1)]
    asked = {(length, pairs): request_size(config, 10 ** (length - 1), pairs) for length, pairs in keys}
    return asked, {(length, pairs): reply_size(config, 10 ** (length - 1), pairs) for length, pairs in keys}


def _likely_pairs(config: ModelConfig, mean: float) -> list[tuple[int, float]]:
    """(pairs of one token, how likely) of a shard with so many experts a layer, on an average over the layers."""
    experts, draws, low = config.num_experts, config.num_experts_per_token, int(mean)
    found: dict[int, float] = {}
    for mine, share in ((low, 1 - (mean - low)), (low + 1, mean - low)):
        for pairs in range(1, min(draws, mine) + 1) if share else ():
            found[pairs] = found.get(pairs, 0.0) + share * chance(pairs, draws, mine, experts)
    return list(found.items())


def _ways(run: Run, shard: int, shards: int) -> tuple[str, str]:
    stage, name = stage_name(run), shard_name(shard, shards)
    return f"{stage}{ARROW}{name}", f"{name}{ARROW}{stage}"
